"""Processes that are forked from one which has imported torch and kvferry: a worker is ready after one second of a
core instead of four.

The standard library's fork server does it, as the launcher does for ranks: it has no threads and has computed nothing,
so there is nothing that a fork could break. What a forked process runs, by `python -m`'s own means, is the same as in a
process of its own. Tests of the command line (tests/cli) start real interpreters.
"""

import atexit
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.cli.support.parent_death import SUPERVISOR_VARIABLE

__all__ = ["Forked", "fork_context"]

_THREADS = "OMP_NUM_THREADS"


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Returns a context whose processes begin with the imports of tests.harness.imported, and with one torch thread."""
    multiprocessing.set_forkserver_preload(["tests.harness.imported"])
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"  # torch reads it once
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ[_THREADS]
        if before is not None:
            os.environ[_THREADS] = before
    return multiprocessing.get_context("forkserver")


class Forked:
    """`python -m MODULE ARGUMENTS` in a session of its own, with this environment. Any thread may use it."""

    def __init__(self, module: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Starts it; it appends what it prints to `log`. It ends with this process, however this one ends."""
        self._process = fork_context().Process(
            target=_become, args=(module, list(argv), dict(environment), str(log)), name=f"{module} {argv[0]}"
        )
        self._process.daemon = True
        self._process.start()
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Returns its exit status, or minus the signal that ended it; None while it runs."""
        return self.wait(0.0)

    def wait(self, within_s: float) -> int | None:
        """Returns the same, as soon as it has ended; None after `within_s`."""
        with self._lock:
            self._process.join(within_s)
            return self._process.exitcode


def _become(module: str, argv: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.environ[SUPERVISOR_VARIABLE] = str(os.getppid())
    with open(log, "ab") as file, open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    sys.argv = [module, *argv]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without them
