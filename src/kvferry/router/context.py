"""What all dispatches of a router share, and the records of one."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.router.fleet.handoff_cost import HandoffCost
from kvferry.router.fleet.prefixes import Prefixes
from kvferry.router.fleet.worker import Worker
from kvferry.router.fleet.workers import Fleet
from kvferry.router.observe.alarm import DecodeOnlyAlarm
from kvferry.router.observe.metrics import RouterMetrics
from kvferry.router.observe.observer import Observers
from kvferry.router.settings import RouterSettings
from kvferry.router.upstream.attempts import Upstream
from kvferry.router.upstream.releases import Releases
from kvferry.router.upstream.worker_answer import WorkerFailed
from kvferry.settings import Role

__all__ = ["Attempts", "RouterContext", "Ticket", "end_tasks"]


@dataclass(slots=True, kw_only=True)
class RouterContext:
    """What all dispatches share."""

    fleet: Fleet
    upstream: Upstream
    settings: RouterSettings
    metrics: RouterMetrics
    releases: Releases
    observers: Observers
    prefixes: Prefixes
    cost: HandoffCost
    alarm: DecodeOnlyAlarm
    worker_key: str | None = None
    """Sent to workers instead of the client's own key."""
    num_waiting: int = 0
    """Requests that wait for room on decode."""

    @property
    def local_below_tokens(self) -> int:
        """Prompts with fewer uncached tokens are computed by decode."""
        fixed = self.settings.local_below_tokens
        return self.cost.threshold_tokens() if fixed is None else fixed


@dataclass(frozen=True, slots=True)
class Ticket:
    """What prefill's side of a request came to: a hand-off, or the reason why there is none."""

    prefill: Worker | None = None
    params: msgspec.Raw | None = None
    why: str = ""
    local: bool = False
    """Decode computes the prompt by choice."""


@dataclass(slots=True)
class Attempts:
    """Workers that failed this request, and how."""

    prefill: set[Worker] = field(default_factory=set)
    decode: dict[Worker, float] = field(default_factory=dict)
    """And when (monotonic): one that has come up since is another process, or well again."""
    failures: list[WorkerFailed] = field(default_factory=list)

    @property
    def of_decode(self) -> list[WorkerFailed]:
        """Failures of decode workers."""
        return [failure for failure in self.failures if failure.worker.wanted is Role.DECODE]


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
