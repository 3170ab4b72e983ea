"""What a hand-off costs and how fast prefill computes, from what this router sees; and so, which prompts to keep local.

A prompt of u uncached tokens takes prefill a + b*u seconds, and then decode h seconds until its first byte. If decode
computes it by itself the client saves about a + h, and the other requests on decode lose about b*u. The two are equal
at u = (a + h) / b: below that, decode computes the prompt.

a and b are a line fitted to prefill's answers, h a mean; old samples fade. Before `MIN_SAMPLES` of both, or while all
prompts are of one length, nothing is known, and every prompt goes to prefill.
"""

__all__ = ["MIN_SAMPLES", "HandoffCost"]

MIN_SAMPLES = 16
_FADE = 0.99
_MIN_SPREAD_TOKENS = 8.0


class HandoffCost:
    """One a router. On the event loop; nothing in it blocks."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._num_prefills = 0
        self._num_handoffs = 0
        self._handoff_s = 0.0

    def on_prefill(self, num_uncached: int, after_s: float) -> None:
        """Prefill answered after `after_s`, having computed so many tokens."""
        x = float(num_uncached)
        self._num_prefills += 1
        self._n = self._n * _FADE + 1
        self._x = self._x * _FADE + x
        self._y = self._y * _FADE + after_s
        self._xx = self._xx * _FADE + x * x
        self._xy = self._xy * _FADE + x * after_s

    def on_handoff(self, after_s: float) -> None:
        """Decode's first byte came so long after prefill had answered (0 if before)."""
        self._num_handoffs += 1
        weight = max(1 - _FADE, 1 / self._num_handoffs)
        self._handoff_s += weight * (after_s - self._handoff_s)

    @property
    def handoff_s(self) -> float:
        """h: what decode needs for a prompt that was handed over."""
        return self._handoff_s

    def line(self) -> tuple[float, float] | None:
        """(a, b): seconds, and seconds a token. None: not known."""
        if self._num_prefills < MIN_SAMPLES:
            return None
        mean = self._x / self._n
        variance = self._xx / self._n - mean * mean
        if variance < _MIN_SPREAD_TOKENS**2:
            return None
        slope = (self._xy / self._n - mean * self._y / self._n) / variance
        return max(0.0, self._y / self._n - slope * mean), slope

    def threshold_tokens(self) -> int:
        """Prompts with fewer uncached tokens are better computed by decode. 0: not known, or never."""
        line = self.line()
        if line is None or self._num_handoffs < MIN_SAMPLES or line[1] <= 0:
            return 0
        return int((line[0] + self._handoff_s) / line[1])
