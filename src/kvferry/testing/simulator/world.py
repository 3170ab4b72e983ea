"""The event loop of one simulated world: clocks, network, transfers, crashes. The machines in it are the real ones."""

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from kvferry.handoff.actions import Peer, Post
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.ids import EngineId, Incarnation, PeerName, TransferId
from kvferry.testing.simulator.rank import TOKEN_S, RankEngine, SimRank, short
from kvferry.testing.simulator.scenario import Job, Scenario, settings_of
from kvferry.testing.simulator.simulated_engine import DecodeEngine, PrefillEngine, SimEngine
from kvferry.testing.simulator.simulated_memory import Violation
from kvferry.testing.simulator.simulated_transfer import Transfer
from kvferry.transport.base import Operation
from kvferry.wire.handoff_messages import Message

__all__ = ["World"]

_MAX_EVENTS = 200_000
PROMPT_S = 1.9
"""Without faults, blocks are free after this time, well before a lease ends."""


class World:
    """One run of one scenario. `run` raises Violation if an invariant does not hold.

    `prepare` may change each rank's protocol when it is created, as mutants do. If `trace` is a list, it collects one
    line per event.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        prepare: Callable[[RankProtocol], None] = lambda core: None,
        trace: list[str] | None = None,
    ) -> None:
        self.scenario = scenario
        self.settings = settings_of(scenario)
        self.prepare = prepare
        self.trace = trace
        self.rng = random.Random(scenario.seed ^ 0x5EED)
        self.now_s = 0.0
        self.num_events = 0
        self.num_handoffs = 0
        self.num_landed = 0
        self.calm_phase = scenario.calm
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.slots: dict[EngineId, SimEngine] = {}
        self.prefills = [EngineId(f"p{i}") for i in range(len(scenario.prefill_ranks))]
        self.decodes = [EngineId(f"d{i}") for i in range(len(scenario.decode_ranks))]
        self.active: dict[TransferId, dict[Transfer, None]] = {}
        # Dicts and not sets, so that the order depends on the seed and not on addresses.
        self._last_s: dict[tuple[PeerName, PeerName], float] = {}
        self._starts = 0
        self.tags: dict[TransferId, int] = {}
        self._next_tag = 0

    # ---- events

    def at(self, at_s: float, function: Callable[..., None], *args: Any) -> None:
        """Calls the function at this time."""
        self._count += 1
        heappush(self._heap, (at_s, self._count, function, args))

    def after(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        """Calls the function after this many seconds."""
        self.at(self.now_s + seconds, function, *args)

    def say(self, line: str, *args: object) -> None:
        """Adds a line to the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.now_s:9.4f}  " + (line % args if args else line))

    def run(self) -> None:
        """Runs the whole scenario, then a calm hand-off between each pair, then the final checks."""
        scenario = self.scenario
        for name, ranks in zip(self.prefills, scenario.prefill_ranks, strict=True):
            self.start_engine(name, True, ranks)
        for name, ranks in zip(self.decodes, scenario.decode_ranks, strict=True):
            self.start_engine(name, False, ranks)
        for job in scenario.jobs:
            self.at(0.5 + job.at_s, self.dispatch, job)
        for crash in scenario.crashes:
            name = (self.prefills if crash.prefill else self.decodes)[crash.engine]
            self.at(0.6 + crash.at_s, self.crash, name, crash.down_s)
        for pause in scenario.pauses:
            name = (self.prefills if pause.prefill else self.decodes)[pause.engine]
            self.at(0.6 + pause.at_s, self.pause, name, pause.for_s)
        self._drain()
        self._check_silence()
        standing = [rank.paused_to_s for engine in self.slots.values() for rank in engine.ranks]
        self.now_s = max([self.now_s, *standing])
        self._calm_round()
        self._drain()
        self._check_silence()

    def _drain(self) -> None:
        heap = self._heap
        while heap:
            self.now_s, _, function, args = heappop(heap)
            self.num_events += 1
            function(*args)
            if self.num_events > _MAX_EVENTS:
                raise Violation("I3", "events without end")

    def _calm_round(self) -> None:
        """Hands over once between each pair: this must work, whatever happened before (I6)."""
        self.calm_phase = True
        number = 1_000_000
        self.now_s += 1.0
        for prefill in range(len(self.prefills)):
            for decode in range(len(self.decodes)):
                number += 1
                push = self.scenario.mode.value == "push"
                job = Job(number, self.now_s, prefill, decode, 3, 3, 0, 2, 0.05, push, 0.05)
                self.after(0.1 * (number % 100), self.dispatch, job, True)

    def _check_silence(self) -> None:
        """Raises Violation if anything is left over when no event is pending (I3, I5)."""
        for engine in self.slots.values():
            engine.check_silence()
        if any(self.active.values()):
            raise Violation("I3", "a transfer never ended")

    # ---- engines

    def start_engine(self, name: EngineId, prefill: bool, num_ranks: int) -> None:
        """Starts a new incarnation, which exchanges handshakes with all engines of the other side."""
        self._starts += 1
        kind = PrefillEngine if prefill else DecodeEngine
        engine = self.slots[name] = kind(self, name, Incarnation(f"{name}.{self._starts}"), num_ranks)
        self.say("start %s ranks=%d", engine.incarnation, num_ranks)
        for other in list(self.slots.values()):
            if other.prefill is not prefill and not other.dead:
                self.after(self.rng.random() * 0.3, engine.introduce, other)
                self.after(self.rng.random() * 0.3, other.introduce, engine)

    def crash(self, name: EngineId, down_s: float) -> None:
        """Kills an engine. Its writes in flight may continue, for less than the quarantine; its reads end at once."""
        engine = self.slots[name]
        if engine.dead:
            return
        self.say("crash %s", engine.incarnation)
        engine.dead = True
        for transfers in list(self.active.values()):
            for transfer in list(transfers):
                if transfer.rank.engine is engine:
                    if transfer.post.operation is Operation.READ:
                        self._finish(transfer, "the reader died")
                    else:
                        self.after(self._linger_s(), self._finish, transfer, "the writer died")
                elif transfer.peer is engine:
                    self.after(self.rng.random() * 0.05, self._finish, transfer, "the peer died")
        self.after(down_s, self.start_engine, name, engine.prefill, engine.num_ranks)

    def pause(self, name: EngineId, for_s: float) -> None:
        """Suspends all ranks of an engine."""
        engine = self.slots[name]
        self.say("pause %s for %.3f s", engine.incarnation, for_s)
        for rank in engine.ranks:
            rank.paused_to_s = max(rank.paused_to_s, self.now_s + for_s)

    def dispatch(self, job: Job, must_land: bool = False, attempt: int = 0) -> None:
        """Dispatches a request as a router does: to prefill, and to decode at the same time or after prefill."""
        self.num_handoffs += 1
        transfer = TransferId(f"r{job.number}#{attempt}")
        prefill = self.slots[self.prefills[job.prefill]]
        self.say("dispatch %s to %s and %s", transfer, prefill.incarnation, self.decodes[job.decode])
        assert isinstance(prefill, PrefillEngine)

        def to_decode() -> None:
            self._to_decode(job, transfer, prefill.incarnation, must_land, attempt)

        def finished() -> None:
            if not (job.early or job.lost_by_router):
                self.after(0.002, to_decode)

        if not prefill.dead and not job.never_prefilled:
            prefill.take(job, transfer, finished)
        if job.early and not job.lost_by_router:
            to_decode()

    def _to_decode(
        self, job: Job, transfer: TransferId, incarnation: Incarnation, must_land: bool, attempt: int
    ) -> None:
        decode = self.slots[self.decodes[job.decode]]
        if not decode.dead and isinstance(decode, DecodeEngine):
            decode.take(job, transfer, self.prefills[job.prefill], incarnation, must_land, attempt)

    def owes(self, engine: RankEngine, ours: int, theirs: int) -> bool:
        """Returns whether these ranks exchange any byte."""
        if self.scenario.owes_all:
            return True
        prefill, decode = (ours, theirs) if engine.prefill else (theirs, ours)
        return prefill == 0 or (prefill + decode) % 2 == 0

    def num_prefill_ranks(self, name: EngineId) -> int:
        """Returns the number of ranks of an engine; restarts do not change it."""
        return self.slots[name].num_ranks

    def next_tag(self, transfer: TransferId, num_tokens: int, *, local: bool = False) -> int:
        """Returns the first tag for tokens computed now. Decode must find these, unless it computed them itself."""
        first = self._next_tag
        self._next_tag += num_tokens
        if not local:
            self.tags[transfer] = first
        return first

    def check_prompt(self, engine: SimEngine, transfer: TransferId, since_s: float | None, what: str) -> None:
        """Checks I3: without faults each end is announced, so that neither side has to wait for a lease."""
        if since_s is not None and self.scenario.calm and self.now_s - since_s > PROMPT_S:
            raise Violation("I3", f"{engine.incarnation}: {transfer}, {what}, freed after {self.now_s - since_s:.2f} s")

    def may_outlast(self, wanted_s: float) -> bool:
        """Returns whether a read may outlast the report of its failure: only if its deadline or grace had passed."""
        return not self.scenario.smooth or self.now_s - wanted_s > 0.8 * self.settings.transfer.deadline_s

    # ---- network

    def send(self, rank: SimRank, peer: Peer, message: Message) -> None:
        """Sends a control message. It may be lost, late, duplicated, out of order, or reach another incarnation."""
        rng, scenario = self.rng, self.scenario
        if self.trace is not None:
            self.say("%s -> %s %s", rank.name, peer.name, short(message))
        if self.now_s < rank.away.get(peer.name, 0.0):
            return
        target = self.slots[peer.engine]
        if target.dead or target.incarnation != peer.incarnation:
            if rng.random() < 0.5:
                self.after(0.001, rank.do, rank.lose, peer.name)
            if target.dead or rng.random() < 0.3:
                return
        if not self.calm_phase and (rng.random() < scenario.drop or self._cut(rank.engine, peer.engine)):
            self.say("   lost")
            return
        self._deliver_later(rank, target, peer, message)
        if not self.calm_phase and scenario.duplicate and rng.random() < scenario.duplicate:
            self._deliver_later(rank, target, peer, message)

    def _cut(self, sender: RankEngine, target: EngineId) -> bool:
        """Returns whether there is a partition in this direction now."""
        for cut in self.scenario.partitions:
            if cut.to_prefill is not sender.prefill and 0.6 <= self.now_s - cut.at_s < 0.6 + cut.for_s:
                ends = {self.prefills[cut.prefill], self.decodes[cut.decode]}
                if ends == {sender.engine, target}:
                    return True
        return False

    def _deliver_later(self, rank: SimRank, target: SimEngine, peer: Peer, message: Message) -> None:
        rng, scenario = self.rng, self.scenario
        at_s = self.now_s + 0.0005 + rng.random() * 0.004
        if not self.calm_phase and scenario.long_delay and rng.random() < scenario.long_delay:
            at_s += rng.random() * 3.0
        if self.calm_phase or scenario.in_order:
            lane = (rank.name, peer.name)
            at_s = max(at_s, self._last_s.get(lane, 0.0))
            self._last_s[lane] = at_s
        # Messages go to an address, so a restarted process gets what was meant for its predecessor.
        self.at(at_s, self._arrive, rank.name, peer, target, message)

    def _arrive(self, sender: PeerName, peer: Peer, target: SimEngine, message: Message) -> None:
        engine = self.slots[target.engine]
        if engine.dead or peer.rank >= engine.num_ranks:
            return
        rank = engine.ranks[peer.rank]
        rank.do(rank.receive, sender, message)

    def disconnect(self, rank: SimRank, peer: Peer) -> None:
        """Ends everything in flight with the peer, in both directions, within the quarantine."""
        self.say("%s disconnects %s", rank.name, peer.name)
        for transfers in list(self.active.values()):
            for transfer in list(transfers):
                ours = transfer.rank is rank and transfer.post.peer == peer
                if ours or (transfer.rank.name == peer.name and transfer.post.peer.name == rank.name):
                    self.after(self._linger_s(), self._finish, transfer, "disconnected")

    def _linger_s(self) -> float:
        return self.rng.random() * 0.7 * self.settings.lease.quarantine_s

    # ---- transfers

    def post(self, rank: SimRank, post: Post) -> None:
        """Starts a transfer a moment later, as the driver does, unless it is too late by then."""
        self.after(self.rng.random() * 0.004, rank.do, self._start, rank, post)

    def _start(self, rank: SimRank, post: Post) -> None:
        rng, scenario = self.rng, self.scenario
        peer = self.slots[post.peer.engine]
        reading = post.operation is Operation.READ
        source, target = (post.remote, post.local) if reading else (post.local, post.remote)
        pairs = [
            (source[0].block_ids[token - source[0].first_token], target[0].block_ids[token - target[0].first_token])
            for token in range(post.tokens.start, post.tokens.stop)
        ]
        transfer = Transfer(rank, post, peer, pairs)
        if rank.now_s() > post.not_after_s:
            self.say("%s too late for %s %s", rank.name, post.operation, post.transfer)
            rank.do(rank.ended, post, len(pairs), None, False)
            return
        if peer.dead or peer.incarnation != post.peer.incarnation or self.now_s < rank.away.get(post.peer.name, 0.0):
            rank.do(rank.ended, post, len(pairs), "the peer is gone", True)
            rank.do(rank.lose, post.peer.name)
            return
        self.say(
            "%s %s %s tokens=[%d,%d) of %s",
            rank.name,
            post.operation,
            post.transfer,
            post.tokens.start,
            post.tokens.stop,
            post.peer.name,
        )
        self.active.setdefault(post.transfer, {})[transfer] = None
        takes_s = (0.01 + rng.random() * 0.04) + TOKEN_S * len(pairs) * rng.random()
        error = None
        if not self.calm_phase:
            if scenario.slow and rng.random() < scenario.slow:
                takes_s += rng.random() * 2.0 * scenario.ttl_s
            if scenario.fail and rng.random() < scenario.fail:
                error = "a fault"
            if scenario.hang and rng.random() < scenario.hang:
                self.after(takes_s * rng.random(), self._copy_half, transfer)
                return
        if len(pairs) > 1:
            self.after(takes_s * rng.random(), self._copy_half, transfer)
        self.after(takes_s, self._finish, transfer, error)

    def _can_copy(self, transfer: Transfer) -> bool:
        if transfer.over or transfer.peer.dead:
            return False
        return not (transfer.rank.engine.dead and transfer.post.operation is Operation.READ)

    def _copy_half(self, transfer: Transfer) -> None:
        if self._can_copy(transfer):
            half = len(transfer.pairs) // 2
            transfer.copy(transfer.pairs[:half])

    def _finish(self, transfer: Transfer, error: str | None) -> None:
        """Ends a transfer, complete or not. After that its message is sent, and its completion is delivered."""
        if transfer.over:
            return
        post, rank = transfer.post, transfer.rank
        if self._can_copy(transfer):
            # A failed transfer may have moved any part of its bytes, so neither side may rely on all or nothing.
            upto = len(transfer.pairs) if error is None else self.rng.randint(0, len(transfer.pairs))
            transfer.copy(transfer.pairs[:upto])
        elif error is None:
            error = "the peer died"
        transfer.over = True
        del self.active[post.transfer][transfer]
        if not self.active[post.transfer]:
            del self.active[post.transfer]
        if error is None and post.message is not None and not rank.engine.dead:
            self.send(rank, post.peer, post.message)
        delay_s = self.rng.random() * 0.003
        if not self.calm_phase and self.scenario.late and self.rng.random() < self.scenario.late:
            delay_s += self.rng.random() * 1.5 * self.scenario.ttl_s
        self.after(delay_s, rank.do, rank.ended, post, len(transfer.pairs), error, True)
