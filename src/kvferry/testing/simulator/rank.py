"""One rank in the simulated world: the real machines, a clock of its own, and what the driver does around them."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvferry.handoff.actions import Peer, Post, Send
from kvferry.handoff.orders import StepOrders, StepReport
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.handoff.transitions import ReceiveState
from kvferry.ids import EngineId, Incarnation, PeerName, TransferId, peer_name
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import FerrySettings
from kvferry.testing.simulator.scenario import Scenario
from kvferry.testing.simulator.simulated_memory import MAX_RANKS, Memory, Violation
from kvferry.wire.handoff_messages import Message

__all__ = ["TOKEN_S", "RankEngine", "RankWorld", "SimRank", "short"]

_STASH = 64
_WRITE_S = 0.05
TOKEN_S = 0.02
"""The machines' estimate of a transfer: `_WRITE_S`, and this much per token."""


class RankEngine(Protocol):
    """What a rank and its transfers use of an engine."""

    prefill: bool
    dead: bool
    engine: EngineId
    incarnation: Incarnation
    num_ranks: int
    memory: Memory

    def report(self, rank: "SimRank", report: StepReport) -> None:
        """Takes a report of one of the engine's ranks."""


class RankWorld(Protocol):
    """What a rank uses of the world."""

    scenario: Scenario
    settings: FerrySettings
    rng: random.Random
    now_s: float
    prepare: Callable[[RankProtocol], None]

    def at(self, at_s: float, function: Callable[..., None], *args: Any) -> None:
        """Calls the function at this time."""

    def send(self, rank: "SimRank", peer: Peer, message: Message) -> None:
        """Sends a control message."""

    def post(self, rank: "SimRank", post: Post) -> None:
        """Starts a transfer."""

    def disconnect(self, rank: "SimRank", peer: Peer) -> None:
        """Ends everything in flight with the peer."""

    def owes(self, engine: RankEngine, ours: int, theirs: int) -> bool:
        """Returns whether the layouts of these two ranks have bytes in common."""
        ...


