"""Carries out the staged transfers of one driver: chunk by chunk through our own staging memory.

A READ brings a chunk from the peer's cache into staging, then unpacks it; a WRITE packs a chunk, then writes it from
staging into the peer's cache. The peer does nothing, and needs no staging. A second thread copies one chunk while the
driver's thread moves the next; when the copier is busy, the driver copies too, instead of waiting.

Life of a chunk of a READ:   leased -> reading -> unpacking -> released.
Life of a chunk of a WRITE:  leased -> packing -> writing   -> released.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NewType

from kvferry.errors import FerryError, PeerLost, TransferError
from kvferry.ids import PeerName
from kvferry.layout.blocks import Runs
from kvferry.layout.packing import StagedPlan
from kvferry.transport.base import Completion, Operation, Ticket, Transport
from kvferry.transport.staging.chunks import CHUNK_BYTES
from kvferry.transport.staging.packer import Memory, pack, staging_runs, unpack
from kvferry.transport.staging.staging_pool import Lease, StagingPool

__all__ = ["StagedDone", "StagedId", "Stager"]

logger = logging.getLogger(__name__)

StagedId = NewType("StagedId", int)
MAX_CHUNKS = 4
"""The most chunks of one transfer in work at once: one on the wire, one being copied, and one ready for each."""


@dataclass(frozen=True, slots=True)
class StagedDone:
    """A staged transfer has ended, with every chunk: no byte of cache or staging will change for it any more."""

    id: StagedId
    error: str | None
    num_bytes: int
    """The number of bytes moved over the wire and copied."""
    num_runs: int
    """The number of runs posted to the transport."""
    lost: bool = False
    """The peer is gone."""


@dataclass(slots=True, eq=False)
class _Chunk:
    owner: "_Staged"
    plan: StagedPlan
    lease: Lease
    runs: list[Runs]
    copying: "Future[None] | None" = None


@dataclass(slots=True, eq=False)
class _Staged:
    id: StagedId
    peer: PeerName
    operation: Operation
    plans: Iterator[StagedPlan]
    message: bytes
    chunks: list[_Chunk] = field(default_factory=list)
    next_plan: StagedPlan | None = None
    exhausted: bool = False
    error: str | None = None
    lost: bool = False
    announced: bool = False
    num_bytes: int = 0
    num_runs: int = 0


class Stager:
    """Called by the driver's thread only. `staging_region` is the index of the pool's region at the transport.

    Give every completion of the transport to `completed`; call `poll` as often as the transport's.
    """

    def __init__(self, transport: Transport, pool: StagingPool, staging_region: int, memory: Memory) -> None:
        self._transport = transport
        self._pool = pool
        self._staging_region = staging_region
        self._memory = memory
        self._copier: ThreadPoolExecutor | None = None
        self._ids = itertools.count(1)
        self._open: dict[StagedId, _Staged] = {}
        self._posted: dict[Ticket, _Chunk] = {}

    @property
    def chunk_bytes(self) -> int:
        """The size to give to chunk_plans, so that MAX_CHUNKS chunks fit the pool."""
        return min(CHUNK_BYTES, self._pool.num_bytes // MAX_CHUNKS)

    def start(
        self, peer: PeerName, operation: Operation, plans: Iterator[StagedPlan], message: bytes = b""
    ) -> StagedId:
        """Begins. `message` reaches the peer after the last byte of the wire, as with Transport.post.

        For a READ local memory is the plans' destination, for a WRITE their source. `poll` returns failures.
        """
        staged = _Staged(StagedId(next(self._ids)), peer, operation, plans, message)
        self._open[staged.id] = staged
        return staged.id

    def cancel(self, staged_id: StagedId, reason: str) -> None:
        """Starts no more chunks; the transfer ends, with this reason, when those in work have ended."""
        staged = self._open.get(staged_id)
        if staged is not None:
            staged.error = staged.error or reason

    def completed(self, completion: Completion) -> bool:
        """The transport ended a ticket. False: it is not one of ours."""
        chunk = self._posted.pop(completion.ticket, None)
        if chunk is None:
            return False
        staged = chunk.owner
        if completion.error is not None:
            staged.error = staged.error or completion.error
            self._drop(chunk)
        elif staged.operation is Operation.WRITE:
            staged.num_bytes += chunk.plan.num_bytes
            self._drop(chunk)
        else:
            staged.num_bytes += chunk.plan.num_bytes
            self._copy(chunk)
        return True

    def poll(self) -> Sequence[StagedDone]:
        """Moves on whatever can move, and returns what has ended since the last call. May block for one copy."""
        for staged in self._open.values():
            for chunk in staged.chunks[:]:
                if chunk.copying is not None and chunk.copying.done():
                    self._copied(chunk)
            self._begin_chunk(staged)
        ended = [staged for staged in self._open.values() if self._has_ended(staged)]
        for staged in ended:
            del self._open[staged.id]
        return [StagedDone(staged.id, staged.error, staged.num_bytes, staged.num_runs, staged.lost) for staged in ended]

    @property
    def num_open(self) -> int:
        """The number of transfers that have not ended."""
        return len(self._open)

    def close(self) -> None:
        """Called before the transport's close, and before memory is freed. Waits for a copy that is under way."""
        if self._copier is not None:
            self._copier.shutdown(wait=True, cancel_futures=True)
        for staged in self._open.values():
            for chunk in staged.chunks:
                self._pool.release(chunk.lease)
        self._open.clear()
        self._posted.clear()

    def _begin_chunk(self, staged: _Staged) -> None:
        """Begins at most one chunk: a post may be the copy, and the chunk before should be unpacked meanwhile."""
        if staged.error is not None or staged.exhausted or len(staged.chunks) >= MAX_CHUNKS:
            return
        try:
            plan = staged.next_plan if staged.next_plan is not None else next(staged.plans, None)
            if plan is None:
                staged.exhausted = True
                return
            if plan.num_bytes > self._pool.num_bytes:
                raise TransferError(
                    f"a chunk of {plan.num_bytes} bytes does not fit transfer.staging_bytes={self._pool.num_bytes}"
                )
            staged.next_plan = plan
            lease = self._pool.acquire(plan.num_bytes)
            if lease is None:
                return  # other transfers have the memory; they give it back in bounded time
            staged.next_plan = None
            self._begin(staged, plan, lease)
        except FerryError as error:
            staged.error = str(error)
            staged.lost = isinstance(error, PeerLost)

    def _begin(self, staged: _Staged, plan: StagedPlan, lease: Lease) -> None:
        remote = plan.source if staged.operation is Operation.READ else plan.destination
        runs = staging_runs(remote, staging_region=self._staging_region, staging_offset=lease.offset)
        chunk = _Chunk(staged, plan, lease, runs)
        staged.chunks.append(chunk)
        if staged.operation is Operation.WRITE:
            self._copy(chunk)
        else:
            self._post(chunk)

    def _post(self, chunk: _Chunk) -> None:
        staged = chunk.owner
        try:
            ticket = self._transport.post(staged.peer, staged.operation, chunk.runs)
        except FerryError:
            self._drop(chunk)
            raise
        staged.num_runs += sum(map(len, chunk.runs))
        self._posted[ticket] = chunk

    def _copy(self, chunk: _Chunk) -> None:
        memory, staging = self._memory, self._pool.slice(chunk.lease)
        if chunk.owner.operation is Operation.READ:
            copy = functools.partial(unpack, chunk.plan.destination, staging, memory)
        else:
            copy = functools.partial(pack, chunk.plan.source, memory, staging)
        if self._num_copying > 1:
            # The copier is busy, and on a loaded machine it may not even run: this thread would only wait for it.
            chunk.copying = _done_here(copy)
        else:
            if self._copier is None:
                self._copier = ThreadPoolExecutor(1, thread_name_prefix="kvferry-copier")
            chunk.copying = self._copier.submit(copy)

    @property
    def _num_copying(self) -> int:
        chunks = (chunk for staged in self._open.values() for chunk in staged.chunks)
        return sum(chunk.copying is not None and not chunk.copying.done() for chunk in chunks)

    def _copied(self, chunk: _Chunk) -> None:
        staged = chunk.owner
        assert chunk.copying is not None, "only a chunk that is being copied can have been copied"
        failure = chunk.copying.exception()
        chunk.copying = None
        if failure is not None:
            if not isinstance(failure, FerryError):
                logger.error("copy failed peer=%s", staged.peer, exc_info=failure)
            staged.error = staged.error or f"a copy failed: {failure}"
            self._drop(chunk)
        elif staged.operation is Operation.READ or staged.error is not None:
            self._drop(chunk)
        else:
            try:
                self._post(chunk)
            except FerryError as error:
                staged.error = str(error)
                staged.lost = isinstance(error, PeerLost)

    def _drop(self, chunk: _Chunk) -> None:
        self._pool.release(chunk.lease)
        chunk.owner.chunks.remove(chunk)

    def _has_ended(self, staged: _Staged) -> bool:
        if staged.chunks:
            # The peer gets its message when the wire is done, not when our copies are.
            if staged.exhausted and not self._on_the_wire(staged):
                self._announce(staged)
            return False
        if staged.error is None and not staged.exhausted:
            return False
        self._announce(staged)
        return True

    def _on_the_wire(self, staged: _Staged) -> bool:
        if staged.operation is Operation.WRITE:
            return True  # chunks that are being packed still have to go
        return any(chunk.owner is staged for chunk in self._posted.values())

    def _announce(self, staged: _Staged) -> None:
        if staged.announced or not staged.message or staged.error is not None:
            return
        staged.announced = True
        try:
            self._transport.send(staged.peer, staged.message)
        except FerryError as error:
            # The bytes are here and valid. If the peer does not learn of it, its lease ends.
            logger.warning("message after a transfer was lost peer=%s cause=%s", staged.peer, error)


def _done_here(copy: Callable[[], None]) -> "Future[None]":
    future: Future[None] = Future()
    try:
        copy()
    except Exception as error:  # noqa: BLE001  # handled where the future is read, as for a copy of the other thread
        future.set_exception(error)
    else:
        future.set_result(None)
    return future
