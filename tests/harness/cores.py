"""Puts processes on chosen cores."""

import contextlib
import os
from pathlib import Path

__all__ = ["pin"]


def pin(pid: int, cores: set[int]) -> None:
    """Makes a process, with each of its threads, run only on these cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)
