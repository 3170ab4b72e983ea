"""`kvferry bench handoff` measures real hand-offs between real processes, and prints what it was asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.tiny_model import make_tiny_model

KEYS = {
    "mode", "prompt_tokens", "ttft_ratio", "ttft_ratio_plain", "gbps", "one_long_gbps", "step_ms_idle",
    "step_ms_during",
}  # fmt: skip


@pytest.mark.process
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_row_per_mode_and_prompt(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "llama")
    command = [sys.executable, "-m", "kvferry", "bench", "handoff", "--json", "--model", str(tiny), "--threads", "1",
               "--prompts", "64", "200", "--repeats", "1", "--mib", "16"]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["mode"], row["prompt_tokens"]) for row in rows] == [
        ("pull", 64), ("pull", 200), ("push", 64), ("push", 200)
    ]  # fmt: skip
    for row in rows:
        assert row.keys() >= KEYS
        assert all(row[key] > 0 for key in KEYS - {"mode"}), row


def test_wrong_numbers_are_reported_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "bench", "handoff", "--repeats", "0"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "--repeats 0" in done.stderr
    assert done.stdout == ""
