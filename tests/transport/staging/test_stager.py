"""Staged transfers end once, with the right bytes, and release their staging memory, whatever fails."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvferry.ids import PeerName
from kvferry.layout.blocks import TokenRange
from kvferry.layout.description import Region
from kvferry.layout.packing import StagedPlan
from kvferry.transport.base import Operation
from kvferry.transport.memory import MemoryHub, MemoryTransport
from kvferry.transport.staging.chunks import CHUNK_BYTES, chunk_plans
from kvferry.transport.staging.packer import region_views
from kvferry.transport.staging.stager import StagedDone, Stager
from kvferry.transport.staging.staging_pool import StagingPool
from tests.harness.caches import NUM_TOKENS, PAIRS, Buffers, buffers, edge, moved_directly, table
from tests.harness.until import let_threads_run

LOCAL, REMOTE = PeerName("local"), PeerName("remote")
WANTED = TokenRange(0, NUM_TOKENS)


@dataclass
class Rig:
    """A stager at the local end, and both caches. For a READ, `local` is the destination."""

    hub: MemoryHub
    near_transport: MemoryTransport
    far_transport: MemoryTransport
    stager: Stager
    pool: StagingPool
    source: Buffers
    into: Buffers
    want: Buffers
    plans: Iterator[StagedPlan]

    def wait_done(self) -> StagedDone:
        """Runs until the only transfer has ended."""
        (done,) = self.wait_all(1)
        return done

    def wait_all(self, count: int) -> list[StagedDone]:
        """Runs until this many have ended."""
        ended: list[StagedDone] = []
        end_s = time.monotonic() + 20
        while True:
            for completion in self.near_transport.poll().completions:
                assert self.stager.completed(completion)
            ended.extend(self.stager.poll())
            if len(ended) >= count:
                assert len(ended) == count
                return ended
            assert time.monotonic() < end_s
            let_threads_run()

    def arrived(self) -> bool:
        return all(np.array_equal(got, want) for got, want in zip(self.into, self.want, strict=True))


def rig(name: str, operation: Operation, *, pool_bytes: int = 64 << 10, chunk_bytes: int = 6144) -> Rig:
    over = edge(*PAIRS[name])
    source_tables, tables = table(PAIRS[name][0], 1), table(PAIRS[name][1], 2)
    source, into = buffers(over.source, 3), buffers(over.destination, 4)
    want = moved_directly(over, source_tables, tables, WANTED, source, into)
    local, remote = (into, source) if operation is Operation.READ else (source, into)
    hub, pool = MemoryHub(), StagingPool(pool_bytes)
    near_regions = [Region(buffer.ctypes.data, buffer.nbytes) for buffer in local]
    far_regions = [Region(buffer.ctypes.data, buffer.nbytes) for buffer in remote]
    transports = MemoryTransport(LOCAL, hub=hub), MemoryTransport(REMOTE, hub=hub)
    transports[0].register([*near_regions, pool.region], [*local, pool.buffer])
    transports[1].register(far_regions, remote)
    transports[0].connect(REMOTE, transports[1].metadata(), far_regions)
    transports[1].connect(LOCAL, transports[0].metadata(), near_regions)
    stager = Stager(transports[0], pool, len(near_regions), region_views(near_regions, local))
    plans = chunk_plans(over, source_tables, tables, WANTED, chunk_bytes=chunk_bytes)
    return Rig(hub, *transports, stager, pool, source, into, want, plans)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("operation", list(Operation))
def test_the_bytes_are_those_of_a_direct_transfer(name: str, operation: Operation) -> None:
    room = rig(name, operation)
    room.stager.start(REMOTE, operation, room.plans, b"done")
    done = room.wait_done()
    assert done.error is None
    assert room.arrived()
    assert done.num_bytes > 0
    assert [message.body for message in room.far_transport.poll().messages] == [b"done"]
    assert (room.pool.leased_bytes, room.stager.num_open) == (0, 0)
    room.stager.close()


@pytest.mark.parametrize("operation", list(Operation))
def test_a_pool_of_one_chunk_is_enough(operation: Operation) -> None:
    room = rig("nhd-hnd", operation, pool_bytes=8192)
    room.stager.start(REMOTE, operation, room.plans)
    assert room.wait_done().error is None
    assert room.arrived()
    assert room.pool.peak_bytes == 8192
    room.stager.close()


def test_two_transfers_share_the_pool() -> None:
    room = rig("nhd-hnd", Operation.READ, pool_bytes=16384)
    again = rig("nhd-hnd", Operation.READ)
    first = room.stager.start(REMOTE, Operation.READ, room.plans)
    second = room.stager.start(REMOTE, Operation.READ, again.plans)
    assert {done.id for done in room.wait_all(2)} == {first, second}
    assert room.arrived()
    room.stager.close()


@pytest.mark.parametrize("operation", list(Operation))
def test_a_failed_chunk_fails_the_transfer_once_after_the_others_ended(operation: Operation) -> None:
    # R26
    room = rig("nhd-hnd", operation)
    room.hub.faults.fail_after, room.hub.faults.fail_next = 2, 1
    room.stager.start(REMOTE, operation, room.plans, b"done")
    assert room.wait_done().error == "a fault was asked for"
    assert room.far_transport.poll().messages == ()
    assert (room.pool.leased_bytes, room.stager.num_open) == (0, 0)
    assert room.stager.poll() == []
    room.stager.close()


@pytest.mark.parametrize("operation", list(Operation))
def test_a_lost_peer_fails_the_transfer(operation: Operation) -> None:
    room = rig("nhd-hnd", operation)
    posts = iter(range(100))
    room.hub.faults.on_post = lambda _from, to, _operation: room.hub.lose(to) if next(posts) == 2 else None
    room.stager.start(REMOTE, operation, room.plans)
    done = room.wait_done()
    assert REMOTE in (done.error or "")
    assert room.pool.leased_bytes == 0
    room.stager.close()


def test_a_cancelled_transfer_ends_when_its_chunks_have() -> None:
    room = rig("nhd-hnd", Operation.READ)
    room.hub.faults.hold = True
    started = room.stager.start(REMOTE, Operation.READ, room.plans)
    assert room.stager.poll() == []
    room.stager.cancel(started, "aborted")
    for _ in range(5):
        assert room.near_transport.poll().completions == ()
        assert room.stager.poll() == [], "chunks are still on the wire: the blocks are not free yet"
    room.hub.faults.hold = False
    assert room.wait_done().error == "aborted"
    assert room.pool.leased_bytes == 0
    room.stager.close()


def test_a_chunk_larger_than_the_pool_is_refused_with_the_setting() -> None:
    room = rig("nhd-hnd", Operation.READ, pool_bytes=4096, chunk_bytes=1 << 20)
    room.stager.start(REMOTE, Operation.READ, room.plans)
    assert "transfer.staging_bytes=4096" in (room.wait_done().error or "")
    room.stager.close()


def test_chunks_are_cut_so_that_several_fit_the_pool() -> None:
    assert rig("same", Operation.READ, pool_bytes=64 << 10).stager.chunk_bytes == 16 << 10
    assert rig("same", Operation.READ, pool_bytes=64 << 20).stager.chunk_bytes == CHUNK_BYTES


def test_an_empty_transfer_still_ends_with_its_message() -> None:
    room = rig("same", Operation.READ)
    room.stager.start(REMOTE, Operation.READ, iter(()), b"a full hit")
    assert room.wait_done().error is None
    assert [message.body for message in room.far_transport.poll().messages] == [b"a full hit"]


def test_close_in_the_middle_releases_everything() -> None:
    room = rig("nhd-hnd", Operation.WRITE)
    room.stager.start(REMOTE, Operation.WRITE, room.plans)
    room.stager.poll()
    assert room.pool.leased_bytes > 0
    room.stager.close()
    assert (room.pool.leased_bytes, room.stager.num_open) == (0, 0)
    assert not any(thread.name.startswith("kvferry-copier") for thread in threading.enumerate())
