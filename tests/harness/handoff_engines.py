"""The drivers of two engines over the memory transport, for tests of the driver."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.handoff.driver.driver import Driver
from kvferry.handoff.driver.mover import Mover
from kvferry.handoff.driver.own import Callbacks, OwnCache, OwnEngine
from kvferry.handoff.orders import Failed, Fetch, Landed, Offer, PeerAccepted, StepOrders
from kvferry.ids import EngineId, Incarnation, PeerName, RequestId, TransferId, peer_name
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.builders import block_major, head_range
from kvferry.layout.description import CacheLayout, Rank, Region
from kvferry.settings import FerrySettings, LeaseSettings, Role, TransferMode, TransferSettings, Verify
from kvferry.transport.base import Transport
from kvferry.transport.memory import MemoryHub, MemoryTransport
from kvferry.wire.hello import Hello, RankHello, encode_hello
from kvferry.wire.layout_codec import encode_layout
from tests.harness.until import until as wait_until

HEADS, DIM, LAYERS = 4, 8, ("layers.0.attn", "layers.1.attn")


def settings_for(
    mode: TransferMode, *, ttl_s: float = 2.0, deadline_s: float = 5.0, verify: Verify = Verify.SAMPLE
) -> FerrySettings:
    """Returns settings with short times, for tests in real time."""
    return FerrySettings(
        transfer=TransferSettings(mode=mode, transport="memory", deadline_s=deadline_s, verify=verify),
        lease=LeaseSettings(ttl_s=ttl_s, renew_every_s=ttl_s / 8, quarantine_s=0.2, standstill_s=0.2),
    )


@dataclass
class Seen:
    """What a rank has reported so far."""

    landed: list[Landed] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    released: list[TransferId] = field(default_factory=list)
    taken: list[TransferId] = field(default_factory=list)


class Engine:
    """All ranks of one engine, each with a cache; `num_ranks` is the tensor parallel size."""

    def __init__(
        self,
        name: str,
        role: Role,
        settings: FerrySettings,
        make_transport: Callable[[PeerName], Transport],
        *,
        num_ranks: int = 1,
        num_blocks: int = 32,
        block_tokens: int = 4,
        start: str = "1",
        know_each_other: bool = True,
        gone_after_s: float | None = None,
    ) -> None:
        self.lost: list[tuple[EngineId, Incarnation, str]] = []
        self.engine, self.incarnation = EngineId(name), Incarnation(f"{name}-{start}")
        self.role, self.settings = role, settings
        self.caches: list[npt.NDArray[np.float32]] = []
        self.layouts: list[CacheLayout] = []
        for index in range(num_ranks):
            heads = head_range(HEADS, index, num_ranks)
            cache = np.zeros((num_blocks, len(LAYERS), 2, len(heads), block_tokens, DIM), np.float32)
            self.caches.append(cache)
            self.layouts.append(
                block_major(
                    LAYERS,
                    num_blocks=num_blocks,
                    block_tokens=block_tokens,
                    heads=heads,
                    head_dim=DIM,
                    element_bytes=4,
                    encoding="f32",
                    address=cache.ctypes.data,
                    rank=Rank(index=index, tp_rank=index, tp_size=num_ranks),
                )
            )
        self.seen = [Seen() for _ in range(num_ranks)]
        self.drivers: list[Driver] = []
        self.movers: list[Mover | None] = []
        for index, layout in enumerate(self.layouts):
            transport = make_transport(peer_name(self.engine, self.incarnation, index))
            mover, more_regions = self.mover_for(layout, self.caches[index], transport)
            self.movers.append(mover)
            self.drivers.append(
                Driver(
                    transport,
                    OwnEngine(self.engine, self.incarnation, num_ranks, tuple(self.layouts) if know_each_other else ()),
                    OwnCache(layout, [self.caches[index]], more_regions),
                    settings,
                    mover=mover,
                    callbacks=Callbacks(on_lost=lambda *lost: self.lost.append(lost)),
                    gone_after_s=gone_after_s,
                )
            )
        for driver in self.drivers:
            driver.start()
        if not know_each_other:
            self.meet(self)

    def mover_for(
        self, layout: CacheLayout, owner: object, transport: Transport
    ) -> tuple[Mover | None, Sequence[Region]]:
        """Returns what moves the engine's bytes and the memory for that; by default, the driver's own."""
        return None, ()

    def hello(self) -> bytes:
        ranks = tuple(
            RankHello(
                layout=encode_layout(layout), transport=driver._transport.name, transport_metadata=driver.metadata
            )
            for layout, driver in zip(self.layouts, self.drivers, strict=True)
        )
        return encode_hello(Hello(engine=self.engine, incarnation=self.incarnation, role=self.role, ranks=ranks))

    def submit(self, orders: StepOrders) -> None:
        for driver in self.drivers:
            driver.submit(orders)

    def meet(self, other: "Engine") -> None:
        self.submit(StepOrders(accepted=(PeerAccepted(other.engine, other.incarnation, other.hello()),)))

    def collect(self) -> None:
        for seen, driver in zip(self.seen, self.drivers, strict=True):
            report = driver.collect()
            seen.landed += report.landed
            seen.failed += report.failed
            seen.released += report.released
            seen.taken += report.taken

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        """Fills these blocks with random KV."""
        rng = np.random.default_rng(seed)
        for cache in self.caches:
            cache[list(block_ids)] = rng.standard_normal(cache[list(block_ids)].shape, np.float32)

    def tokens(self, block_ids: Sequence[int], start: int, stop: int) -> npt.NDArray[np.float32]:
        """Returns the KV of [start, stop) over all ranks, as [token, layer, k/v, head, dim]."""
        joined = np.concatenate(self.caches, axis=3)[list(block_ids)]
        blocks, layers, parts, heads, size, dim = joined.shape
        flat = joined.transpose(0, 4, 1, 2, 3, 5).reshape(blocks * size, layers, parts, heads, dim)
        return flat[start:stop]

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()


def memory_transports() -> tuple[MemoryHub, Callable[[PeerName], Transport]]:
    """A hub of the memory transport, and how to make transports on it."""
    hub = MemoryHub()
    return hub, lambda name: MemoryTransport(name, hub=hub)


def offer(transfer: str, block_ids: Sequence[int], stop: int, *, final: bool = True, note: bytes = b"") -> Offer:
    return Offer(
        TransferId(transfer),
        RequestId(f"p-{transfer}"),
        (BlockTable(0, 0, tuple(block_ids)),),
        TokenRange(0, stop),
        final,
        note,
    )


def want(
    transfer: str,
    peer: Engine,
    mode: TransferMode,
    block_ids: Sequence[int],
    start: int,
    stop: int,
    deadline_s: float = 5,
) -> Fetch:
    return Fetch(
        TransferId(transfer),
        RequestId(f"d-{transfer}"),
        peer.engine,
        peer.incarnation,
        mode,
        (BlockTable(0, 0, tuple(block_ids)),),
        TokenRange(start, stop),
        deadline_s,
    )


def until(condition: Callable[[], bool], *engines: Engine, timeout_s: float = 10.0) -> None:
    """Collects reports of the engines until the condition holds."""

    def collect() -> None:
        for engine in engines:
            engine.collect()

    wait_until(condition, within_s=timeout_s, meanwhile=collect if engines else None)
