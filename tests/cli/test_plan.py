"""kvferry plan and kvferry bench plan, as a user calls them."""

import argparse
import base64
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvferry.cli.bench import plan
from kvferry.cli.main import ExitCode, main
from kvferry.layout.builders import AxisOrder, LayoutBuilder, head_range, mamba2_parts
from kvferry.layout.description import CacheLayout, Rank
from kvferry.settings import Role
from kvferry.wire.hello import Hello, RankHello, encode_hello
from kvferry.wire.layout_codec import encode_layout, save_layouts

Capture = pytest.CaptureFixture[str]


def hybrid(tp: int, pp: int, order: AxisOrder, block_tokens: int, encoding: str = "bf16") -> list[CacheLayout]:
    ranks = []
    for index in range(tp * pp):
        pp_rank, tp_rank = divmod(index, tp)
        builder = LayoutBuilder(Rank(index, tp_rank, tp, pp_rank, pp))
        full, window, states = builder.full(block_tokens), builder.window(block_tokens, 20), builder.states()
        for number in range(4 * pp_rank // pp, 4 * (pp_rank + 1) // pp):
            heads = head_range(4, tp_rank, tp)
            if number == 3:
                parts = mamba2_parts(heads=4, head_dim=2, groups=2, state=2, conv_width=3, tp_rank=tp_rank, tp_size=tp)
                builder.state("layers.3.mamba", states, parts, num_blocks=4)
            else:
                builder.attention(
                    f"layers.{number}.attn",
                    window if number == 2 else full,
                    heads=heads,
                    head_dim=4,
                    element_bytes=2,
                    encoding=encoding,
                    order=order,
                    num_blocks=32,
                )
        ranks.append(builder.build())
    return ranks


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    a, b = tmp_path / "a.json", tmp_path / "b.kvl"
    save_layouts(a, hybrid(2, 2, AxisOrder.NHD, 8))
    save_layouts(b, hybrid(1, 1, AxisOrder.HND, 12))
    return str(a), str(b)


def test_the_table_has_one_line_per_edge(files: tuple[str, str], capsys: Capture) -> None:
    assert main(["plan", *files, "--tokens", "50"]) == ExitCode.OK
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["from", "to", "layers", "parts", "heads", "runs", "bytes/run", "size", "how", "ms"]
    assert [line.split()[:3] for line in out[1:5]] == [
        ["0", "0", "layers.0-1.attn"],
        ["1", "0", "layers.0-1.attn"],
        ["2", "0", "layers.2.attn"],
        ["3", "0", "layers.2.attn"],
    ]
    assert "50 tokens from 4 prefill ranks to 1 decode rank: 4 edges, " in out[-1]
    assert out[-1].endswith(" ms.")


def test_json_has_one_object_per_line_and_the_bytes_are_right(files: tuple[str, str], capsys: Capture) -> None:
    assert main(["plan", *files, "--tokens", "50", "--json", "--scattered"]) == ExitCode.OK
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["source_rank"] for row in rows[:-1]] == [0, 1, 2, 3]
    # Two layers, K and V, 50 tokens, 2 heads of 8 bytes.
    assert rows[0]["bytes"] == 2 * 2 * 50 * 2 * 8
    assert rows[0]["runs"] == 2 * 2 * 50 * 2
    assert rows[-1]["summary"]["bytes"] == sum(row["bytes"] for row in rows[:-1])


def test_the_picture_is_svg_with_one_band_per_edge(files: tuple[str, str], tmp_path: Path) -> None:
    target = tmp_path / "plan.svg"
    assert main(["plan", *files, "--tokens", "50", "--svg", str(target)]) == ExitCode.OK
    root = ElementTree.fromstring(target.read_text())
    bands = root.findall("{http://www.w3.org/2000/svg}path")
    titles = [band.findtext("{http://www.w3.org/2000/svg}title") or "" for band in bands]
    assert [title.split(":")[0] for title in titles] == ["0 to 0", "1 to 0", "2 to 0", "3 to 0"]


def test_a_picture_that_cannot_be_written_is_reported(files: tuple[str, str], tmp_path: Path, capsys: Capture) -> None:
    assert main(["plan", *files, "--svg", str(tmp_path / "no" / "x.svg")]) == ExitCode.ERROR
    assert "No such file or directory. Choose another path" in capsys.readouterr().err


