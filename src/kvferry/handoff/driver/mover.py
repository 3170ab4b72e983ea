"""How one part of a hand-off becomes posted transfers. DirectMover, the default, posts the planned runs as they are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.errors import MalformedMessage, PeerLost, TransferError
from kvferry.handoff.actions import Post, PostId
from kvferry.handoff.driver.links import Flow, Link
from kvferry.layout.blocks import BlockTable, Runs, TokenRange
from kvferry.layout.edge import Edge
from kvferry.layout.planning import plan
from kvferry.transport.base import Completion, Operation, Ticket, Transport
from kvferry.wire.handoff_messages import encode_message, with_size

__all__ = ["DirectMover", "Moved", "Mover", "runs_of"]


@dataclass(frozen=True, slots=True)
class Moved:
    """One Post has ended, with every handle of it (R26)."""

    post: PostId
    error: str | None = None
    num_bytes: int = 0
    num_runs: int = 0
    lost: bool = False
    """The peer is gone."""


class Mover(Protocol):
    """Turns posts into transfers on the driver's thread. Every started post ends as exactly one Moved."""

    def start(self, post: Post, link: Link) -> Moved | None:
        """Begins; may block for the whole copy. Returns a Moved if there was nothing to do, or it could not begin."""
        ...

    def completed(self, completion: Completion) -> Moved | None:
        """The transport ended one of our tickets."""
        ...

    def poll(self) -> Sequence[Moved]:
        """Returns what else has ended since the last call, for movers with stages of their own."""
        ...

    @property
    def num_in_flight(self) -> int:
        """The number of posts that have not ended."""
        ...

    def close(self) -> None:
        """On the driver's thread, before the transport's close: nothing touches memory after it."""
        ...


def runs_of(post: Post, flow: Flow) -> list[Runs]:
    """Returns the byte runs of one part. Raises MalformedMessage if a peer's table is wrong."""
    writing = post.operation is Operation.WRITE
    source, destination = (post.local, post.remote) if writing else (post.remote, post.local)
    runs: list[Runs] = []
    if flow.every_token is not None:
        # Only the last part may reach beyond its tokens: a later one could be overtaken by it there.
        runs += _plan(flow.every_token, source, destination, post.tokens, pad_tail=post.whole is not None)
    if flow.at_the_end is not None and post.whole is not None:
        runs += _plan(flow.at_the_end, source, destination, post.whole, pad_tail=True)
    return runs


def _plan(
    edge: Edge, source: Sequence[BlockTable], destination: Sequence[BlockTable], tokens: TokenRange, *, pad_tail: bool
) -> list[Runs]:
    # Decode's last block is the request's own, and decode goes on computing after what arrives.
    return [runs for runs in plan(edge, source, destination, tokens, pad_tail=pad_tail) if len(runs)]


@dataclass(slots=True)
class _Part:
    post: PostId
    tickets: set[Ticket] = field(default_factory=set)
    num_bytes: int = 0
    num_runs: int = 0
    error: str | None = None


class DirectMover:
    """Posts one transfer per part: the planned runs."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._parts: dict[Ticket, _Part] = {}

    def start(self, post: Post, link: Link, planned: list[Runs] | None = None) -> Moved | None:
        """Implements Mover.start. `planned`: the result of `runs_of`, if the caller has it."""
        flow = link.outgoing if post.operation is Operation.WRITE else link.incoming
        part = _Part(post.post)
        try:
            runs = planned if planned is not None else [] if flow is None else runs_of(post, flow)
            part.num_runs = sum(len(some) for some in runs)
            part.num_bytes = sum(int(some.length.sum()) for some in runs)
            message = b""
            if post.message is not None:
                message = encode_message(with_size(post.message, part.num_bytes, part.num_runs))
            if not runs:
                if message:
                    self._transport.send(link.name, message)
                return Moved(post.post)
            ticket = self._transport.post(link.name, post.operation, runs, message)
        except PeerLost as error:
            return Moved(post.post, str(error), lost=True)
        except (MalformedMessage, TransferError) as error:
            return Moved(post.post, str(error))
        part.tickets.add(ticket)
        self._parts[ticket] = part
        return None

    def completed(self, completion: Completion) -> Moved | None:
        """Implements Mover.completed."""
        part = self._parts.pop(completion.ticket, None)
        if part is None:
            return None
        part.tickets.discard(completion.ticket)
        part.error = part.error or completion.error
        if part.tickets:
            return None
        return Moved(part.post, part.error, part.num_bytes, part.num_runs)

    def poll(self) -> Sequence[Moved]:
        """Implements Mover.poll: nothing ends but by completions."""
        return ()

    @property
    def num_in_flight(self) -> int:
        """Implements Mover.num_in_flight."""
        return len(self._parts)

    def close(self) -> None:
        """Implements Mover.close: the transport ends what is in flight."""
