"""Where time comes from. State machines take the time as an argument; drivers take a Clock.

Monotonic times never cross a process: what is sent is the time that remains.
"""

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock"]


class Clock(Protocol):
    """Seconds on one process's own monotonic clock; its zero means nothing."""

    def now_s(self) -> float:
        """The time now, in seconds. Never goes back."""
        ...


class MonotonicClock:
    """The real one."""

    def now_s(self) -> float:
        """The time now, in seconds, of `time.monotonic`."""
        return time.monotonic()
