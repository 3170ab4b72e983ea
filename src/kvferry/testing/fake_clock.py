"""A clock that a test moves by hand."""

__all__ = ["FakeClock"]


class FakeClock:
    """A clock that starts at `time_s` and moves only by `advance`."""

    def __init__(self, time_s: float = 1000.0) -> None:
        self.time_s = time_s

    def now_s(self) -> float:
        """Returns the time that the test has set."""
        return self.time_s

    def advance(self, seconds: float) -> None:
        """Moves the clock forward by `seconds`."""
        self.time_s += seconds
