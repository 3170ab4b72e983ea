"""Binds processes to chosen cores."""

import contextlib
import os
from pathlib import Path

__all__ = ["pin"]


def pin(pid: int, cores: set[int]) -> None:
    """Binds a process and all its threads to these cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)
