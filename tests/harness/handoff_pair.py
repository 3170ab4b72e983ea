"""The machines of two engines face to face; the test moves the clock, and carries messages and posts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.handoff.actions import Action, Disconnect, MachineLimits, Peer, Post, Send
from kvferry.handoff.orders import Cancel, Fetch, KeepAlive, Offer, StepOrders, StepReport, Withdraw
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.ids import EngineId, Incarnation, PeerName, RequestId, TransferId, peer_name
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import FerrySettings, LeaseSettings, OlderPeers, TransferMode, TransferSettings
from kvferry.testing.fake_clock import FakeClock
from kvferry.wire.handoff_messages import Message
from kvferry.wire.prompt_digest import Prompt
from kvferry.wire.versions import PROTOCOL_MAX

TTL_S, RENEW_S, QUARANTINE_S, STANDSTILL_S, DEADLINE_S = 10.0, 2.0, 1.0, 40.0, 60.0


@dataclass
class FakeQueries:
    """Answers to the questions of machines; a test may change them at any time."""

    unit: int = 1
    seconds: float = 0.1
    strangers: frozenset[int] = frozenset()
    """Ranks that owe us nothing."""
    digest_bytes: bytes = b""
    cells: int = 0

    def owes(self, peer: Peer) -> bool:
        return peer.rank not in self.strangers

    def unit_tokens(self, peer: Peer) -> int:
        return self.unit

    def write_s(self, peer: Peer, num_tokens: int) -> float:
        return self.seconds

    def digest(self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange) -> bytes:
        return self.digest_bytes

    def check(
        self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange, digest: bytes
    ) -> int:
        return self.cells


@dataclass
class Rank:
    """One RankProtocol, and the actions that it has asked for."""

    core: RankProtocol
    name: PeerName
    queries: FakeQueries
    posts: list[Post] = field(default_factory=list)
    disconnected: list[PeerName] = field(default_factory=list)
    report: StepReport = field(default_factory=StepReport)

    def collect(self) -> StepReport:
        """Everything that it has reported so far."""
        new, old = self.core.take_report(), self.report
        if new is not None:
            self.report = StepReport(
                landed=old.landed + new.landed,
                failed=old.failed + new.failed,
                released=old.released | new.released,
                taken=old.taken | new.taken,
            )
            assert not old.released & new.released, "released twice"  # I4
        return self.report


class Pair:
    """A prefill and a decode engine that know each other. Messages stay in `wires` until `deliver`."""

    def __init__(
        self,
        mode: TransferMode,
        *,
        prefill_ranks: int = 1,
        decode_ranks: int = 1,
        prepare: Callable[[RankProtocol], None] = lambda core: None,
        limits: MachineLimits | None = None,
        protocol: int = PROTOCOL_MAX,
        older_peers: OlderPeers = OlderPeers.COUNT,
        whole_prefix: bool = True,
    ) -> None:
        self.mode, self.clock, self._prepare, self._limits = mode, FakeClock(), prepare, limits
        self._protocol, self._whole_prefix = protocol, whole_prefix
        self.settings = FerrySettings(
            transfer=TransferSettings(mode=mode, deadline_s=DEADLINE_S, older_peers=older_peers),
            lease=LeaseSettings(
                ttl_s=TTL_S, renew_every_s=RENEW_S, quarantine_s=QUARANTINE_S, standstill_s=STANDSTILL_S
            ),
        )
        self.wires: list[tuple[PeerName, Peer, Message]] = []
        self.prefill: list[Rank] = []
        self.decode: list[Rank] = []
        self.prefill_start = self.decode_start = 1
        self.start_prefill(prefill_ranks)
        self.start_decode(decode_ranks)

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    def _start(self, engine: str, start: int, num_ranks: int) -> list[Rank]:
        incarnation = Incarnation(f"{engine}{start}")
        ranks = []
        for index in range(num_ranks):
            queries = FakeQueries()
            core = RankProtocol(
                self.settings,
                queries,
                queries,
                incarnation,
                num_ranks=num_ranks,
                whole_prefix=self._whole_prefix,
                limits=self._limits,
            )
            self._prepare(core)
            ranks.append(Rank(core, peer_name(EngineId(engine), incarnation, index), queries))
        return ranks

    def start_prefill(self, num_ranks: int = 1) -> None:
        self.prefill = self._start("p", self.prefill_start, num_ranks)
        self._accept_each_other()

    def start_decode(self, num_ranks: int = 1) -> None:
        self.decode = self._start("d", self.decode_start, num_ranks)
        self._accept_each_other()

    def restart_decode(self) -> None:
        """Restarts the decode engine under its name."""
        self.decode_start += 1
        self.start_decode(len(self.decode))

    def restart_prefill(self) -> None:
        self.prefill_start += 1
        self.start_prefill(len(self.prefill))

    def _accept_each_other(self) -> None:
        for rank in self.prefill:
            if self.decode:
                self._accept(rank, "d", self.decode_start, len(self.decode))
        for rank in self.decode:
            self._accept(rank, "p", self.prefill_start, len(self.prefill))
        self.act()

    def _accept(self, rank: Rank, engine: str, start: int, num_ranks: int) -> None:
        rank.core.peer_accepted(
            EngineId(engine), Incarnation(f"{engine}{start}"), num_ranks, self.now_s, protocol=self._protocol
        )

    # ---- carrying

    def act(self) -> None:
        """Collects what the machines ask for; messages go into `wires`."""
        for rank in (*self.prefill, *self.decode):
            due_s = rank.core.next_deadline_s()
            if due_s is not None and due_s <= self.now_s:
                rank.core.tick(self.now_s)
            actions: list[Action] = rank.core.take_actions()
            for action in actions:
                if isinstance(action, Send):
                    self.wires.append((rank.name, action.peer, action.message))
                elif isinstance(action, Post):
                    rank.posts.append(action)
                elif isinstance(action, Disconnect):
                    rank.disconnected.append(action.peer.name)
            rank.collect()

    def find(self, name: PeerName) -> Rank | None:
        return next((rank for rank in (*self.prefill, *self.decode) if rank.name == name), None)

    def hand(self, sender: PeerName, peer: Peer, message: Message) -> None:
        """Delivers one message to the incarnation that is at this address now, whichever was meant."""
        ranks = self.prefill if peer.engine == "p" else self.decode
        if peer.rank < len(ranks):
            ranks[peer.rank].core.message(sender, message, self.now_s)
            self.act()

    def deliver(self, *, only: Callable[[Message], bool] = lambda message: True) -> None:
        """Delivers messages until none is left; those not wanted are lost."""
        while self.wires:
            sender, peer, message = self.wires.pop(0)
            if only(message):
                self.hand(sender, peer, message)

    def step(self, seconds: float, *, deliver: bool = True, only: Callable[[Message], bool] = lambda m: True) -> None:
        """Advances the time in small steps, with deadlines and messages."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.clock.advance(min(0.25, until_s - self.now_s))
            for rank in (*self.prefill, *self.decode):
                rank.core.tick(self.now_s)
            self.act()
            if deliver:
                self.deliver(only=only)

    def finish(self, rank: Rank, index: int = 0, error: str | None = None) -> None:
        """Ends one post: sends its message, and delivers its completion."""
        post = rank.posts.pop(index)
        if error is None and post.message is not None:
            self.wires.append((rank.name, post.peer, post.message))
        rank.core.completed(post.post, error, self.now_s)
        self.act()

    def finish_all(self) -> None:
        """Ends every post with success, and delivers what follows."""
        busy = True
        while busy:
            self.deliver()
            busy = False
            for rank in (*self.prefill, *self.decode):
                if rank.posts:
                    self.finish(rank)
                    busy = True

    # ---- orders

    def order(self, ranks: Sequence[Rank], orders: StepOrders) -> None:
        for rank in ranks:
            rank.core.orders(orders, self.now_s)
        self.act()

    def offer(
        self,
        transfer: str,
        stop: int = 4,
        *,
        final: bool = True,
        blocks: tuple[int, ...] = (1, 2, 3, 4),
        prompt: Sequence[int] | None = None,
        note: bytes = b"",
    ) -> None:
        tables, of = (BlockTable(0, 0, blocks),), None if prompt is None else Prompt.of(prompt)
        offer = Offer(TransferId(transfer), RequestId("rp"), tables, TokenRange(0, stop), final, note, of)
        self.order(self.prefill, StepOrders(offer=(offer,)))

    def want(
        self,
        transfer: str,
        start: int = 0,
        stop: int = 4,
        *,
        blocks: tuple[int, ...] = (5, 6, 7, 8),
        prompt: Sequence[int] | None = None,
        expected: int | None = None,
        answered: bool = False,
    ) -> None:
        """Links come every two tokens, so that short prompts have some."""
        want = Fetch(
            TransferId(transfer),
            RequestId("rd"),
            EngineId("p"),
            Incarnation(f"p{self.prefill_start}"),
            self.mode,
            (BlockTable(0, 0, blocks),),
            TokenRange(start, stop),
            DEADLINE_S,
            None if prompt is None else Prompt.of(prompt).stated(unit=2),
            expected,
            answered=answered,
        )
        self.order(self.decode, StepOrders(fetch=(want,)))

    def cancel(self, transfer: str) -> None:
        cancel = Cancel(TransferId(transfer), EngineId("p"), Incarnation(f"p{self.prefill_start}"), "gone")
        self.order(self.decode, StepOrders(cancel=(cancel,)))

    def hold(self, transfer: str) -> None:
        hold = KeepAlive(TransferId(transfer), EngineId("p"), Incarnation(f"p{self.prefill_start}"))
        self.order(self.decode, StepOrders(keep_alive=(hold,)))

    def withdraw(self, transfer: str) -> None:
        self.order(self.prefill, StepOrders(withdraw=(Withdraw(TransferId(transfer), "aborted"),)))
