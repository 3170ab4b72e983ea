"""A monotonic clock that a test moves forward, so that simulated latency costs no time."""

import time

import pytest

__all__ = ["MovedClock"]


class MovedClock:
    """`time.monotonic` for the whole process: the real time plus what the test has added."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = time.monotonic
        self._added_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self._real() + self._added_s)

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        self._added_s += seconds
