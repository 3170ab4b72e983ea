"""Staging memory is bounded, and a staged transfer leaves the same bytes as a direct one. R30, R36."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import ConfigError, MalformedMessage, TransferError
from kvferry.layout.blocks import TokenRange
from kvferry.layout.description import MemoryKind, Region
from kvferry.layout.packing import PackBox, PackPlan, Side, StagedPlan, plan_staged
from kvferry.transport.staging.chunks import chunk_plans
from kvferry.transport.staging.packer import (
    copy_with_numpy,
    copy_with_torch,
    num_pieces,
    pack,
    region_views,
    staging_runs,
    unpack,
)
from kvferry.transport.staging.staging_pool import Lease, StagingPool
from tests.harness.caches import NUM_TOKENS, PAIRS, Buffers, buffers, edge, moved_directly, table
from tests.harness.devices import DEVICE
from tests.harness.hypothesis_profile import examples


def views(memory: Buffers) -> list[torch.Tensor]:
    return [torch.from_numpy(buffer) for buffer in memory]


def through_staging(plans: list[StagedPlan], source: Buffers, into: Buffers) -> None:
    for plan in plans:
        staging = torch.full((plan.num_bytes + 64,), 0xEE, dtype=torch.uint8)
        pack(plan.source, views(source), staging)
        assert bytes(staging[plan.num_bytes :].tolist()) == b"\xee" * 64, "packing stays inside num_bytes"
        unpack(plan.destination, staging, views(into))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("seeds", [(None, None), (1, 2)])
@pytest.mark.parametrize("wanted", [(0, NUM_TOKENS), (5, 277), (48, 49), (100, 100)])
@pytest.mark.parametrize("chunk_bytes", [None, 1, 3000])
def test_staged_bytes_equal_direct_bytes(
    name: str, seeds: tuple[int | None, int | None], wanted: tuple[int, int], chunk_bytes: int | None
) -> None:
    over = edge(*PAIRS[name])
    source_tables, tables = table(PAIRS[name][0], seeds[0]), table(PAIRS[name][1], seeds[1])
    tokens = TokenRange(*wanted)
    source, into = buffers(over.source, 3), buffers(over.destination, 4)
    want = moved_directly(over, source_tables, tables, tokens, source, into)
    if chunk_bytes is None:
        plans = [plan_staged(over, source_tables, tables, tokens)]
    else:
        plans = list(chunk_plans(over, source_tables, tables, tokens, chunk_bytes=chunk_bytes))
    through_staging(plans, source, into)
    assert all(np.array_equal(got, expected) for got, expected in zip(into, want, strict=True))


@pytest.mark.parametrize("name", PAIRS)
def test_runs_to_and_from_staging_do_what_packing_does(name: str) -> None:
    over = edge(*PAIRS[name])
    source_tables, tables = table(PAIRS[name][0], 1), table(PAIRS[name][1], 2)
    source, into = buffers(over.source, 3), buffers(over.destination, 4)
    want = moved_directly(over, source_tables, tables, TokenRange(0, NUM_TOKENS), source, into)
    for plan in chunk_plans(over, source_tables, tables, TokenRange(0, NUM_TOKENS), chunk_bytes=2000):
        staging = np.zeros(plan.num_bytes + 128, np.uint8)
        for side, memory in ((plan.source, source), (plan.destination, into)):
            for runs in staging_runs(side, staging_region=9, staging_offset=128):
                ends = {runs.source_region: runs.source, runs.destination_region: runs.destination}
                staged, cached = ends.pop(9), ends.popitem()
                for at, there, length in zip(staged, cached[1], runs.length, strict=True):
                    if side.side is Side.SOURCE:
                        staging[at : at + length] = memory[cached[0]][there : there + length]
                    else:
                        memory[cached[0]][there : there + length] = staging[at : at + length]
    assert all(np.array_equal(got, expected) for got, expected in zip(into, want, strict=True))


def test_chunks_of_block_major_caches_keep_blocks_whole() -> None:
    # The source side then needs no packing: its blocks are sent as they are.
    over = edge(*PAIRS["nhd-hnd"])
    plans = list(chunk_plans(over, table(PAIRS["nhd-hnd"][0], 1), table(PAIRS["nhd-hnd"][1], 2), TokenRange(0, 288)))
    assert sum(num_pieces(plan.source) for plan in plans) == NUM_TOKENS // 16
    assert sum(plan.num_bytes for plan in plans) == over.source.regions[0].num_bytes * 18 // 21


def test_a_table_that_is_wrong_is_refused_before_the_first_chunk() -> None:
    over = edge(*PAIRS["same"])
    good, bad = table(PAIRS["same"][0], None), table(PAIRS["same"][0], None)
    bad[0].block_ids[17] = 99  # type: ignore[index]
    with pytest.raises(MalformedMessage):
        chunk_plans(over, bad, good, TokenRange(0, NUM_TOKENS), chunk_bytes=1)


def test_a_plan_that_leaves_its_memory_is_refused() -> None:
    box = PackBox(0, 0, np.array([0, 3]), 64, (), 64, 0, 64)
    memory = [torch.zeros(256, dtype=torch.uint8)]
    pack(PackPlan(Side.SOURCE, (box,), 128), memory, torch.zeros(128, dtype=torch.uint8))
    with pytest.raises(TransferError, match="leaves its memory"):
        pack(
            PackPlan(Side.SOURCE, (box,), 128),
            [torch.zeros(255, dtype=torch.uint8)],
            torch.zeros(128, dtype=torch.uint8),
        )
    with pytest.raises(TransferError, match="leaves its memory"):
        unpack(PackPlan(Side.DESTINATION, (box,), 128), torch.zeros(127, dtype=torch.uint8), memory)
    with pytest.raises(TransferError, match="leaves its memory"):
        unpack(PackPlan(Side.DESTINATION, (box,), 128), torch.zeros(128, dtype=torch.uint8), [])
    below = PackBox(0, 0, np.array([-1]), 64, (), 64, 0, 64)
    with pytest.raises(TransferError, match="leaves its memory"):
        pack(PackPlan(Side.SOURCE, (below,), 64), memory, torch.zeros(128, dtype=torch.uint8))


@pytest.mark.parametrize("ids", [[0], [2, 1, 0], [0, 1, 2, 3, 9, 7], [5, 5 + 3, 5 + 6, 0, 1], list(range(40))[::-1]])
@pytest.mark.parametrize("offset", [16, 12, 6, 3])
@pytest.mark.device
def test_torch_and_numpy_copy_the_same(ids: list[int], offset: int) -> None:
    noise = np.random.default_rng(1)
    box = PackBox(0, offset, np.array(ids), 48, ((2, 20, 12), (3, 4, 4)), 4, offset, 24)
    old_cache = np.frombuffer(noise.bytes(48 * 50), np.uint8)
    old_staging = np.frombuffer(noise.bytes(24 * len(ids) + 32), np.uint8)
    for into_staging in (True, False):
        results = []
        ways: list[tuple[Callable[..., None], Callable[[Any], Any]]]
        ways = [(copy_with_numpy, np.copy), (copy_with_torch, lambda array: torch.from_numpy(array.copy()).to(DEVICE))]
        for copy, as_given in ways:
            cache, staging = as_given(old_cache), as_given(old_staging)
            copy(box, cache, staging, into_staging=into_staging)
            results.append(tuple(np.asarray(torch.as_tensor(one).cpu()).tobytes() for one in (cache, staging)))
        assert results[0] == results[1]
        assert results[0] != (old_cache.tobytes(), old_staging.tobytes())


@pytest.mark.parametrize("ids", [[0], [2, 1, 0], [0, 1, 2, 3, 9, 7], [5, 5 + 3, 5 + 6, 0, 1], list(range(40))[::-1]])
def test_block_ids_of_any_order(ids: list[int]) -> None:
    cache = torch.arange(64 * 50, dtype=torch.int64).to(torch.uint8)
    box = PackBox(0, 16, np.array(ids), 64, ((2, 16, 16),), 8, 0, 32)
    staging = torch.zeros(32 * len(ids), dtype=torch.uint8)
    pack(PackPlan(Side.SOURCE, (box,), staging.numel()), [cache], staging)
    for place, block in enumerate(ids):
        for piece in range(2):
            at = 16 + block * 64 + piece * 16
            assert torch.equal(staging[place * 32 + piece * 16 :][:8], cache[at : at + 8])


def test_views_of_dram_and_of_a_tensors_storage() -> None:
    memory = np.arange(100, dtype=np.uint8)
    (view,) = region_views([Region(memory.ctypes.data + 10, 50)], [])
    view[0] = 77
    assert memory[10] == 77
    assert view.numel() == 50
    with pytest.raises(TransferError, match="no owner holds"):
        region_views([Region(1 << 40, 64, MemoryKind.VRAM)], [torch.zeros(64, dtype=torch.uint8)])
    tensor = torch.arange(64, dtype=torch.uint8)
    (inside,) = region_views([Region(tensor.data_ptr() + 8, 16, MemoryKind.VRAM)], [object(), tensor])
    assert torch.equal(inside, tensor[8:24])


def test_the_pool_is_bounded_and_reused() -> None:
    pool = StagingPool(10 * 4096)
    first, second = pool.acquire(1), pool.acquire(8 * 4096)
    assert first is not None
    assert second is not None
    assert pool.acquire(4097) is None
    assert pool.largest_free == 4096
    pool.release(first)
    pool.release(first)  # a second time does nothing
    assert pool.leased_bytes == 8 * 4096
    assert pool.slice(second).numel() == 8 * 4096
    pool.release(second)
    assert (pool.leased_bytes, pool.largest_free) == (0, 10 * 4096)
    assert pool.peak_bytes == 9 * 4096
    assert pool.region.num_bytes == 10 * 4096
    pool.close()


@pytest.mark.parametrize("size", [0, 4095, -1])
def test_a_pool_without_room_is_a_wrong_setting(size: int) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.staging_bytes"):
        StagingPool(size)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=60))
@settings(max_examples=examples(100))
def test_leases_never_overlap_and_all_memory_is_released(steps: list[tuple[bool, int]]) -> None:
    pool = StagingPool(64 << 10)
    held: list[Lease] = []
    for take, number in steps:
        if take:
            lease = pool.acquire(number)
            if lease is None:
                assert pool.largest_free < number
                continue
            assert lease.offset % 4096 == 0
            assert lease.offset + number <= pool.num_bytes
            assert all(
                lease.offset + number <= other.offset or other.offset + other.num_bytes <= lease.offset
                for other in held
            )
            held.append(lease)
        elif held:
            pool.release(held.pop(number % len(held)))
    for lease in held:
        pool.release(lease)
    assert (pool.leased_bytes, pool.largest_free) == (0, pool.num_bytes)
