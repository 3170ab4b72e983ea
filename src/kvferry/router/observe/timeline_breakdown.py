"""Breaks a request's time down into parts, so that every moment belongs to exactly one part."""

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
"""If several spans run at one moment, the first of them in this order owns it: work comes before waiting for it.

In push mode decode's `handshake` and `transfer` run while prefill computes, and it is prefill that the request waits
for. A request to a worker owns the time that none of the worker's stages explains: network, and reading and writing
HTTP.
"""
_LEAST_S = 1e-7
"""Shorter moments are rounding errors of clock correction."""
_RANK = {key: rank for rank, key in enumerate(_ORDER)}


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a request's time. All parts add up to the whole."""

    lane: str
    name: str
    seconds: float


def breakdown(spans: Sequence[Span]) -> list[Share]:
    """Returns the parts of the span named `request`, in the order in which they first own a moment. Empty if there is
    no such span."""
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
