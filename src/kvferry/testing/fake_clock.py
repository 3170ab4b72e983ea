"""A clock that a test moves by hand."""

__all__ = ["FakeClock"]


class FakeClock:
    """Starts at `time_s`; `advance` moves it."""

    def __init__(self, time_s: float = 1000.0) -> None:
        self.time_s = time_s

    def now_s(self) -> float:
        """Returns the time that the test set."""
        return self.time_s

    def advance(self, seconds: float) -> None:
        """Lets `seconds` pass."""
        self.time_s += seconds
