"""Hand-offs whose short runs go through staging memory: the same bytes arrive as by direct runs."""

import numpy as np
import pytest

from kvferry.handoff.driver.adaptive import AdaptiveMover
from kvferry.handoff.orders import StepOrders
from kvferry.ids import PeerName
from kvferry.layout.description import CacheLayout, Region
from kvferry.settings import Role, TransferMode, Verify
from kvferry.testing.fake_clock import FakeClock
from kvferry.transport.base import Transport
from kvferry.transport.staging.cost import CostModel
from kvferry.transport.staging.packer import region_views
from kvferry.transport.staging.staging_pool import StagingPool
from tests.harness.handoff_engines import Engine, memory_transports, offer, settings_for, until, want
from tests.harness.posts import a_write

_DEAR_SHORT_RUNS = ((16, 1.0), (1 << 20, 1e-3))
ALWAYS_STAGED = CostModel(
    read=_DEAR_SHORT_RUNS, write=_DEAR_SHORT_RUNS, copy=((1, 1e-12),), start_s=0.0, origin="a test: short runs are dear"
)
NEVER_STAGED = CostModel(read=((1, 1e-9),), write=((1, 1e-9),), copy=((1, 1.0),), origin="a test: copies are dear")
NUM_TOKENS = 700


class StagingEngine(Engine):
    """Engines whose drivers have an AdaptiveMover."""

    costs = ALWAYS_STAGED
    clock: FakeClock | None = None

    def mover_for(
        self, layout: CacheLayout, owner: object, transport: Transport
    ) -> tuple[AdaptiveMover, tuple[Region, ...]]:
        pool = StagingPool(64 << 10)
        views = region_views(layout.regions, [owner])
        mover = AdaptiveMover(transport, pool, len(layout.regions), views, self.costs, self.clock)
        return mover, (pool.region,)


class DirectEngine(StagingEngine):
    costs = NEVER_STAGED


def blocks(num_tokens: int, block_tokens: int, seed: int) -> list[int]:
    count = -(-num_tokens // block_tokens)
    ids: list[int] = np.random.default_rng(seed).permutation(np.arange(1, count + 20))[:count].tolist()
    return ids


@pytest.mark.parametrize("kind", [StagingEngine, DirectEngine])
@pytest.mark.parametrize("mode", list(TransferMode))
def test_staged_and_direct_hand_offs_bring_the_same_bytes(kind: type[StagingEngine], mode: TransferMode) -> None:
    """R22: block sizes that do not divide each other; chunks do not fit the pool all at once; decode has a prefix."""
    _, transports = memory_transports()
    settings = settings_for(mode, verify=Verify.ALL)
    # The side that posts has the shorter blocks: packing in its own memory makes the runs on the wire longer.
    p_block, d_block = (6, 4) if mode is TransferMode.PULL else (4, 6)
    p = kind("p", Role.PREFILL, settings, transports, num_blocks=300, block_tokens=p_block)
    d = kind("d", Role.DECODE, settings, transports, num_blocks=300, block_tokens=d_block)
    try:
        p.meet(d)
        d.meet(p)
        source, target = blocks(NUM_TOKENS, p_block, 1), blocks(NUM_TOKENS, d_block, 2)
        p.fill(source, 1)
        d.submit(StepOrders(fetch=(want("t1", p, mode, target, 7, NUM_TOKENS),)))
        p.submit(StepOrders(offer=(offer("t1", source, 400, final=False),)))
        p.submit(StepOrders(offer=(offer("t1", source, NUM_TOKENS, note=b"n"),)))
        until(lambda: bool(d.seen[0].landed) and bool(p.seen[0].taken), p, d)
        np.testing.assert_array_equal(d.tokens(target, 7, NUM_TOKENS), p.tokens(source, 7, NUM_TOKENS))
        assert not d.tokens(target, 0, 7).any(), "decode's own prefix was overwritten"  # R30
        (landed,) = d.seen[0].landed
        assert landed.note == b"n"
        posted_by = d if mode is TransferMode.PULL else p
        num_staged = sum(mover.num_staged for mover in posted_by.movers if isinstance(mover, AdaptiveMover))
        assert num_staged > 0 if kind is StagingEngine else num_staged == 0
    finally:
        d.close()
        p.close()


def test_a_chunk_that_might_outlive_the_lease_is_not_started() -> None:
    """R28: a part started in time, on a prefill that was then suspended for longer than half of the time left."""
    _, transports = memory_transports()
    engine = StagingEngine("p", Role.PREFILL, settings_for(TransferMode.PUSH), transports, num_blocks=300)
    clock = FakeClock()
    transport = transports(PeerName("x/1/0"))
    try:
        engine.clock = clock
        mover, _ = engine.mover_for(engine.layouts[0], engine.caches[0], transport)
        post, link = a_write(engine, not_after_s=clock.now_s() + 1.0, until_s=clock.now_s() + 3.0)
        assert mover.start(post, link) is None
        clock.advance(2.5)
        (moved,) = mover.poll()
        assert moved.error == "the lease would have ended before its last chunk"
        assert moved.num_runs == 0, "nothing was posted after the time"
    finally:
        engine.close()
        transport.close()


def test_few_runs_go_directly_without_a_comparison_of_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one run per block, and few blocks: a comparison would take longer than either way."""

    def compared(*_: object) -> None:
        raise AssertionError("the ways were compared")

    monkeypatch.setattr("kvferry.handoff.driver.adaptive.choose", compared)
    _, transports = memory_transports()
    settings = settings_for(TransferMode.PUSH)
    p = StagingEngine("p", Role.PREFILL, settings, transports, num_blocks=300, block_tokens=64)
    d = StagingEngine("d", Role.DECODE, settings, transports, num_blocks=300, block_tokens=64)
    try:
        p.meet(d)
        d.meet(p)
        source, target = blocks(NUM_TOKENS, 64, 1), blocks(NUM_TOKENS, 64, 2)
        p.fill(source, 1)
        d.submit(StepOrders(fetch=(want("t1", p, TransferMode.PUSH, target, 0, NUM_TOKENS),)))
        p.submit(StepOrders(offer=(offer("t1", source, NUM_TOKENS),)))
        until(lambda: bool(d.seen[0].landed) and bool(p.seen[0].taken), p, d)
        assert d.seen[0].landed[0].num_bytes > 128 << 10, "less is never compared"
        np.testing.assert_array_equal(d.tokens(target, 0, NUM_TOKENS), p.tokens(source, 0, NUM_TOKENS))
        assert all(mover.num_staged == 0 for mover in p.movers if isinstance(mover, AdaptiveMover))
    finally:
        d.close()
        p.close()
