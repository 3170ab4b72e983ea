"""Measures what a hand-off costs and how fast prefill computes, and decides from that which prompts decode computes.

Prefill takes a + b*u seconds for a prompt of u uncached tokens, and decode then needs h seconds until its first byte.
If decode computes the prompt itself, the client saves about a + h, and the other requests on decode lose about b*u. The
two are equal at u = (a + h) / b; below that, decode computes the prompt.

a and b come from a line fitted to prefill's answers, h is a mean, and old samples fade. h comes from answers that are
streamed: the first byte of any other answer comes at its end. Until there are `MIN_SAMPLES` of both, or while all
prompts have about the same length, nothing is known, and every prompt goes to prefill.

Prompts below the limit give no samples, so a limit that is wrong could never be corrected. So one of `PROBE_EVERY` of
them goes to prefill all the same.
"""

__all__ = ["MIN_SAMPLES", "PROBE_EVERY", "HandoffCost"]

MIN_SAMPLES = 16
PROBE_EVERY = 16
_FADE = 0.99
_MIN_SPREAD_TOKENS = 8.0


class HandoffCost:
    """Samples of one router. It is used on the event loop, and nothing in it blocks."""

    def __init__(self, fixed_tokens: int | None = None) -> None:
        """`fixed_tokens` is the operator's own limit for local prefill; None: it is measured."""
        self._fixed_tokens = fixed_tokens
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._num_prefills = 0
        self._num_handoffs = 0
        self._num_below = 0
        self._handoff_s = 0.0

    def on_prefill(self, num_uncached: int, after_s: float) -> None:
        """Notes that prefill answered after `after_s` and had computed `num_uncached` tokens."""
        x = float(num_uncached)
        self._num_prefills += 1
        self._n = self._n * _FADE + 1
        self._x = self._x * _FADE + x
        self._y = self._y * _FADE + after_s
        self._xx = self._xx * _FADE + x * x
        self._xy = self._xy * _FADE + x * after_s

    def on_handoff(self, after_s: float) -> None:
        """Notes that decode's first byte came `after_s` after prefill had answered (0 if it came before)."""
        self._num_handoffs += 1
        weight = max(1 - _FADE, 1 / self._num_handoffs)
        self._handoff_s += weight * (after_s - self._handoff_s)

    @property
    def handoff_s(self) -> float:
        """The time h that decode needs for a prompt that was handed over."""
        return self._handoff_s

    def line(self) -> tuple[float, float] | None:
        """Returns (a, b), in seconds and in seconds per token, or None while they are not known."""
        if self._num_prefills < MIN_SAMPLES:
            return None
        mean = self._x / self._n
        variance = self._xx / self._n - mean * mean
        if variance < _MIN_SPREAD_TOKENS**2:
            return None
        slope = (self._xy / self._n - mean * self._y / self._n) / variance
        return max(0.0, self._y / self._n - slope * mean), slope

    def threshold_tokens(self) -> int:
        """Returns the measured limit: prompts with fewer uncached tokens are better computed by decode. 0 if it is not
        known, or if a hand-off always pays."""
        line = self.line()
        if line is None or self._num_handoffs < MIN_SAMPLES or line[1] <= 0:
            return 0
        return int((line[0] + self._handoff_s) / line[1])

    def probe(self) -> bool:
        """Counts a prompt below the limit. Returns True if it should be handed over to measure what that costs now;
        never with an operator's limit."""
        self._num_below += 1
        return self._fixed_tokens is None and self._num_below % PROBE_EVERY == 0

    @property
    def local_below_tokens(self) -> int:
        """Decode computes prompts with fewer uncached tokens than this: the operator's limit, else the measured one."""
        return self.threshold_tokens() if self._fixed_tokens is None else self._fixed_tokens
