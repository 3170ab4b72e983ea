"""kvferry compare, facts, key and the fleet's matrix."""

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvferry.cli.main import ExitCode, main
from kvferry.cli.support.fleet_matrix import run_fleet
from kvferry.handshake.exchange import LocalSide
from kvferry.handshake.facts import Facts
from kvferry.handshake.fleet_verdict import Member, fleet_matrix, shared_ids
from kvferry.settings import Role
from kvferry.wire.hello import encode_hello
from tests.attacks.fuzz import engine
from tests.harness.handshake_examples import decode_facts, facts


def save(
    path: Path, stated: Facts, side: LocalSide | None = None, name: str = "e", role: str = "prefill",
    limits: dict[str, int] | None = None,
) -> str:  # fmt: skip
    body: dict[str, object] = {"engine": name, "incarnation": "i1", "role": role, "facts": stated.to_json()}
    if limits is not None:
        body["limits"] = limits
    if side is not None:
        body["hello"] = base64.b64encode(encode_hello(side.hello)).decode()
    path.write_text(json.dumps(body))
    return str(path)


@contextmanager
def worker(body: bytes) -> Iterator[str]:
    """A live worker, as far as GET /v1/kvferry needs one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/kvferry" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # its name in the base class
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("changes", "verdict", "status"),
    [
        ({}, "compatible", 0),
        ({"block_tokens": (32, 32)}, "notes", 0),
        ({"engine_version": "9"}, "compatible", 0),
        ({"head_size": 64}, "refused", 3),
    ],
)
def test_compare_of_saved_facts(
    changes: dict[str, object], verdict: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = save(tmp_path / "a.json", facts()), save(tmp_path / "b.json", decode_facts(**changes))
    assert main(["compare", a, b, "--json"]) == status
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == verdict
    assert all(row.keys() >= {"fact", "class", "a", "b", "remedy"} for row in result["rows"])
    assert len(result["rows"]) == len(changes)
    assert main(["compare", b, a]) == status
    text = capsys.readouterr().out
    assert ("refused" in text) is (status == 3)


CONTEXT = {"max_model_len": 8192, "block_tokens": 16, "blocks": 4000, "tokens": 8192}
CACHE = {"max_model_len": 8192, "block_tokens": 16, "blocks": 40, "tokens": 641}
VLLM = {"max_model_len": 4096, "block_tokens": 16, "blocks": 100}


@pytest.mark.parametrize(
    ("a", "b", "pair", "text"),
    [
        (CONTEXT, CACHE, 641, "641 tokens; a 8,192 (--max-model-len), b 641 (its cache: --num-blocks or --cache-gb;"),
        (CACHE, CONTEXT, 641, "a 641 (its cache: --num-blocks or --cache-gb; --max-model-len is 8,192), b 8,192 ("),
        (VLLM, CONTEXT, 1600, "1,600 tokens; a 1,600 (its cache"),
        (None, CONTEXT, None, None),
    ],
)
def test_the_longest_request_of_the_pair_is_that_of_the_smaller_side(
    a: dict[str, int] | None, b: dict[str, int], pair: int | None, text: str | None, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sides = (save(tmp_path / "a.json", facts(), limits=a), save(tmp_path / "b.json", decode_facts(), limits=b))
    assert main(["compare", *sides, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["longest_request"]["pair"] == pair
    assert main(["compare", *sides]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (text in shown) if text is not None else ("longest prompt" not in shown)


def test_compare_strict(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a.json", facts()), save(tmp_path / "b.json", decode_facts(hma=True))
    assert main(["compare", a, b]) == 0
    assert main(["compare", a, b, "--strict"]) == 3


def test_the_table_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (
        save(tmp_path / "a.json", facts(speculation=None)),
        save(tmp_path / "b.json", decode_facts(speculation=None, kv_dtype="fp8", kv_layout="HND")),
    )
    assert main(["compare", a, b]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "fact class a b what to do",
        "kv.dtype must match 'bfloat16' 'fp8_e4m3' on b: kvferry serve --kv-dtype bfloat16",
        "kv.layout bridged 'NHD' 'HND' nothing to do: the planner follows the strides; different orders make "
        "more and shorter runs",
        "refused: they cannot share a cache",
    ]


def test_compare_of_a_live_worker_and_its_saved_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "p.json", facts())
    with worker((tmp_path / "p.json").read_bytes()) as url:
        assert main(["facts", url, "-o", str(tmp_path / "saved.json")]) == 0
        assert main(["compare", url, save(tmp_path / "d.json", decode_facts(tp=2)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "notes"
    assert json.loads((tmp_path / "saved.json").read_text()) == json.loads((tmp_path / "p.json").read_text())


def test_layouts_that_do_not_fit_are_refused_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p, d = engine("p0", Role.PREFILL), engine("d0", Role.DECODE, tp=2)
    a = save(tmp_path / "a.json", p.facts, p)
    assert main(["compare", a, save(tmp_path / "b.json", d.facts, d, role="decode"), "--json"]) == 0
    capsys.readouterr()
    broken = json.loads((tmp_path / "b.json").read_text())
    hello = base64.b64decode(broken["hello"]).replace(b"layers.1.attn", b"layers.9.attn")
    (tmp_path / "b.json").write_text(json.dumps({**broken, "hello": base64.b64encode(hello).decode()}))
    assert main(["compare", a, str(tmp_path / "b.json"), "--json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "refused"
    assert result["rows"][-1]["fact"] == "layout"
    assert "layers.9.attn" in result["rows"][-1]["remedy"]


@pytest.mark.parametrize(
    "body",
    [
        *("", "{}", "[]", '{"facts": 1}', '{"facts": {"a": 1}}', '{"facts": {}, "hello": "!"}'),
        '{"facts": {"a": ' + 100_000 * "[" + "}}",
    ],
    ids=range(7),
)
def test_files_without_facts_are_refused(body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(body)
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 1
    assert "does not hold the facts of a worker" in capsys.readouterr().err


def test_missing_files_and_unreachable_urls_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / "no"), str(tmp_path / "no")]) == 1
    assert "cannot read" in capsys.readouterr().err
    assert main(["compare", "http://127.0.0.1:9", "http://127.0.0.1:9"]) == ExitCode.UNREACHABLE
    assert "does not answer: Connection refused. Is it" in capsys.readouterr().err


@contextmanager
def something_else(answer: bytes) -> Iterator[str]:
    """Yields a port on which another kind of server listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("command", ["compare", "plan", "facts", "doctor"])
