"""Processes on chosen cores."""

import contextlib
import os
from pathlib import Path

__all__ = ["pin"]


def pin(pid: int, cores: set[int]) -> None:
    """Let a process, and each of its threads, run on these cores only."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)
