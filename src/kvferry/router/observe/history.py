"""The last minutes of a router as a few series of numbers: what the dashboard's small charts show.

Each bucket covers `EVERY_S` seconds of the router's monotonic clock. Memory is bounded: old buckets are dropped, and a
bucket keeps the first bytes of its first `_MAX_SAMPLES` streams only.
"""

import math
from collections import deque
from dataclasses import dataclass, field

__all__ = ["EVERY_S", "History"]

EVERY_S = 2.0
_NUM_BUCKETS = 90
_MAX_SAMPLES = 512


@dataclass(slots=True)
class _Bucket:
    """What ended within one period."""

    number: int
    num_ended: int = 0
    handed_over_tokens: int = 0
    prompt_tokens: int = 0
    first_bytes_s: list[float] = field(default_factory=list)


class History:
    """The series of one router. Time is an argument."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque(maxlen=_NUM_BUCKETS)

    def add(self, now_s: float, *, first_byte_s: float | None, handed_over: int, prompt_tokens: int) -> None:
        """Counts a request that has ended. `first_byte_s` is None if the answer was not streamed."""
        number = int(now_s / EVERY_S)
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_Bucket(number))
        bucket = self._buckets[-1]
        bucket.num_ended += 1
        bucket.handed_over_tokens += handed_over
        bucket.prompt_tokens += prompt_tokens
        if first_byte_s is not None and len(bucket.first_bytes_s) < _MAX_SAMPLES:
            bucket.first_bytes_s.append(first_byte_s)

    def series(self, now_s: float) -> dict[str, object]:
        """Returns the series, oldest value first. A value is None if nothing in its period says anything about it. The
        period that is still running is left out."""
        last = int(now_s / EVERY_S) - 1
        found = {bucket.number: bucket for bucket in self._buckets}
        buckets = [found.get(number) for number in range(last - _NUM_BUCKETS + 2, last + 1)]
        return {
            "every_s": EVERY_S,
            "rate": [0.0 if one is None else one.num_ended / EVERY_S for one in buckets],
            "first_byte_p50_ms": [_percentile_ms(one, 0.5) for one in buckets],
            "first_byte_p99_ms": [_percentile_ms(one, 0.99) for one in buckets],
            "handed_over_share": [
                None if one is None or not one.prompt_tokens else one.handed_over_tokens / one.prompt_tokens
                for one in buckets
            ],
        }


def _percentile_ms(bucket: _Bucket | None, share: float) -> float | None:
    """Returns the nearest-rank percentile of the bucket's first bytes."""
    if bucket is None or not bucket.first_bytes_s:
        return None
    ordered = sorted(bucket.first_bytes_s)
    return round(1e3 * ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)
