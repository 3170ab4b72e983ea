"""Limits how often one address may ask. Time is an argument."""

from collections import OrderedDict

__all__ = ["RateLimit"]


class RateLimit:
    """One token bucket per address: `per_s` messages per second on average, and at most twice that at once.

    It remembers `max_addresses` addresses. If there are more, the one that has been silent for longest is forgotten,
    and starts with a full bucket when it comes back.
    """

    def __init__(self, per_s: float, max_addresses: int = 4096) -> None:
        self._per_s = per_s
        self._burst = max(1.0, 2 * per_s)
        self._max_addresses = max_addresses
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allow(self, address: str, now_s: float) -> bool:
        """Counts one message from `address`, and returns whether it is within the limit."""
        tokens, then_s = self._buckets.pop(address, (self._burst, now_s))
        tokens = min(self._burst, tokens + (now_s - then_s) * self._per_s)
        allowed = tokens >= 1
        self._buckets[address] = (tokens - 1 if allowed else tokens, now_s)
        if len(self._buckets) > self._max_addresses:
            self._buckets.popitem(last=False)
        return allowed

    def __len__(self) -> int:
        return len(self._buckets)
