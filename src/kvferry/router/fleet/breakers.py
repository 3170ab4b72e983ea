"""A circuit breaker: a worker that has failed several times in a row is left alone for a while, then tried with one
request.

CLOSED     Every request goes through. `threshold` failures in a row, with no success in between, open the breaker.
OPEN       No request goes through for `first_s`; each further failure doubles that, up to `longest_s`.
HALF_OPEN  The time is over: one request per period goes through. A good answer closes the breaker.

Time is an argument: seconds of any one clock that never goes back. Errors of the client are not failures.
"""

from enum import StrEnum

__all__ = ["Breaker", "BreakerState"]


class BreakerState(StrEnum):
    """The three states; the module's docstring explains them."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts the failures of one worker, or of one pair. Nothing in it blocks."""

    __slots__ = ("_first_s", "_longest_s", "_num_failures", "_retry_at_s", "_threshold", "reason")

    def __init__(self, threshold: int, first_s: float, longest_s: float) -> None:
        """`threshold` is the number of failures in a row that open the breaker."""
        self._threshold = threshold
        self._first_s = first_s
        self._longest_s = longest_s
        self._num_failures = 0
        self._retry_at_s = 0.0
        self.reason = ""
        """The reason of the last failure."""

    def state(self, now_s: float) -> BreakerState:
        """Returns the state at this moment."""
        if self._num_failures < self._threshold:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._retry_at_s else BreakerState.HALF_OPEN

    def permits(self, now_s: float) -> bool:
        """True if a request may go through now."""
        return self._num_failures < self._threshold or now_s >= self._retry_at_s

    def began(self, now_s: float) -> None:
        """Notes that a request goes through. In a half-open breaker it is the only one of its period, because its
        outcome may never be reported."""
        if self._num_failures >= self._threshold:
            self._retry_at_s = now_s + self._period_s()

    def succeeded(self) -> None:
        """Closes the breaker and forgets all failures: there was a good answer, or the worker is a new process."""
        self._num_failures = 0
        self.reason = ""

    def failed(self, now_s: float, reason: str) -> bool:
        """Counts one more failure. Returns True if this one has opened the breaker."""
        was_closed = self._num_failures < self._threshold
        self._num_failures += 1
        self.reason = reason
        if self._num_failures < self._threshold:
            return False
        self._retry_at_s = now_s + self._period_s()
        return was_closed

    def explain(self, now_s: float) -> str:
        """Returns, for people, why the breaker is open and when it lets the next request through."""
        left_s = max(0.0, self._retry_at_s - now_s)
        return f"{self._num_failures} failures in a row, tried again in {left_s:.1f} s; the last: {self.reason}"

    def _period_s(self) -> float:
        return min(self._longest_s, self._first_s * 2.0 ** min(self._num_failures - self._threshold, 30))
