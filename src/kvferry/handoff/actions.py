"""What the state machines ask their caller to do, and the few questions that they ask. No I/O here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvferry.ids import EngineId, Incarnation, PeerName, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.transport.base import Operation
from kvferry.wire.handoff_messages import Message, Wrote
from kvferry.wire.versions import PROTOCOL_MAX

__all__ = ["Action", "Disconnect", "LayoutQueries", "MachineLimits", "Peer", "Post", "PostId", "Send"]

PostId = NewType("PostId", int)


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank of one accepted incarnation of another engine."""

    name: PeerName
    engine: EngineId
    incarnation: Incarnation
    rank: int
    protocol: int = PROTOCOL_MAX
    """The protocol version that was agreed on with the engine."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message; the driver connects first if it must, and reports a failure by `peer_lost`."""

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Post:
    """Move one part of a transfer. The driver reports its end by `completed`, exactly once."""

    post: PostId
    peer: Peer
    operation: Operation
    transfer: TransferId
    local: tuple[BlockTable, ...]
    remote: tuple[BlockTable, ...]
    tokens: TokenRange
    """The tokens to move of groups that keep every token."""
    whole: TokenRange | None
    """On the last part, the range of the whole hand-off, for groups that keep a window or a state; else None."""
    not_after_s: float
    """The driver starts it before this time, or not at all: then it reports `completed(..., started=False)`."""
    until_s: float
    """When the lease ends under which it runs."""
    message: Wrote | None = None
    """WRITE: the message that reaches the peer after the last byte."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Give the peer's connection up, which ends what is in flight with it. A later Send connects again."""

    peer: Peer


Action = Send | Post | Disconnect


class LayoutQueries(Protocol):
    """What machines ask the driver about layouts and memory. It answers at once, and raises nothing."""

    def owes(self, peer: Peer) -> bool:
        """Return whether prefill has any byte for decode, where `peer` is the other of the two."""
        ...

    def unit_tokens(self, peer: Peer) -> int:
        """Return the number of tokens of which parts before the last end at a multiple. At least 1."""
        ...

    def write_s(self, peer: Peer, num_tokens: int) -> float:
        """Return a safe upper estimate of the seconds that a write of this many tokens takes, to its last byte."""
        ...

    def digest(self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange) -> bytes:
        """Prefill: return a digest of what this decode rank gets of `tokens`, over cells that follow from the transfer.

        b"" if nothing is to be compared.
        """
        ...

    def check(
        self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange, digest: bytes
    ) -> int:
        """Decode: return how many cells are equal, or -1 if one differs or the digest makes no sense."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Caps that keep a peer from growing our memory."""

    max_open: int = 65536
    """The most transfers that peers have named and our engine has not."""
    max_ended: int = 8192
    """The most ended transfers that are remembered, to answer late messages at once."""
