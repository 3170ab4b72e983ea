"""What all dispatches of a router share."""

from dataclasses import dataclass

from kvferry.router.fleet.admission import Admission
from kvferry.router.fleet.handoff_cost import HandoffCost
from kvferry.router.fleet.prefixes import Prefixes
from kvferry.router.fleet.workers import Fleet
from kvferry.router.observe.alarm import DecodeOnlyAlarm
from kvferry.router.observe.metrics import RouterMetrics
from kvferry.router.observe.observer import Observers
from kvferry.router.settings import RouterSettings
from kvferry.router.upstream.releases import Releases
from kvferry.router.upstream.worker_client import Upstream

__all__ = ["RouterContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterContext:
    """The parts of a router that every dispatch uses. There is one per router."""

    fleet: Fleet
    admission: Admission
    upstream: Upstream
    settings: RouterSettings
    metrics: RouterMetrics
    releases: Releases
    observers: Observers
    prefixes: Prefixes
    cost: HandoffCost
    alarm: DecodeOnlyAlarm
    worker_key: str | None = None
    """The key that is sent to workers instead of the client's own; None: the client's is passed on."""
