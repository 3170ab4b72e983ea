"""Fixtures: a tiny model on disk, and the command run in this process or in another."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a Llama of three layers, as a Hugging Face directory."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `kvferry ...` as a process. If it still runs at the end of the test, it is killed, and the test fails."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(*argv: str, **env: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start_one
    left = [process.args for process in processes if process.poll() is None]
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not left, f"left running: {left}"
