"""One request at a time through each router in turn, and past all of them: what a router adds when nothing queues.

At half of a router's rate, the client and the scripted workers share a core, and their queues hide what the router
adds. Here only one request is open at a time: a *turn* sends one past the routers (the client asks prefill and decode
itself) and one through each router, in a rotating order, with a pause before each. What a router adds is the difference
within a turn, so other load on the machine affects both; the results are medians of many turns.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.router.load import Client, Target, percentile
from kvferry.errors import FerryError

__all__ = ["Added", "Way", "turns"]

_PAUSE_S = 0.002
_WARM_TURNS = 20


@dataclass(frozen=True, slots=True)
class Way:
    """Requests to some targets: one after the other, or at once (push, past the router)."""

    name: str
    steps: Sequence[tuple[Target, bytes]]
    at_once: bool = False


@dataclass(slots=True)
class Added:
    """The seconds of the same turns, through a router and past it."""

    through: list[float] = field(default_factory=list)
    past: list[float] = field(default_factory=list)

    @property
    def p50_ms(self) -> float:
        """The median of the time that was added within a turn."""
        return 1e3 * percentile([a - b for a, b in zip(self.through, self.past, strict=True)], 50)

    @property
    def p99_ms(self) -> float:
        """The 99th percentile through the router, less that past it."""
        return 1e3 * (percentile(self.through, 99) - percentile(self.past, 99))


async def turns(ways: Sequence[Way], num_turns: int) -> list[list[float]]:
    """Returns the seconds of each request, by way and turn. Raises FerryError for an answer that is not 200."""
    clients = [[await Client.connect(target) for target, _ in way.steps] for way in ways]
    times: list[list[float]] = [[] for _ in ways]
    try:
        for number in range(-_WARM_TURNS, num_turns):
            for index in range(len(ways)):
                chosen = (index + number) % len(ways)
                await asyncio.sleep(_PAUSE_S)
                took_s = await _once(ways[chosen], clients[chosen])
                if number >= 0:
                    times[chosen].append(took_s)
    finally:
        for some in clients:
            for client in some:
                client.close()
    return times


async def _once(way: Way, clients: Sequence[Client]) -> float:
    began_s = time.perf_counter()
    pairs = zip(clients, way.steps, strict=True)
    if way.at_once:
        replies = await asyncio.gather(*(client.send(request) for client, (_, request) in pairs))
    else:
        replies = [await client.send(request) for client, (_, request) in pairs]
    took_s = time.perf_counter() - began_s
    wrong = next((reply for reply in replies if reply.status != 200), None)
    if wrong is not None:
        raise FerryError(f"{way.name} answered {wrong.status}: {wrong.body[:200]!r}. Leave it out with --routers")
    return took_s
