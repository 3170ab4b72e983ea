"""kvferry sim, as a user types it."""

import json

import pytest

from kvferry.cli.main import ExitCode, main
from kvferry.testing.simulator.mutants import MUTANTS


def test_json_has_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--runs", "200", "--seed", "3", "--jobs", "1", "--json"]) == ExitCode.OK
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    result = json.loads(line)
    assert set(result) == {"seed", "handoffs", "violations", "mutant", "seconds"}
    assert (result["seed"], result["violations"], result["mutant"]) == (3, 0, None)
    assert result["handoffs"] >= 200
    assert "seed 3" in captured.err


def test_a_fresh_seed_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--runs", "1", "--jobs", "1"]) == ExitCode.OK
    captured = capsys.readouterr()
    seed = captured.err.split()[1]
    assert f"from seed {seed} " in captured.out
    assert "no invariant violated" in captured.out


def test_a_mutant_is_caught_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sim", "--runs", "5000", "--seed", "1", "--jobs", "1", "--mutant", "confirm-before-write"]
    assert main(command) == ExitCode.OK
    assert "mutant confirm-before-write: " in capsys.readouterr().out


def test_one_world_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--world", "5"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("Scenario(seed=5")
    assert "dispatch r1000001#0" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runs", "0"], "--runs=0 and --jobs=1 must be at least 1"),
        (["--seed", "-1"], "--seed=-1 must be between 0 and 2147483647"),
        (["--mutant", "none"], f"mutant 'none' does not exist: choose one of {', '.join(sorted(MUTANTS))}"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--jobs", "1", *options]) == ExitCode.ERROR
    assert f"kvferry sim: {message}\n" in capsys.readouterr().err
