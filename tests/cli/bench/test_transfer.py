"""The benchmarks of transfers run, check their own bytes and print what was promised."""

import json
from pathlib import Path

import pytest

from kvferry.cli.bench import calibrate, transfer
from kvferry.cli.bench.transfer import CASES, layouts
from kvferry.cli.main import ExitCode, main
from kvferry.layout.pairing import pair
from kvferry.transport.staging.cost import CostModel, calibration_path, load_cost_model

KEYS = {
    "case", "bytes", "direct_gbps", "staged_gbps", "chosen", "chosen_gbps", "one_long_gbps", "memcpy_gbps",
}  # fmt: skip


@pytest.mark.parametrize("key", CASES)
def test_every_case_pairs_and_moves_the_same_bytes(key: str) -> None:
    sources, destination = layouts(CASES[key], 128)
    assert len(pair(sources, destination).edges) == CASES[key].tp
    assert destination.regions[0].num_bytes == 128 * transfer.TOKEN_BYTES
    assert sum(region.num_bytes for source in sources for region in source.regions) == destination.regions[0].num_bytes


@pytest.mark.process
def test_bench_transfer_prints_one_object_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--mib", "4", "--repeats", "1", "--case", "a", "d", "--json"]) == ExitCode.OK
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["case"] for row in rows] == ["a", "d"]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["bytes"] == 4 << 20
        assert row["chosen_gbps"] == row[f"{row['chosen']}_gbps"]
        assert row["direct_gbps"] > 0 < row["memcpy_gbps"]
    assert (rows[0]["direct_runs"], rows[1]["direct_runs"]) == (1, 4096)


@pytest.mark.process
def test_bench_calibrate_saves_what_workers_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    assert main(["bench", "calibrate", "--mib", "8", "--repeats", "1", "--json"]) == ExitCode.OK
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = load_cost_model()
    assert model.origin == lines[-1]["origin"] != "default"
    assert [point["run_bytes"] for point in lines if point.get("curve") == "read"][:3] == [256, 1024, 4096]
    assert model.read[0][0] == 256
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]


def test_a_dry_run_keeps_the_old_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "measure", lambda *_args, **_options: CostModel(origin="new"))
    assert main(["bench", "calibrate", "--dry-run"]) == ExitCode.OK
    assert list(tmp_path.iterdir()) == []
    assert main(["bench", "calibrate"]) == ExitCode.OK
    assert load_cost_model().origin == "new"
    assert str(calibration_path()) in capsys.readouterr().out


def test_a_path_that_cannot_be_written_is_found_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "file"))
    assert main(["bench", "calibrate"]) == ExitCode.ERROR
    assert "Set KVFERRY_CACHE" in capsys.readouterr().err
