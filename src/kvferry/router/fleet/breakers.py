"""A circuit breaker: who has failed several times in a row is left alone for a while, then tried with one request.

CLOSED     everything goes through. `threshold` failures in a row, and nothing good in between, open it.
OPEN       nothing goes through for `first_s`; each further failure doubles that, up to `longest_s`.
HALF_OPEN  the time is over: one request a period goes through. A good answer closes the breaker.

Time is an argument: seconds of any one clock that does not go back. Errors of the client are no failures.
"""

from enum import StrEnum

__all__ = ["Breaker", "BreakerState"]


class BreakerState(StrEnum):
    """See the module's text."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """One a worker, one a pair. Nothing in it blocks."""

    __slots__ = ("_first_s", "_longest_s", "_num_failures", "_retry_at_s", "_threshold", "reason")

    def __init__(self, threshold: int, first_s: float, longest_s: float) -> None:
        """`threshold`: failures in a row that open it."""
        self._threshold = threshold
        self._first_s = first_s
        self._longest_s = longest_s
        self._num_failures = 0
        self._retry_at_s = 0.0
        self.reason = ""
        """The last failure."""

    def state(self, now_s: float) -> BreakerState:
        """Of this moment."""
        if self._num_failures < self._threshold:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._retry_at_s else BreakerState.HALF_OPEN

    def permits(self, now_s: float) -> bool:
        """A request may go there now."""
        return self._num_failures < self._threshold or now_s >= self._retry_at_s

    def began(self, now_s: float) -> None:
        """A request goes there. Half-open, it is the only one of its period: its end may never be told."""
        if self._num_failures >= self._threshold:
            self._retry_at_s = now_s + self._period_s()

    def succeeded(self) -> None:
        """A good answer, or a new process: closed, and nothing is held against it."""
        self._num_failures = 0
        self.reason = ""

    def failed(self, now_s: float, reason: str) -> bool:
        """One more failure. True: it has opened with this one."""
        was_closed = self._num_failures < self._threshold
        self._num_failures += 1
        self.reason = reason
        if self._num_failures < self._threshold:
            return False
        self._retry_at_s = now_s + self._period_s()
        return was_closed

    def why(self, now_s: float) -> str:
        """For people, while it lets nothing through."""
        left_s = max(0.0, self._retry_at_s - now_s)
        return f"{self._num_failures} failures in a row, tried again in {left_s:.1f} s; the last: {self.reason}"

    def _period_s(self) -> float:
        return min(self._longest_s, self._first_s * 2.0 ** min(self._num_failures - self._threshold, 30))