@pytest.mark.parametrize(
    "answer",
    [b"220 smtp ready\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b""],
    ids=["no HTTP", "broken off", "nothing"],
)
def test_a_server_that_is_no_worker_is_refused(
    command: str, answer: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [str(tmp_path / "other.json")] if command in ("compare", "plan") else []
    with something_else(answer) as url:
        assert main([command, url, *other]) == ExitCode.UNREACHABLE
    said = capsys.readouterr()
    assert "does not answer" in said.err + said.out


def test_an_invalid_url_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["facts", "http://a b"]) == ExitCode.UNREACHABLE
    assert "does not answer: URL can't contain control characters" in capsys.readouterr().err


def test_key_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", str(tmp_path / "key")]) == 0
    assert "--key-file" in capsys.readouterr().err
    assert main(["key", "new", str(tmp_path / "key")]) == 1


def member(name: str, stated: Facts, role: Role, incarnation: str = "i") -> Member:
    return Member(name, name, incarnation, role, stated)


def test_the_matrix_has_every_pair() -> None:
    cells = fleet_matrix(
        [
            member("p0", facts(), Role.PREFILL),
            member("p1", facts(kv_dtype="fp8"), Role.PREFILL),
            member("d0", decode_facts(), Role.DECODE),
            member("b0", facts(role=Role.BOTH), Role.BOTH),
        ]
    )
    assert {(cell.prefill.name, cell.decode.name): str(cell.verdict.kind) for cell in cells} == {
        ("p0", "d0"): "compatible",
        ("p0", "b0"): "compatible",
        ("p1", "d0"): "refused",
        ("p1", "b0"): "refused",
        ("b0", "d0"): "compatible",
    }


def test_two_workers_with_one_id_are_named() -> None:
    one, other = member("x", facts(), Role.PREFILL), member("x", facts(), Role.PREFILL, "i2")
    assert shared_ids([one, one]) == ()
    assert shared_ids([one, other]) == ("engine id 'x' is used by x and x: give each its own --engine-id",)


def test_doctor_of_a_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p = save(tmp_path / "p.json", facts(), name="p0")
    d = save(tmp_path / "d.json", decode_facts(), name="d0", role="decode")
    bad = save(tmp_path / "bad.json", decode_facts(head_size=64), name="d1", role="decode")
    assert run_fleet([p, d], as_json=False) == 0
    assert run_fleet([p, d, bad], as_json=False) == 3
    text = capsys.readouterr().out
    assert "model.head_size" in text
    assert "NO" in text
    with worker((tmp_path / "p.json").read_bytes()) as url:
        assert run_fleet([url, d, "http://127.0.0.1:9"], as_json=True) == 4
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["verdict"] == "compatible"
    assert lines[-1] == {"pairs": 1, "refused": 0, "unreachable": 1, "shared_ids": [], "exit": 4}


def test_a_router_stands_for_its_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p = save(tmp_path / "p.json", facts(), name="p0")
    d = save(tmp_path / "d.json", decode_facts(), name="d0", role="decode")
    with worker(Path(p).read_bytes()) as prefill, worker(Path(d).read_bytes()) as decode:
        listed = json.dumps({"role": "router", "workers": [{"url": prefill}, {"url": decode}]}).encode()
        with worker(listed) as router:
            assert main(["doctor", router, prefill, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pairs"] == 1


def test_a_fleet_without_a_pair_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_fleet([save(tmp_path / "p.json", facts())], as_json=False) == ExitCode.ERROR
    assert "there is no pair here: give the URLs of a prefill and a decode worker" in capsys.readouterr().out


def test_models_are_compared_by_their_shapes(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tiny), str(tiny), "--tp", "1,2"]) == 0
    assert "parallel.tp" in capsys.readouterr().out
    assert main(["compare", str(tiny), str(tiny), "--dtype", "float32,bfloat16"]) == 3
