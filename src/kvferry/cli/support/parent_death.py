"""Ends a child process together with its supervisor, even if the supervisor is killed."""

import ctypes
import os
import signal

from kvferry.errors import FerryError

__all__ = ["SUPERVISOR_VARIABLE", "die_with_supervisor"]

SUPERVISOR_VARIABLE = "KVFERRY_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1


def die_with_supervisor() -> None:
    """Makes the kernel kill this process when the supervisor that started it ends. Does nothing without a supervisor.

    A child calls it before anything else. Linux: prctl(2), PR_SET_PDEATHSIG.
    """
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor is None:
        return
    # KILL, not TERM: no process is left that would kill one that is slow to end.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if str(os.getppid()) != supervisor:  # it ended before the call above
        raise FerryError(f"the supervisor {supervisor!r} of this process is gone: start it again with `kvferry up`")
