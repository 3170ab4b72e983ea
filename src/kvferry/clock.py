"""The source of time. State machines take the time as an argument; drivers take a Clock.

Monotonic times are never sent to another process: messages hold the time that remains.
"""

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock"]


class Clock(Protocol):
    """A process's own monotonic clock, in seconds from an arbitrary zero."""

    def now_s(self) -> float:
        """Returns the time now, in seconds. It never goes back."""
        ...


class MonotonicClock:
    """The real clock."""

    def now_s(self) -> float:
        """Returns the seconds of `time.monotonic`."""
        return time.monotonic()
