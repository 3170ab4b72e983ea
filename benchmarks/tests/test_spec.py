"""`python -m benchmarks.spec`: one object per line with the promised keys; an answer that differs is an error."""

import json

import pytest

from benchmarks import spec
from benchmarks.command import main
from kvferry.cli.main import ExitCode

pytestmark = pytest.mark.engine
QUICK = ["--requests", "2", "--new-tokens", "12", "--prompt-tokens", "24"]
KEYS = {
    "serving", "method", "acceptance_rate", "acceptance_length", "acceptance_by_position", "tok_s", "tpot_ms",
}  # fmt: skip


def test_json_has_one_object_per_serving(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("spec", spec.add_arguments, spec.run, ["--json", *QUICK]) == ExitCode.OK
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["serving"], row["method"]) for row in rows] == [
        ("standalone", "mtp"),
        ("pd", "mtp"),
        ("pd_unsafe", "mtp"),
    ]
    for row in rows:
        assert row.keys() >= KEYS
        assert len(row["acceptance_by_position"]) == 3
        assert row["tok_s"] > 0 < row["tpot_ms"]
    assert rows[2]["acceptance_rate"] < 0.5 * rows[1]["acceptance_rate"]
    assert spec.UNSAFE in captured.err


def test_a_different_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(spec, "_plain", lambda _: [[1]])
    argv = ["--json", "--method", "ngram", "--serving", "standalone", *QUICK]
    assert main("spec", spec.add_arguments, spec.run, argv) == ExitCode.ERROR
    assert "an answer differs" in capsys.readouterr().err
