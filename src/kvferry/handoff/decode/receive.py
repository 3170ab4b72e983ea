"""What the decode machine knows of one wanted transfer. See machine.py for the life of it."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.handoff.actions import LayoutQueries, Peer, Post, PostId
from kvferry.handoff.orders import Fetch, Landed
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import LeaseSettings, TransferMode
from kvferry.transport.base import Operation
from kvferry.wire.handoff_messages import MAX_REASON_CHARS, Claim, Confirm, Drop, Register, Revoke, to_wire

__all__ = ["ReadPart", "Receive", "Source", "State", "claim", "confirm", "drop", "read", "register", "revoke"]

_NEVER = float("inf")


class State(Enum):
    """Of a source. See machine.py."""

    WAITING = auto()
    ACTIVE = auto()
    DONE = auto()
    QUIET = auto()


@dataclass(slots=True)
class ReadPart:
    """Tokens that one post reads; the last part also brings windows and states."""

    tokens: TokenRange
    last: bool


@dataclass(slots=True)
class Source:
    """One prefill rank of a receive."""

    peer: Peer
    state: State
    heard_s: float
    """The last sign of life."""
    asked_s: float
    """When Claim, Register or Revoke was sent last; they are sent again until answered."""
    acked_s: float = -_NEVER
    """Pull: when the last renewal that prefill acknowledged was sent."""
    lease_s: float = -_NEVER
    """Pull: until when we may read; nothing before prefill has told how long its grants last."""
    ttl_s: float = 0.0
    tables: tuple[BlockTable, ...] = ()
    ready_stop: int = 0
    final: bool = False
    digest: bytes = b""
    note: bytes = b""
    arrived: dict[int, int] = field(default_factory=dict)
    """Parts that are here and don't yet continue `arrived_to`: start to stop."""
    arrived_to: int = 0
    # Pull.
    todo: deque[ReadPart] = field(default_factory=deque)
    cut_to: int = 0
    cut_last: bool = False
    in_flight: dict[PostId, ReadPart] = field(default_factory=dict)
    cut_off: bool = False
    """The connection was given up while a read was in flight: its bytes may still come, for quarantine_s."""
    safe_s: float = -_NEVER
    # Push.
    parts: set[int] = field(default_factory=set)
    num_parts: int = 0
    dead: bool = False
    """Its process is gone: what it had on the wire comes within quarantine_s, and nothing after that."""
    still_s: float = -_NEVER
    """As safe_s, for a writer that may only stand still."""

    @property
    def over(self) -> bool:
        """It touches our blocks no more, nor we its."""
        return not self.in_flight and (self.state is State.DONE or self.state is State.QUIET)

    def give_up(self, now_s: float, lease: LeaseSettings) -> None:
        """Push: it does not answer, and its lease is over. Where the wire allows it, our end of the connection goes."""
        self.cut_off = True
        self.safe_s = now_s + lease.quarantine_s
        self.still_s = now_s + max(lease.quarantine_s, lease.standstill_s)

    def quiet_s(self, lease: LeaseSettings) -> float:
        """Push, revoked: nothing is written any more after that, or it has to be given up then."""
        if not self.cut_off:
            return self.heard_s + lease.ttl_s
        return self.safe_s if self.dead else self.still_s

    def cut(self, want: Fetch, ports: LayoutQueries, ttl_s: float) -> None:
        """Pull: cut what has become ready into parts that are short beside the lease."""
        if self.cut_last:
            return
        unit = max(1, ports.unit_tokens(self.peer))
        stop = max(self.cut_to, min(self.ready_stop, want.wanted.stop))
        if not self.final:
            stop = max(self.cut_to, stop // unit * unit)
        longest = max(1, stop - self.cut_to)
        while longest > unit and ports.write_s(self.peer, longest) > ttl_s / 4:
            longest = max(unit, longest // 2 // unit * unit)
        while self.cut_to < stop or self.final:
            upto = min(stop, self.cut_to + longest)
            last = self.final and upto == stop
            self.todo.append(ReadPart(TokenRange(self.cut_to, upto), last))
            self.cut_to = upto
            if last:
                self.cut_last = True
                break

    def arrive(self, start: int, stop: int) -> None:
        """Tokens [start, stop) are here; parts may come in any order."""
        self.arrived[start] = max(stop, self.arrived.get(start, 0))
        while self.arrived_to in self.arrived:
            after = self.arrived.pop(self.arrived_to)
            if after <= self.arrived_to:
                break
            self.arrived_to = after


@dataclass(slots=True)
class Receive:
    """One wanted transfer."""

    want: Fetch
    begun_s: float
    deadline_s: float
    sources: dict[int, Source] = field(default_factory=dict)
    failed: str | None = None
    arrived: TokenRange | None = None
    cut_s: float = _NEVER
    """After a failure: reads that are still in flight then are cut off."""
    report_s: float = _NEVER
    """After a failure: it is reported then at the latest."""
    reported: bool = False
    num_bytes: int = 0
    num_runs: int = 0
    verified_cells: int = 0
    granted_s: float = 0.0
    """When the last prefill rank so far was found to take part."""

    def grant(self, source: Source, now_s: float) -> None:
        """A prefill rank has granted (pull), or holds our grant (push)."""
        if source.state is State.WAITING:
            source.state, self.granted_s = State.ACTIVE, now_s

    def mark_dead(self, engine: EngineId, incarnation: Incarnation) -> bool:
        """`engine` runs as `incarnation` now: the processes of its others are dead. True: that is news."""
        dead = [
            source
            for source in self.sources.values()
            if source.peer.engine == engine and source.peer.incarnation != incarnation and not source.dead
        ]
        for source in dead:
            source.dead = True
        return bool(dead)

    @property
    def pull(self) -> bool:
        """We read; else it writes."""
        return self.want.mode is TransferMode.PULL

    @property
    def num_blocks(self) -> int:
        """Of this rank, over all cache groups."""
        return sum(len(table.block_ids) for table in self.want.tables)

    def what_arrived(self, *, whole_prefix: bool) -> TokenRange:
        """What of a failed hand-off is here from every prefill rank, and may be used."""
        start = self.want.wanted.start
        if self.arrived is not None or not whole_prefix:
            return self.arrived or TokenRange(start, start)
        stop = min((source.arrived_to for source in self.sources.values()), default=start)
        return TokenRange(start, max(start, min(stop, self.want.wanted.stop)))

    def as_landed(self, stop: int, note: bytes, now_s: float) -> Landed:
        """The report of its good end."""
        return Landed(
            transfer=self.want.transfer,
            request=self.want.request,
            arrived=TokenRange(self.want.wanted.start, stop),
            num_bytes=self.num_bytes,
            num_runs=self.num_runs,
            transfer_s=now_s - self.begun_s,
            verified_cells=self.verified_cells,
            note=note,
            grant_s=max(0.0, self.granted_s - self.begun_s),
        )


def claim(want: Fetch, peer: Peer, num_ranks: int, seq: int) -> Claim:
    """The message that asks to read."""
    wanted = want.wanted
    return Claim(
        to=peer.incarnation, transfer=want.transfer, ranks=num_ranks, start=wanted.start, stop=wanted.stop, seq=seq
    )


def register(want: Fetch, peer: Peer, num_ranks: int, ttl_s: float) -> Register:
    """The message that lets a prefill rank write."""
    return Register(
        to=peer.incarnation,
        transfer=want.transfer,
        ranks=num_ranks,
        start=want.wanted.start,
        stop=want.wanted.stop,
        tables=to_wire(want.tables),
        ttl_s=ttl_s,
    )


def confirm(transfer: TransferId, peer: Peer, num_ranks: int) -> Confirm:
    """The message that gives prefill its blocks back."""
    return Confirm(to=peer.incarnation, transfer=transfer, ranks=num_ranks)


def drop(transfer: TransferId, peer: Peer, num_ranks: int, reason: str) -> Drop:
    """The message that ends a claim."""
    return Drop(to=peer.incarnation, transfer=transfer, ranks=num_ranks, reason=reason[:MAX_REASON_CHARS])


def revoke(transfer: TransferId, peer: Peer, num_ranks: int, reason: str) -> Revoke:
    """The message that ends a registration."""
    return Revoke(to=peer.incarnation, transfer=transfer, ranks=num_ranks, reason=reason[:MAX_REASON_CHARS])


def read(want: Fetch, source: Source, part: ReadPart, post: PostId) -> Post:
    """The action that reads one part."""
    whole = TokenRange(want.wanted.start, min(want.wanted.stop, source.ready_stop))
    return Post(
        post=post,
        peer=source.peer,
        operation=Operation.READ,
        transfer=want.transfer,
        local=want.tables,
        remote=source.tables,
        tokens=part.tokens,
        whole=whole if part.last else None,
        not_after_s=source.lease_s,
        until_s=source.lease_s,
    )
