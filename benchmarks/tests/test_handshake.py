"""`python -m benchmarks.handshake` prints one object per number of peers, and refuses what is not a number."""

import json

import pytest

from benchmarks.command import main
from benchmarks.handshake import add_arguments, run


def test_bench_handshake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("handshake", add_arguments, run, ["--peers", "1,3", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["peers"] for line in lines[:-1]] == [1, 3]
    assert all(line["ms_per_pair"] > 0 for line in lines[:-1])
    assert all(0 < line["bytes_per_peer"] < 1024 for line in lines[:-1])


@pytest.mark.parametrize("peers", ["", "0", "-3", "a,b", "1,,2", "1.5"])
def test_bench_handshake_refuses_what_is_not_a_number(peers: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main("handshake", add_arguments, run, [f"--peers={peers}"])
    assert "not a list of numbers of 1 or more" in capsys.readouterr().err
