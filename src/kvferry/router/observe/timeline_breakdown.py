"""Where a request's milliseconds went: its spans, cut so that every moment belongs to exactly one part."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvferry.router.observe.timeline import Span

__all__ = ["Share", "breakdown"]

_ORDER = (
    ("decode", "decode"),
    ("decode", "prefill"),
    ("prefill", "prefill"),
    ("prefill", "queue"),
    ("decode", "transfer"),
    ("decode", "queue"),
    ("decode", "handshake"),
    ("prefill", "decode"),
    ("prefill", "prefill request"),
    ("decode", "decode request"),
    ("router", "choose"),
    ("router", "request"),
)
"""Of the spans that run at one moment, the first of these owns it: what the others wait for comes before the waiting.

In push mode decode's `handshake` and `transfer` run while prefill computes, and it is prefill that the request waits
for. A request to a worker owns what none of its stages explains: the network, reading and writing HTTP.
"""
_LEAST_S = 1e-7
"""Less is the rounding of clocks set right, not a part of anything."""
_RANK = {key: rank for rank, key in enumerate(_ORDER)}


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a request's time; all parts together are the whole."""

    lane: str
    name: str
    seconds: float


def breakdown(spans: Sequence[Span]) -> list[Share]:
    """Shares of the span named `request`, in the order in which they first own a moment. Empty without such a span."""
    whole = next((span for span in spans if span.name == "request"), None)
    if whole is None:
        return []
    edges = sorted(
        {min(max(at_s, whole.begin_s), whole.end_s) for span in spans for at_s in (span.begin_s, span.end_s)}
    )
    owned: dict[tuple[str, str], float] = {}
    for begin_s, end_s in pairwise(edges):
        if end_s - begin_s < _LEAST_S:
            continue
        running = [(one.lane, one.name) for one in spans if one.begin_s <= begin_s and one.end_s >= end_s]
        owner = min(running, key=lambda key: _RANK.get(key, len(_ORDER)))
        owned[owner] = owned.get(owner, 0.0) + end_s - begin_s
    return [Share(lane, name, seconds) for (lane, name), seconds in owned.items()]