class SimRank:
    """One rank of one incarnation: a RankProtocol, its clock, and the driver's part of the work."""

    __slots__ = (
        "away",
        "core",
        "deferred",
        "engine",
        "failed_s",
        "index",
        "last_order_s",
        "lost_s",
        "name",
        "offset_s",
        "paused_to_s",
        "rate",
        "stash",
        "tick_at_s",
        "world",
    )

    def __init__(self, world: RankWorld, engine: RankEngine, index: int) -> None:
        self.world, self.engine, self.index = world, engine, index
        self.name = peer_name(engine.engine, engine.incarnation, index)
        drift = world.scenario.drift
        self.rate = 1.0 + (world.rng.random() - 0.5) * drift * 0.99
        self.offset_s = world.rng.random() * 1000.0
        self.paused_to_s = 0.0
        self.deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.last_order_s = 0.0
        self.tick_at_s = -1.0
        self.stash: dict[PeerName, list[Message]] = {}
        self.away: dict[PeerName, float] = {}
        self.lost_s: dict[PeerName, float] = {}
        """When each peer was last lost."""
        self.failed_s: dict[TransferId, float] = {}
        """When each receive of ours failed whose failure was not reported yet."""
        self.core = RankProtocol(world.settings, self, self, engine.incarnation, num_ranks=engine.num_ranks)
        world.prepare(self.core)

    def now_s(self) -> float:
        """Returns the time on this rank's own monotonic clock."""
        return self.offset_s + self.world.now_s * self.rate

    def do(self, function: Callable[..., None], *args: Any) -> None:
        """Runs an event of this rank and everything that follows from it. While suspended, events wait in order."""
        if self.engine.dead:
            return
        if self.deferred or self.world.now_s < self.paused_to_s:
            if not self.deferred:
                self.world.at(self.paused_to_s, self._wake)
            self.deferred.append((function, args))
            return
        function(*args)
        for transfer, receive in self.core.decode._receives.items():
            if receive.state is ReceiveState.FAILING:
                self.failed_s.setdefault(transfer, self.world.now_s)
        self._act()

    def _wake(self) -> None:
        if self.world.now_s < self.paused_to_s:
            self.world.at(self.paused_to_s, self._wake)
            return
        waiting, self.deferred = self.deferred, []
        for function, args in waiting:
            self.do(function, *args)

    def _act(self) -> None:
        core = self.core
        while True:
            actions = core.take_actions()
            if not actions:
                break
            for action in actions:
                if type(action) is Send:
                    self.world.send(self, action.peer, action.message)
                elif type(action) is Post:
                    self.world.post(self, action)
                else:
                    self.world.disconnect(self, action.peer)
        report = core.take_report()
        if report is not None:
            self.engine.report(self, report)
        due_s = core.next_deadline_s()
        if due_s is not None:
            at_s = max((due_s - self.offset_s) / self.rate, self.world.now_s) + 1e-6
            if self.tick_at_s < self.world.now_s or at_s < self.tick_at_s - 1e-9:
                self.tick_at_s = at_s
                self.world.at(at_s, self._tick, at_s)

    def _tick(self, at_s: float) -> None:
        if at_s == self.tick_at_s:
            self.tick_at_s = -1.0
            self.do(self._run_tick)

    def _run_tick(self) -> None:
        self.core.tick(self.now_s())

    def order(self, orders: StepOrders) -> None:
        """Delivers orders of the scheduler half, in order and at about the same time on all ranks."""
        at_s = max(self.last_order_s, self.world.now_s + self.world.rng.random() * 0.003)
        self.last_order_s = at_s
        self.world.at(at_s, self.do, self._run_order, orders)

    def _run_order(self, orders: StepOrders) -> None:
        self.core.orders(orders, self.now_s())

    def meet(self, engine: EngineId, incarnation: Incarnation, num_ranks: int) -> None:
        """Accepts a peer engine."""
        protocol = self.world.scenario.protocol
        self.core.peer_accepted(engine, incarnation, num_ranks, self.now_s(), protocol=protocol)
        for rank in range(num_ranks):
            name = peer_name(engine, incarnation, rank)
            self.away.pop(name, None)
            for message in self.stash.pop(name, ()):
                self.core.message(name, message, self.now_s())

    def receive(self, sender: PeerName, message: Message) -> None:
        """Receives a message. Messages of unknown peers are kept until the peer is accepted, as in a transport."""
        core = self.core
        if sender in core._peers and message.to == self.engine.incarnation:
            self.away.pop(sender, None)
            core.message(sender, message, self.now_s())
        elif sender in core._peers or self._knew(sender):
            before = self._state()
            core.message(sender, message, self.now_s())
            if self._state() != before:
                raise Violation("I6", f"{self.name} did something for {sender}, by a {short(message)} to {message.to}")
        else:
            kept = self.stash.setdefault(sender, [])
            if len(kept) < _STASH:
                kept.append(message)

    def _knew(self, sender: PeerName) -> bool:
        """Returns whether the sender is an older incarnation of an accepted engine."""
        engine, start, _ = sender.split("/")
        known = self.core._engines.get(EngineId(engine))
        return known is not None and _start_number(start) < _start_number(known[0].incarnation)

    def _state(self) -> tuple[object, ...]:
        """Returns all state that a message could change."""
        prefill, decode = self.core.prefill, self.core.decode
        return (
            [(grant.transfer, grant.unclaimed_until_s, [(rank, consumer.state, consumer.until_s, consumer.lease_s)
                                                        for rank, consumer in grant.consumers.items()])
             for grant in prefill._grants.values()],
            [(transfer, receive.state, [(rank, source.state, source.alive_at_s, source.acked_s, len(source.parts))
                                         for rank, source in receive.sources.items()])
             for transfer, receive in decode._receives.items()],
            len(prefill.actions), len(decode.actions), len(prefill.released), len(decode.landed), len(decode.failed),
        )  # fmt: skip

    def lose(self, name: PeerName) -> None:
        """The transport notices that a peer is gone."""
        if self.away.get(name, 0.0) < self.world.now_s:
            self.away[name] = self.world.now_s + 1.0
            self.lost_s[name] = self.world.now_s
            self.core.peer_lost(name, "the transport says so", self.now_s())

    def waits_for_writer(self, transfer: TransferId, name: PeerName, failed_s: float) -> bool:
        """Returns whether a failure at this time waits for a writer: it can answer, and had no time to do so (R26)."""
        core, settings = self.core, self.world.settings
        receive = core.decode._receives.get(transfer)
        if receive is not None and any(one.peer.name == name and one.disconnected for one in receive.sources.values()):
            return False  # its lease was over
        if name not in core._peers or self.lost_s.get(name, -1.0) >= failed_s:
            return False
        if any(peer.name == name for peer in core.decode.silent):
            return False
        return self.world.now_s - failed_s < 0.85 * min(1.0, settings.lease.renew_every_s)

    def ended(self, post: Post, num_tokens: int, error: str | None, started: bool) -> None:
        """Delivers a completion, as the driver does when it polls one."""
        self.core.completed(post.post, error, self.now_s(), started=started, num_bytes=num_tokens, num_runs=num_tokens)

    # ---- handoff.actions.LayoutQueries

    def owes(self, peer: Peer) -> bool:
        """Returns whether these ranks exchange anything. In some worlds, some pairs do not."""
        return self.world.owes(self.engine, self.index, peer.rank)

    def unit_tokens(self, peer: Peer) -> int:
        """Returns 1: a block holds one token."""
        return 1

    def write_s(self, peer: Peer, num_tokens: int) -> float:
        """Returns how long a transfer takes unless it is slow."""
        return _WRITE_S + TOKEN_S * num_tokens

    def digest(self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange) -> bytes:
        """Returns a digest of the true content."""
        if not self.world.scenario.verify:
            return b""
        cells = self.engine.memory.cells[self.index]
        blocks = tables[0].block_ids[tokens.start : tokens.stop]
        return repr([cells[block * MAX_RANKS] for block in blocks]).encode()

    def check(
        self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange, digest: bytes
    ) -> int:
        """Compares with the true content."""
        cells = self.engine.memory.cells[self.index]
        blocks = tables[0].block_ids[tokens.start : tokens.stop]
        same = repr([cells[block * MAX_RANKS + peer.rank] for block in blocks]).encode() == digest
        return len(blocks) if same else -1


def _start_number(incarnation: str) -> int:
    return int(incarnation.rpartition(".")[2])


def short(message: Message) -> str:
    """Returns a message as a line of a trace."""
    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name != "to"}
    return f"{type(message).__name__} " + " ".join(f"{name}={value!r}" for name, value in fields.items() if value)
