"""What the prefill machine knows of one transfer and of the decode ranks that take part. See prefill.py."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.handoff.actions import LayoutQueries, Peer, Post, PostId
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.transport.base import Operation
from kvferry.wire.handoff_messages import Ready, Wrote, to_wire

__all__ = ["Consumer", "ConsumerState", "Grant", "WritePart", "ready", "write"]

_NEVER = float("inf")


class ConsumerState(Enum):
    """See prefill.py."""

    ACTIVE = auto()
    DONE = auto()
    GONE = auto()


@dataclass(slots=True)
class WritePart:
    """Tokens that one post writes; the last part also brings windows and states."""

    index: int
    tokens: TokenRange
    last: bool


@dataclass(slots=True)
class Consumer:
    """One decode rank of a grant."""

    peer: Peer
    push: bool
    state: ConsumerState
    start: int = 0
    stop: int = 0
    until_s: float = -_NEVER
    """It is gone when nothing was heard by then."""
    seq: int = 0
    tables: tuple[BlockTable, ...] = ()
    ttl_s: float = 0.0
    lease_s: float = -_NEVER
    """Push: until when we may write; minus infinity until a renewal was acknowledged."""
    todo: deque[WritePart] = field(default_factory=deque)
    num_parts: int = 0
    cut_to: int = 0
    cut_last: bool = False
    in_flight: dict[PostId, WritePart] = field(default_factory=dict)
    stopping: bool = False
    """Stopped is owed when the last write has ended."""
    cut_off: bool = False

    def cut(self, grant: "Grant", ports: LayoutQueries) -> None:
        """Push: cut what has become ready into parts that are short beside the lease."""
        if self.cut_last:
            return
        unit = max(1, ports.unit_tokens(self.peer))
        stop = max(self.cut_to, min(grant.ready.stop, self.stop))
        if not grant.final:
            stop = max(self.cut_to, stop // unit * unit)
        longest = max(1, stop - self.cut_to)
        while longest > unit and ports.write_s(self.peer, longest) > self.ttl_s / 4:
            longest = max(unit, longest // 2 // unit * unit)
        while self.cut_to < stop or grant.final:
            upto = min(stop, self.cut_to + longest)
            last = grant.final and upto == stop
            self.todo.append(WritePart(self.num_parts, TokenRange(self.cut_to, upto), last))
            self.num_parts += 1
            self.cut_to = upto
            if last:
                self.cut_last = True
                break


@dataclass(slots=True)
class Grant:
    """One transfer at this rank."""

    transfer: TransferId
    base_s: float
    """Awaited: it is forgotten then. Final: for decode ranks that never came."""
    offered: bool = False
    final: bool = False
    withdrawn: str | None = None
    tables: tuple[BlockTable, ...] = ()
    ready: TokenRange = field(default_factory=lambda: TokenRange(0, 0))
    note: bytes = b""
    owner: tuple[EngineId, Incarnation] | None = None
    ranks: int = 0
    consumers: dict[int, Consumer] = field(default_factory=dict)


def ready(grant: Grant, consumer: Consumer, ttl_s: float, digest: bytes) -> Ready:
    """The message that grants, and tells progress."""
    return Ready(
        to=consumer.peer.incarnation,
        transfer=grant.transfer,
        tables=to_wire(grant.tables),
        start=grant.ready.start,
        stop=grant.ready.stop,
        final=grant.final,
        ttl_s=ttl_s,
        ack=consumer.seq,
        digest=digest,
        note=grant.note if grant.final else b"",
    )


def write(grant: Grant, consumer: Consumer, part: WritePart, post: PostId, write_s: float, digest: bytes) -> Post:
    """The action that writes one part, and the message that comes behind its last byte."""
    wrote = Wrote(
        to=consumer.peer.incarnation,
        transfer=grant.transfer,
        part=part.index,
        parts=consumer.num_parts if part.last else 0,
        start=grant.ready.start if part.last else part.tokens.start,
        stop=grant.ready.stop if part.last else part.tokens.stop,
        digest=digest,
        note=grant.note if part.last else b"",
    )
    return Post(
        post=post,
        peer=consumer.peer,
        operation=Operation.WRITE,
        transfer=grant.transfer,
        local=grant.tables,
        remote=consumer.tables,
        tokens=part.tokens,
        whole=TokenRange(consumer.start, min(consumer.stop, grant.ready.stop)) if part.last else None,
        not_after_s=consumer.lease_s - write_s,
        until_s=consumer.lease_s,
        message=wrote,
    )
