"""The engines of a simulated world: they allocate blocks, compute, give orders to their ranks, and act on each report.

They check every report: invariants I1 to I4 as an engine could notice a violation, and I1 also as only an observer of
the whole world can.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvferry.handoff.orders import Cancel, Failed, Fetch, KeepAlive, Landed, Offer, StepOrders, StepReport, Withdraw
from kvferry.handoff.transitions import ReceiveState
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.testing.simulator.rank import RankWorld, SimRank
from kvferry.testing.simulator.scenario import Job
from kvferry.testing.simulator.simulated_memory import GARBAGE, MAX_RANKS, Memory, Violation
from kvferry.testing.simulator.simulated_transfer import Transfer
from kvferry.transport.base import Operation
from kvferry.wire.prompt_digest import Prompt

__all__ = ["DecodeEngine", "EngineWorld", "PrefillEngine", "SimEngine"]

_LOCAL = 1 << 40
"""Tags of tokens that decode computed itself start here; tags of prefill's tokens are smaller."""


class EngineWorld(RankWorld, Protocol):
    """What an engine uses of the world."""

    slots: dict[EngineId, "SimEngine"]
    decodes: list[EngineId]
    active: dict[TransferId, dict[Transfer, None]]
    tags: dict[TransferId, int]
    num_landed: int

    def after(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        """Calls the function after this many seconds."""

    def say(self, line: str, *args: object) -> None:
        """Adds a line to the trace."""

    def dispatch(self, job: Job, must_land: bool = False, attempt: int = 0) -> None:
        """Sends a request to prefill and decode, as a router does."""

    def num_prefill_ranks(self, name: EngineId) -> int:
        """Returns the number of ranks of a prefill engine."""
        ...

    def next_tag(self, transfer: TransferId, num_tokens: int, *, local: bool = False) -> int:
        """Returns the first tag for tokens that are computed now."""
        ...

    def check_prompt(self, engine: "SimEngine", transfer: TransferId, since_s: float | None, what: str) -> None:
        """Raises Violation if blocks were freed too late."""

    def may_outlast(self, wanted_s: float) -> bool:
        """Returns whether a read may still run after its failure was reported."""
        ...


class SimEngine:
    """What prefill and decode engines share."""

    prefill: bool

    def __init__(self, world: "EngineWorld", engine: EngineId, incarnation: Incarnation, num_ranks: int) -> None:
        self.world, self.engine, self.incarnation, self.num_ranks = world, engine, incarnation, num_ranks
        self.dead = False
        self.memory = Memory(num_ranks, world.scenario.num_blocks)
        self.ranks = [SimRank(world, self, index) for index in range(num_ranks)]
        self.known: dict[EngineId, Incarnation] = {}

    def order(self, orders: StepOrders) -> None:
        """Sends orders to all ranks."""
        for rank in self.ranks:
            rank.order(orders)

    def introduce(self, other: "SimEngine") -> None:
        """Handles an accepted handshake: both engines know each other from now on."""
        if self.dead or other.dead:
            return
        self.known[other.engine] = other.incarnation
        for rank in self.ranks:
            at_s = max(rank.last_order_s, self.world.now_s)
            rank.last_order_s = at_s
            self.world.at(at_s, rank.do, rank.meet, other.engine, other.incarnation, other.num_ranks)

    def report(self, rank: SimRank, report: StepReport) -> None:
        """Handles a report of one rank."""
        raise NotImplementedError

    def check_silence(self) -> None:
        """Raises Violation if anything is open when no event is pending in the world."""
        for rank in self.ranks:
            core = rank.core
            if core.prefill._grants or core.decode._receives or core.decode._keep_alives:
                raise Violation("I3", f"{rank.name} keeps {[*core.prefill._grants, *core.decode._receives]}")
            if (
                core.prefill._posts
                or core.decode._outgoing.num_open_reads
                or core.prefill._heartbeats._beats
                or core.decode._heartbeats._beats
            ):
                raise Violation("I5", f"{rank.name} has posts or heartbeats left")
        if len(self.memory.free) != self.memory.num_blocks:
            raise Violation("I3", f"{self.incarnation}: {self.memory.num_blocks - len(self.memory.free)} blocks leaked")


@dataclass(slots=True)
class _Source:
    """A request on the prefill engine."""

    job: Job
    transfer: TransferId
    finished: Callable[[], None]
    came_s: float
    blocks: tuple[int, ...] = ()
    tag: int = 0
    offered: bool = False
    final: bool = False
    withdrawn_s: float | None = None
    released: set[int] = field(default_factory=set)


class PrefillEngine(SimEngine):
    """Computes prompts, offers them, and frees blocks when every rank has released them."""

    prefill = True

    def __init__(self, world: "EngineWorld", engine: EngineId, incarnation: Incarnation, num_ranks: int) -> None:
        super().__init__(world, engine, incarnation, num_ranks)
        self.jobs: dict[TransferId, _Source] = {}

    def take(self, job: Job, transfer: TransferId, finished: Callable[[], None]) -> None:
        """Takes a request from the router."""
        source = self.jobs[transfer] = _Source(job, transfer, finished, self.world.now_s)
        self.world.after(0.001, self._begin, source, not job.preempted)
        if job.withdraw_s is not None:
            self.world.after(job.withdraw_s, self._withdraw, source)

    def _begin(self, source: _Source, for_good: bool) -> None:
        if self.dead or source.withdrawn_s is not None:
            return
        blocks = self.memory.alloc(source.job.num_tokens)
        if blocks is None:
            if self.world.now_s - source.came_s > 60:
                self._withdraw(source)
            else:
                self.world.after(0.2, self._begin, source, for_good)
            return
        if not for_good:
            self.memory.release(blocks)
            self.world.after(0.3, self._begin, source, True)
            return
        source.blocks = blocks
        source.tag = self.world.next_tag(source.transfer, source.job.num_tokens)
        self.world.after(source.job.chunk_s, self._chunk, source, 1)

    def _chunk(self, source: _Source, number: int) -> None:
        if self.dead or source.withdrawn_s is not None:
            return
        job = source.job
        start, stop = job.num_tokens * (number - 1) // job.chunks, job.num_tokens * number // job.chunks
        for cells in self.memory.cells:
            for token in range(start, stop):
                cells[source.blocks[token] * MAX_RANKS] = source.tag + token
        source.offered, source.final = True, number == job.chunks
        offer = Offer(
            source.transfer,
            RequestId(source.transfer.split("#")[0]),
            (BlockTable(0, 0, source.blocks),),
            TokenRange(0, stop),
            source.final,
            b"note" if source.final else b"",
            Prompt.of(job.prompts[0]),
        )
        self.world.say("%s offers %s [0,%d) final=%s", self.engine, source.transfer, stop, source.final)
        self.order(StepOrders(offer=(offer,)))
        if source.final:
            source.finished()
        else:
            self.world.after(job.chunk_s, self._chunk, source, number + 1)

    def _withdraw(self, source: _Source) -> None:
        if self.dead or source.withdrawn_s is not None or source.transfer not in self.jobs or source.final:
            return
        source.withdrawn_s = self.world.now_s
        self.world.say("%s withdraws %s", self.engine, source.transfer)
        self.order(StepOrders(withdraw=(Withdraw(source.transfer, "aborted"),)))

    def report(self, rank: SimRank, report: StepReport) -> None:
        """Handles a report of one rank: frees blocks that every rank has released."""
        if report.landed or report.failed:
            raise Violation("I4", f"{rank.name} reports landed or failed on prefill")
        for transfer in sorted(report.released):  # in the same order with every PYTHONHASHSEED
            source = self.jobs.get(transfer)
            if source is None or rank.index in source.released:
                raise Violation("I4", f"{rank.name} released {transfer} twice, or without having it")
            source.released.add(rank.index)
            self.world.say("%s released %s", rank.name, transfer)
            self._check_untouched(rank, source)
            if len(source.released) == self.num_ranks:
                self._free(source)

    def _check_untouched(self, rank: SimRank, source: _Source) -> None:
        """Checks I1: no write of ours reads these blocks, and no decode rank believes that it may read them."""
        world = self.world
        for transfer in world.active.get(source.transfer, ()):
            if transfer.rank is rank and not transfer.over:
                raise Violation("I1", f"{rank.name} released {source.transfer} while it writes from its blocks")
        decode = world.slots[world.decodes[source.job.decode]]
        if decode.dead or decode.known.get(self.engine) != self.incarnation:
            return
        for other in decode.ranks:
            receive = other.core.decode._receives.get(source.transfer)
            reader = None if receive is None else receive.sources.get(rank.index)
            if receive is None or reader is None or receive.state is not ReceiveState.OPEN or not receive.pull:
                continue
            if (reader.in_flight or reader.todo) and other.now_s() < reader.lease_s:
                raise Violation("I1", f"{rank.name} released {source.transfer} while {other.name} may read it")

    def _free(self, source: _Source) -> None:
        del self.jobs[source.transfer]
        if source.blocks:
            self.memory.release(source.blocks)
        self.world.check_prompt(self, source.transfer, source.withdrawn_s, "withdrawn on prefill")


@dataclass(slots=True)
class _Target:
    """A request on the decode engine."""

    job: Job
    transfer: TransferId
    prefill: EngineId
    incarnation: Incarnation
    must_land: bool
    attempt: int
    came_s: float
    blocks: tuple[int, ...] = ()
    local_tag: int = 0
    wanted_s: float | None = None
    given_up_s: float | None = None
    cancelled: bool = False
    failed: bool = False
    landed: dict[int, Landed] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    """Ranks that landed, or released after a failure."""
    failures: set[int] = field(default_factory=set)


class DecodeEngine(SimEngine):
    """Keeps grants alive, fetches and cancels; serves what landed, and checks every cell of it."""

    prefill = False

    def __init__(self, world: "EngineWorld", engine: EngineId, incarnation: Incarnation, num_ranks: int) -> None:
        super().__init__(world, engine, incarnation, num_ranks)
        self.jobs: dict[TransferId, _Target] = {}

    def take(
        self,
        job: Job,
        transfer: TransferId,
        prefill: EngineId,
        incarnation: Incarnation,
        must_land: bool,
        attempt: int,
    ) -> None:
        """Takes a request from the router."""
        target = _Target(job, transfer, prefill, incarnation, must_land, attempt, self.world.now_s)
        self.jobs[transfer] = target
        if job.queue_s > 0.05:
            self.order(StepOrders(keep_alive=(KeepAlive(transfer, prefill, incarnation),)))
        self.world.after(job.queue_s, self._want, target)
        if job.cancel_s is not None:
            self.world.after(job.cancel_s, self._cancel, target, "the client went away")

    def _want(self, target: _Target) -> None:
        if self.dead or target.cancelled:
            return
        job = target.job
        blocks = self.memory.alloc(job.asked_tokens)
        if blocks is None:
            if self.world.now_s - target.came_s > 60:
                self._cancel(target, "no room")
            else:
                self.world.after(0.2, self._want, target)
            return
        target.blocks, target.wanted_s = blocks, self.world.now_s
        target.local_tag = _LOCAL + self.world.next_tag(target.transfer, job.asked_tokens, local=True)
        for cells in self.memory.cells:
            for token in range(job.cached_tokens):
                base = blocks[token] * MAX_RANKS
                cells[base : base + MAX_RANKS] = [target.local_tag + token] * MAX_RANKS
        want = Fetch(
            target.transfer,
            RequestId(target.transfer.split("#")[0]),
            target.prefill,
            target.incarnation,
            self.world.scenario.mode,
            (BlockTable(0, 0, blocks),),
            TokenRange(job.cached_tokens, job.asked_tokens),
            self.world.settings.transfer.deadline_s,
            Prompt.of(job.prompts[1]).stated(unit=1),
            job.asked_tokens,
        )
        self.world.say("%s wants %s [%d,%d)", self.engine, target.transfer, job.cached_tokens, job.asked_tokens)
        self.order(StepOrders(fetch=(want,)))

    def _cancel(self, target: _Target, reason: str) -> None:
        if self.dead or target.cancelled or self.jobs.get(target.transfer) is not target:
            return
        if len(target.landed) == self.num_ranks:
            return
        target.cancelled = True
        target.given_up_s = target.given_up_s or self.world.now_s
        self.world.say("%s cancels %s", self.engine, target.transfer)
        cancel = Cancel(target.transfer, target.prefill, target.incarnation, reason)
        self.order(StepOrders(cancel=(cancel,)))
        if target.wanted_s is None:
            del self.jobs[target.transfer]

    def report(self, rank: SimRank, report: StepReport) -> None:
        """Handles a report of one rank: hand-offs that landed, failed or were released."""
        for landed in report.landed:
            self._landed(rank, landed)
        for failed in report.failed:
            self._failed(rank, failed)
        for transfer in sorted(report.released):  # in the same order with every PYTHONHASHSEED
            self._released(rank, transfer)

    def _of(self, rank: SimRank, transfer: TransferId) -> _Target:
        target = self.jobs.get(transfer)
        if target is None or target.wanted_s is None or rank.index in target.ended:
            raise Violation("I4", f"{rank.name} reports {transfer}, which has ended there or never was")
        return target

    def _landed(self, rank: SimRank, landed: Landed) -> None:
        target = self._of(rank, landed.transfer)
        if rank.index in target.failures:
            raise Violation("I4", f"{rank.name}: {landed.transfer} failed and landed")
        self.world.say("%s landed %s %r", rank.name, landed.transfer, landed.arrived)
        self._check_content(rank, target, landed.arrived.stop, "landed")
        self._check_untouched(rank, target)
        job = target.job
        if landed.arrived.stop < job.asked_tokens and landed.arrived.stop != max(job.common_tokens, job.cached_tokens):
            raise Violation("I2", f"{rank.name}: {landed.transfer} landed with {landed.arrived!r}")
        if bool(landed.note) > job.same_prompt or (bool(landed.difference) and job.same_prompt):
            raise Violation("I2", f"{rank.name}: {landed.transfer} landed with the first token of another prompt")
        target.landed[rank.index] = landed
        target.ended.add(rank.index)
        if len(target.landed) == self.num_ranks and not target.cancelled:
            self.world.num_landed += 1
            # Decode reads the blocks for a while; no peer may touch them in that time.
            self.world.after(0.05 + self.world.rng.random() * 0.5, self._finish, target, landed.arrived.stop)
        elif len(target.ended) == self.num_ranks:
            self._free(target)

    def _finish(self, target: _Target, stop: int) -> None:
        if self.dead:
            return
        for rank in self.ranks:
            self._check_content(rank, target, min(one.arrived.stop for one in target.landed.values()), "served")
        self._free(target)

    def _failed(self, rank: SimRank, failed: Failed) -> None:
        target = self._of(rank, failed.transfer)
        if rank.index in target.failures:
            raise Violation("I4", f"{rank.name}: {failed.transfer} failed twice")
        self.world.say("%s failed %s %s", rank.name, failed.transfer, failed.reason)
        if target.must_land:
            raise Violation("I6", f"{rank.name}: {failed.transfer} failed in calm: {failed.reason}")
        target.failures.add(rank.index)
        self._check_survivors(rank, target)
        self._check_content(rank, target, failed.arrived.stop, "arrived before it failed")
        if not target.failed:
            target.failed = True
            self._cancel(target, "another rank failed")
            job = target.job
            if target.attempt < job.retries and job.cancel_s is None:
                self.world.after(0.01, self.world.dispatch, job, False, target.attempt + 1)

    def _check_survivors(self, rank: SimRank, target: _Target) -> None:
        """Checks R26: the failure is reported after everything has ended that it can wait for."""
        assert target.wanted_s is not None
        failed_s = rank.failed_s.pop(target.transfer, self.world.now_s)
        over = self.world.now_s - target.wanted_s > 0.8 * self.world.settings.transfer.deadline_s
        for transfer in self.world.active.get(target.transfer, ()):
            if transfer.rank is rank and not self.world.may_outlast(target.wanted_s):
                raise Violation("R26", f"{rank.name}: {target.transfer} reported while a read is in flight")
            writes = transfer.peer is self and transfer.post.peer.rank == rank.index
            if writes and not over and rank.waits_for_writer(target.transfer, transfer.rank.name, failed_s):
                raise Violation("R26", f"{rank.name}: {target.transfer} reported while {transfer.rank.name} writes")

    def _released(self, rank: SimRank, transfer: TransferId) -> None:
        target = self._of(rank, transfer)
        if not target.cancelled and rank.index not in target.failures:
            raise Violation("I4", f"{rank.name} released {transfer}, which neither failed nor was cancelled")
        self.world.say("%s released %s", rank.name, transfer)
        self._check_untouched(rank, target)
        target.ended.add(rank.index)
        if len(target.ended) == self.num_ranks:
            self._free(target)

    def _free(self, target: _Target) -> None:
        del self.jobs[target.transfer]
        self.memory.release(target.blocks)
        self.world.check_prompt(self, target.transfer, target.given_up_s, "given up on decode")

    def _check_untouched(self, rank: SimRank, target: _Target) -> None:
        """Checks I1: nothing is in flight into these blocks, and no prefill rank believes that it may write to them."""
        world = self.world
        for transfer in world.active.get(target.transfer, ()):
            ours = transfer.rank is rank or (
                transfer.peer is self
                and transfer.post.peer.rank == rank.index
                and transfer.post.operation is Operation.WRITE
            )
            if ours and not transfer.over:
                raise Violation("I1", f"{rank.name} gives up blocks of {target.transfer} while bytes are in flight")
        prefill = world.slots[target.prefill]
        if prefill.dead or prefill.incarnation != target.incarnation:
            return
        for other in prefill.ranks:
            grant = other.core.prefill._grants.get(target.transfer)
            consumer = None if grant is None else grant.consumers.get(rank.index)
            if consumer is None or consumer.peer.name != rank.name or not consumer.push:
                continue
            if consumer.todo and other.now_s() < consumer.lease_s:
                raise Violation("I1", f"{rank.name} gives up blocks of {target.transfer}; {other.name} may write them")

    def _check_content(self, rank: SimRank, target: _Target, stop: int, when: str) -> None:
        """Checks I2, that each token came complete from this dispatch and belongs to this prompt (R51), and R30, that
        our cached prefix is unchanged."""
        tag = self.world.tags.get(target.transfer)
        cells, job = self.memory.cells[rank.index], target.job
        sources = [
            index
            for index in range(self.world.num_prefill_ranks(target.prefill))
            if self.world.owes(self, rank.index, index)
        ]
        for token in range(stop):
            base = target.blocks[token] * MAX_RANKS
            for source in sources:
                found = cells[base + source]
                right = (
                    target.local_tag + token if token < job.cached_tokens else GARBAGE if tag is None else tag + token
                )
                another = job.cached_tokens <= token >= job.common_tokens
                if found != right or found == GARBAGE or another:
                    raise Violation(
                        "I2", f"{rank.name}: token {token} of {target.transfer} from rank {source} is wrong ({when})"
                    )
