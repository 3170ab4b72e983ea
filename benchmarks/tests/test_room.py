"""`python -m benchmarks.room`: waits by kind; the large prompt and those after it wait within their bounds."""

import json

import pytest

from benchmarks import room
from benchmarks.command import main
from kvferry.cli.main import ExitCode

pytestmark = pytest.mark.engine


def test_nothing_waits_for_long(capsys: pytest.CaptureFixture[str]) -> None:
    quick = [
        "--num-blocks",
        "32",
        "--large",
        "400",
        "--loops",
        "2",
        "--small",
        "100",
        "--answer",
        "20",
        "--steps",
        "150",
    ]
    assert main("room", room.add_arguments, room.run, ["--json", "--overtake", "0", *quick]) == ExitCode.OK
    rows = {row["kind"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["tiny"]["longest_wait_steps"] <= 2, "a whole answer of others would be 20"
    assert rows["large"]["longest_wait_steps"] <= 30, "the loops go on for 150"
