"""`kvferry bench` calls the module of that name; `all` collects JSON with the environment."""

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvferry.cli.bench import command as bench
from kvferry.cli.main import ExitCode, main
from kvferry.cli.support.environment import environment


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A benchmark called `plan` that takes --size."""
    asked: list[object] = []
    module = types.ModuleType("kvferry.cli.bench.plan")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int)
        parser.add_argument("--json", action="store_true")

    def run(args: argparse.Namespace) -> ExitCode:
        asked.append((args.size, args.json))
        return ExitCode.OK

    module.add_arguments, module.run, module.QUICK_ARGS = add_arguments, run, ("--size", "1")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvferry.cli.bench.plan", module)
    return asked


def test_options_after_the_name_belong_to_the_benchmark(fake: list[object]) -> None:
    assert main(["bench", "plan", "--size", "7", "--json"]) == ExitCode.OK
    assert fake == [(7, True)]


def test_help_of_one_benchmark(fake: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["bench", "plan", "--help"])
    assert exited.value.code == 0
    assert "--size" in capsys.readouterr().out


def test_an_unknown_benchmark_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["bench", "nonsense"])
    assert exited.value.code == ExitCode.USAGE
    assert "nonsense" in capsys.readouterr().err


def test_all_writes_one_file_each_and_continues_after_a_failure(
    fake: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, 0, stdout='{"case": "a", "gbps": 1.5}\nnoise\n')

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setitem(sys.modules, "kvferry.cli.bench.engine", None)
    assert main(["bench", "all", "--out", str(tmp_path / "out"), "--only", "engine", "plan"]) == ExitCode.ERROR
    assert commands == [["bench", "plan", "--json", "--size", "1"]]
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert written["results"] == [{"case": "a", "gbps": 1.5}]
    assert written["environment"]["cores"] >= 1
    assert json.loads((tmp_path / "out" / "engine.json").read_text())["exit"] == ExitCode.ERROR
    assert "failed: engine" in capsys.readouterr().err


def test_every_benchmark_has_a_summary() -> None:
    assert set(bench.BENCHMARKS) >= {"engine", "transfer", "plan", "handoff", "calibrate"}


def test_the_environment_is_json_without_paths_or_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_KEY_FILE", "/somewhere/secret")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("KVFERRY_LOG", "/var/x")
    found = environment()
    text = json.dumps(found)
    assert "/somewhere" not in text
    assert "/var/x" not in text
    assert found["variables"] == {**found["variables"], "UCX_TLS": "tcp", "KVFERRY_KEY_FILE": "(set)"}  # type: ignore[dict-item]
    assert {"cpu", "cores", "python", "packages", "memory_gib"} <= found.keys()