def test_a_pair_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, capsys: Capture) -> None:
    save_layouts(tmp_path / "a.json", hybrid(1, 1, AxisOrder.NHD, 8, "fp8_e4m3"))
    save_layouts(tmp_path / "b.json", hybrid(1, 1, AxisOrder.NHD, 8))
    assert main(["plan", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == ExitCode.INCOMPATIBLE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "encoding: B='bf16' A='fp8_e4m3'" in captured.err


def test_more_tokens_than_fit_are_refused(files: tuple[str, str], capsys: Capture) -> None:
    assert main(["plan", *files, "--tokens", "100000"]) == ExitCode.ERROR
    assert "--tokens 100000: the two caches have room for 1 to 256 tokens" in capsys.readouterr().err


def test_a_missing_file_is_reported(files: tuple[str, str], capsys: Capture) -> None:
    assert main(["plan", files[0] + "x", files[1]]) == ExitCode.ERROR
    assert "cannot read" in capsys.readouterr().err


class _Worker(BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        known = self.path == "/v1/kvferry"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(self.body if known else b"")

    def log_message(self, *args: object) -> None:
        """Runs the command, and checks that nothing is on stderr."""


@pytest.fixture
def worker() -> Iterator[str]:
    """Yields the address of a live worker, over a real socket."""
    ranks = tuple(
        RankHello(layout=encode_layout(layout), transport="memory", transport_metadata=b"")
        for layout in hybrid(2, 1, AxisOrder.NHD, 8)
    )
    hello = Hello(engine="e", incarnation="i", role=Role.PREFILL, ranks=ranks)
    _Worker.body = json.dumps({"hello": base64.b64encode(encode_hello(hello)).decode(), "more": 1}).encode()
    with HTTPServer(("127.0.0.1", 0), _Worker) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_live_worker_and_its_saved_facts_give_the_same_plan(
    worker: str, tmp_path: Path, files: tuple[str, str], capsys: Capture
) -> None:
    assert main(["plan", worker, files[1], "--tokens", "20"]) == ExitCode.OK
    live = capsys.readouterr().out
    assert "20 tokens from 2 prefill ranks to 1 decode rank" in live
    (tmp_path / "facts.json").write_bytes(_Worker.body)
    assert main(["plan", str(tmp_path / "facts.json"), files[1], "--tokens", "20"]) == ExitCode.OK
    assert capsys.readouterr().out == live


def test_an_unreachable_worker_is_reported(files: tuple[str, str], capsys: Capture) -> None:
    assert main(["plan", "http://127.0.0.1:9", files[1]]) == ExitCode.UNREACHABLE
    assert "does not answer" in capsys.readouterr().err


def test_a_file_of_another_kind_is_refused(tmp_path: Path, files: tuple[str, str], capsys: Capture) -> None:
    (tmp_path / "x.json").write_text('{"hello": "not base64!"}')
    assert main(["plan", str(tmp_path / "x.json"), files[1]]) == ExitCode.ERROR
    assert "neither a layout file nor the description of a worker" in capsys.readouterr().err


def test_facts_saved_by_an_older_release_have_no_layout(
    tmp_path: Path, files: tuple[str, str], capsys: Capture
) -> None:
    (tmp_path / "facts.json").write_text('{"engine": "-", "role": "both", "facts": {}}')
    assert main(["plan", str(tmp_path / "facts.json"), files[1]]) == ExitCode.ERROR
    assert "has facts and no layout. Save it again with this version" in capsys.readouterr().err


def test_the_benchmark_prints_what_it_promises(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [case for case in plan.cases(quick=True) if case.tokens < 5000]
    monkeypatch.setattr(plan, "cases", lambda quick: small[:1])
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    assert plan.run(parser.parse_args(["--json", "--repeat", "1"])) == ExitCode.OK
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["case"].split(":")[0] for row in rows] == ["direct", "staged"]
    assert all({"case", "runs", "ns_per_run", "bytes_per_run"} <= row.keys() for row in rows)
    assert all(row["bytes_per_run"] <= 64 for row in rows)


def test_plan_loads_no_torch() -> None:
    code = "import sys, kvferry.cli.plan; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_models_are_planned_with_a_shape_for_each_side(tiny: Path, capsys: Capture) -> None:
    assert main(["plan", str(tiny), str(tiny), "--tp", "1,2", "--tokens", "50", "--json"]) == ExitCode.OK
    *edges, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(edge["source_rank"], edge["destination_rank"]) for edge in edges] == [(0, 0), (0, 1)]
    assert (last["summary"]["source_ranks"], last["summary"]["destination_ranks"]) == (1, 2)


def test_a_saved_model_is_planned_like_the_model_itself(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["facts", str(tiny), "--pp", "3", "-o", str(tmp_path / "facts.json")]) == ExitCode.OK
    assert main(["plan", str(tmp_path / "facts.json"), str(tiny), "--tokens", "50"]) == ExitCode.OK
    saved = capsys.readouterr().out
    assert main(["plan", str(tiny), str(tiny), "--pp", "3,1", "--tokens", "50"]) == ExitCode.OK
    assert capsys.readouterr().out == saved
    assert "from 3 prefill ranks to 1 decode rank: 3 edges" in saved


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tp", "1,2,3"], "--tp 1,2,3: give one value, or one for each of the two sides"),
        (["--tp", "two"], "--tp 'two' is not a number"),
        (["--kv-dtype", "int3"], "--kv-dtype 'int3': choose from auto, float32"),
    ],
)
def test_an_impossible_shape_is_refused(flags: list[str], problem: str, tiny: Path, capsys: Capture) -> None:
    assert main(["plan", str(tiny), str(tiny), *flags]) == ExitCode.ERROR
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("scattered", [[], ["--scattered"]])
@pytest.mark.parametrize("model", ["byte-mtp-hybrid", "byte-mtp-window"])
def test_groups_that_share_pages_get_separate_blocks(model: str, scattered: list[str], capsys: Capture) -> None:
    assert main(["plan", model, model, "--tp", "2,1", *scattered]) == ExitCode.OK
    assert "2 edges" in capsys.readouterr().out
