"""`python -m benchmarks.large_bodies`: a row per body and server, with small bodies. No figure is checked."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import large_bodies
from kvferry.cli.main import ExitCode
from tests.harness.tiny_model import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.process]


def test_a_row_per_body_and_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    large_bodies.add_arguments(parser)
    model, out = make_tiny_model(tmp_path / "model"), tmp_path / "large_bodies.json"
    args = ["--model", str(model), "--repeats", "1", "--percent", "2", "--json", "--out", str(out)]
    assert large_bodies.run(parser.parse_args(args)) in (ExitCode.OK, ExitCode.ERROR)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["server"] for row in rows] == ["router"] * 4 + ["worker"] * 4
    assert all(row["health_longest_s"] > 0 < row["gap_longest_s"] for row in rows if row["body"] != "nothing")
    recorded = json.loads(out.read_text())
    assert recorded["results"] == rows
    assert "cpu" in recorded["environment"]
