"""The worker half: hands orders to the driver thread, brings back what has ended. Never raises, never blocks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields

from kvferry.handoff.driver.adaptive import AdaptiveMover
from kvferry.handoff.driver.driver import Driver
from kvferry.handoff.orders import PeerAccepted, PeerGone, StepOrders, StepReport
from kvferry.ids import EngineId, Incarnation, peer_name
from kvferry.layout.description import CacheLayout, MemoryKind, Region
from kvferry.settings import FerrySettings
from kvferry.stats import HandoffStats
from kvferry.transport.base import Transport
from kvferry.transport.registry import make_transport
from kvferry.transport.staging.cost import load_cost_model
from kvferry.transport.staging.packer import region_views
from kvferry.transport.staging.staging import StagingPool

__all__ = ["HandoffWorker", "joined_stats", "start_worker"]

logger = logging.getLogger(__name__)


class HandoffWorker:
    """One rank's worker half. See connector.base.WorkerHalf for the contract of each hook."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @property
    def transport_metadata(self) -> bytes:
        """What peers need to connect to this rank."""
        return self._driver.metadata

    def start_step(self, orders: StepOrders) -> None:
        """Queue the orders for the driver thread."""
        if orders:
            self._driver.submit(orders)

    def end_step(self) -> StepReport:
        """What has ended since the last call."""
        return self._driver.collect()

    @property
    def has_report(self) -> bool:
        """`end_step` has something. From any thread."""
        return self._driver.has_report

    def introduce(self, peer: PeerAccepted) -> None:
        """A peer was accepted. From any thread."""
        self._driver.submit(StepOrders(accepted=(peer,)))

    def depart(self, peer: PeerGone) -> None:
        """A peer is gone. From any thread."""
        self._driver.submit(StepOrders(gone=(peer,)))

    def stats(self) -> HandoffStats:
        """Counters since the start."""
        return self._driver.stats()

    def drain(self) -> None:
        """Begin nothing with a peer that is not open already. From any thread, never blocks."""
        self._driver.drain()

    @property
    def drained(self) -> bool:
        """After `drain`: no hand-off of this rank is open, and every end was collected by `end_step`."""
        return self._driver.drained

    def close(self) -> None:
        """End the driver thread, then the transport; nothing of them remains."""
        self._driver.close()


def start_worker(
    layout: CacheLayout,
    owners: Sequence[object],
    *,
    engine: EngineId,
    incarnation: Incarnation,
    settings: FerrySettings,
    num_ranks: int = 1,
    engine_layouts: Sequence[CacheLayout] = (),
    on_lost: Callable[[EngineId, Incarnation, str], None] | None = None,
    on_report: Callable[[], None] | None = None,
) -> HandoffWorker:
    """Register this rank's cache with the configured transport and start its driver thread.

    `owners` keep the memory alive. `engine_layouts`: of all `num_ranks` ranks of the engine, in the order of their
    Rank.index; without them a rank of several does not know what it owes to whom. `on_lost` hears of peers that are
    gone, `on_report` that `end_step` has something: see Driver. Raises ConfigError for a transport that cannot be had;
    then nothing is left behind.
    """
    assert num_ranks == 1 or len(engine_layouts) == num_ranks, "an engine of several ranks tells each all layouts"
    rank = layout.rank.index
    transport = make_transport(settings.transfer.transport, peer_name(engine, incarnation, rank))
    mover, staging = (
        _staged_mover(layout, owners, transport, settings) if settings.transfer.staging_bytes else (None, ())
    )
    driver = Driver(
        transport=transport,
        layout=layout,
        memory_owners=owners,
        engine=engine,
        incarnation=incarnation,
        rank=rank,
        num_ranks=num_ranks,
        engine_layouts=engine_layouts,
        settings=settings,
        mover=mover,
        more_regions=staging,
        on_lost=on_lost,
        on_report=on_report,
    )
    try:
        driver.start()
    except BaseException:
        driver.close()
        raise
    return HandoffWorker(driver)


def joined_stats(ranks: Sequence[HandoffStats]) -> HandoffStats:
    """Counters of an engine. Bytes of its ranks add up; every other number is about the same hand-offs on each of them:
    the highest counts."""
    highest = {field.name: max(getattr(one, field.name) for one in ranks) for field in fields(HandoffStats)}
    return HandoffStats(**{**highest, "bytes": sum(one.bytes for one in ranks)})


def _staged_mover(
    layout: CacheLayout, owners: Sequence[object], transport: Transport, settings: FerrySettings
) -> tuple[AdaptiveMover, tuple[Region, ...]]:
    """The mover that may stage, and its memory, to be registered behind the layout's regions."""
    first = layout.regions[0]
    device = first.device if first.kind is MemoryKind.VRAM else None
    pool = StagingPool(settings.transfer.staging_bytes, device=device)
    memory = region_views(layout.regions, owners)
    return AdaptiveMover(transport, pool, len(layout.regions), memory, load_cost_model()), (pool.region,)
