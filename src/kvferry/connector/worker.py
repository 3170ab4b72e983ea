"""The worker half: hands orders to the driver thread, and returns what has ended. Never raises, never blocks."""

import logging
from collections.abc import Callable, Sequence

from kvferry.connector.base import RankRecord
from kvferry.handoff.driver.adaptive import AdaptiveMover
from kvferry.handoff.driver.driver import Driver
from kvferry.handoff.driver.own import Callbacks, OwnCache, OwnEngine
from kvferry.handoff.orders import StepOrders, StepReport
from kvferry.ids import EngineId, Incarnation, new_incarnation, peer_name
from kvferry.layout.description import CacheLayout, MemoryKind, Region
from kvferry.settings import FerrySettings
from kvferry.stats import HandoffStats
from kvferry.transport.base import Transport
from kvferry.transport.registry import make_transport
from kvferry.transport.staging.cost import load_cost_model
from kvferry.transport.staging.packer import region_views
from kvferry.transport.staging.staging_pool import StagingPool

__all__ = ["HandoffWorker", "start_worker"]

logger = logging.getLogger(__name__)


class HandoffWorker:
    """One rank's worker half, made by `start_worker`. `start_step` and all that only looks may be called on any thread.

    connector.base.WorkerHalf is the contract.
    """

    def __init__(self, driver: Driver, record: RankRecord) -> None:
        self._driver = driver
        self.record = record
        """What EngineConnector.start needs to know of this rank."""

    def start_step(self, orders: StepOrders) -> None:
        """Queue the orders for the driver thread."""
        if orders:
            self._driver.submit(orders)

    def end_step(self) -> StepReport:
        """Return what has ended since the last call."""
        return self._driver.collect()

    @property
    def has_report(self) -> bool:
        """True if `end_step` would return something."""
        return self._driver.has_report

    def stats(self) -> HandoffStats:
        """Return the counters since the start."""
        return self._driver.stats()

    def drain(self) -> None:
        """Begin nothing new with a peer; finish what is open. `drained` becomes true when that is done."""
        self._driver.drain()

    @property
    def drained(self) -> bool:
        """True after `drain`, once no hand-off of this rank is open and `end_step` has returned every end."""
        return self._driver.drained

    def close(self) -> None:
        """End the driver thread, then the transport. Nothing of them remains."""
        self._driver.close()


def start_worker(
    layout: CacheLayout,
    owners: Sequence[object],
    *,
    engine: EngineId,
    incarnation: Incarnation | None = None,
    settings: FerrySettings,
    num_ranks: int = 1,
    engine_layouts: Sequence[CacheLayout] = (),
    on_lost: Callable[[EngineId, Incarnation, str], None] | None = None,
    on_report: Callable[[], None] | None = None,
) -> HandoffWorker:
    """Register this rank's cache with the configured transport, and start its driver thread.

    `owners` are kept alive as long as the memory is registered. All ranks of an engine have one `incarnation`; None
    makes one, for an engine of one rank. An engine of several ranks gives each of them `engine_layouts`, the layouts of
    all `num_ranks` ranks in the order of Rank.index: without them a rank does not know what it owes to whom.

    `on_lost` is called with a peer that is gone (EngineConnector.lost), and `on_report` when `end_step` may have
    something to return; both on the driver's thread, where they must not block. Raises ConfigError if the transport
    cannot be used; then nothing is left behind.
    """
    assert num_ranks == 1 or len(engine_layouts) == num_ranks, "an engine of several ranks gives each all layouts"
    incarnation = incarnation or new_incarnation()
    rank = layout.rank.index
    transport = make_transport(settings.transfer.transport, peer_name(engine, incarnation, rank))
    mover, staging = (
        _staged_mover(layout, owners, transport, settings) if settings.transfer.staging_bytes else (None, ())
    )
    driver = Driver(
        transport,
        OwnEngine(engine, incarnation, num_ranks, tuple(engine_layouts)),
        OwnCache(layout, owners, staging),
        settings,
        mover=mover,
        callbacks=Callbacks(on_lost or _ignore, on_report or _ignore),
    )
    try:
        driver.start()
    except BaseException:
        driver.close()
        raise
    return HandoffWorker(driver, RankRecord(layout, incarnation, settings.transfer.transport, driver.metadata))


def _ignore(*_: object) -> None:
    """Stands for a callback that was not given."""


def _staged_mover(
    layout: CacheLayout, owners: Sequence[object], transport: Transport, settings: FerrySettings
) -> tuple[AdaptiveMover, tuple[Region, ...]]:
    """Return the mover that may stage, and its memory, which is registered after the layout's regions."""
    first = layout.regions[0]
    device = first.device if first.kind is MemoryKind.VRAM else None
    pool = StagingPool(settings.transfer.staging_bytes, device=device)
    memory = region_views(layout.regions, owners)
    return AdaptiveMover(transport, pool, len(layout.regions), memory, load_cost_model()), (pool.region,)
