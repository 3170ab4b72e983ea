"""What the state machines ask for, and the few questions they ask back. No I/O here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvferry.ids import EngineId, Incarnation, PeerName, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.transport.base import Operation
from kvferry.wire.handoff_messages import Message, Wrote

__all__ = ["Action", "Disconnect", "LayoutQueries", "MachineLimits", "Peer", "Post", "PostId", "Send"]

PostId = NewType("PostId", int)


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank of one incarnation of another engine that was introduced."""

    name: PeerName
    engine: EngineId
    incarnation: Incarnation
    rank: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message; the driver connects first if it must. A failure comes back as `peer_lost`."""

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Post:
    """Move one part of a transfer. Its end comes back as `completed`, exactly once."""

    post: PostId
    peer: Peer
    operation: Operation
    transfer: TransferId
    local: tuple[BlockTable, ...]
    remote: tuple[BlockTable, ...]
    tokens: TokenRange
    """What to move of groups that keep every token."""
    whole: TokenRange | None
    """On the last part: the range of the whole hand-off, for groups that keep a window or a state. Else None."""
    not_after_s: float
    """The driver starts it before this time, or not at all: it reports `completed(..., started=False)`."""
    until_s: float
    """When the lease ends under which it runs."""
    message: Wrote | None = None
    """WRITE: reaches the peer after the last byte."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Forget the peer's connection, which ends what is in flight with it. A later Send connects again."""

    peer: Peer


Action = Send | Post | Disconnect


class LayoutQueries(Protocol):
    """What machines ask the driver about layouts and memory. Answers at once; raises nothing."""

    def owes(self, peer: Peer) -> bool:
        """Prefill: is there a byte that we must bring to this decode rank? Decode: that this prefill rank brings us?"""
        ...

    def unit_tokens(self, peer: Peer) -> int:
        """Parts before the last end at a multiple of this many tokens. At least 1."""
        ...

    def write_s(self, peer: Peer, num_tokens: int) -> float:
        """A safe upper estimate of the time that a write of so many tokens takes, from its start to its last byte."""
        ...

    def digest(self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange) -> bytes:
        """Prefill: of what this decode rank gets of [tokens), over cells that follow from the transfer id.

        b"": nothing is compared.
        """
        ...

    def check(
        self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange, digest: bytes
    ) -> int:
        """Decode: compare. How many cells were equal; -1 when one differs or the digest makes no sense."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Caps that keep a peer from growing our memory."""

    max_open: int = 65536
    """Transfers that peers named and we don't know yet."""
    max_ended: int = 8192
    """Ended transfers that are remembered, to answer late messages at once."""
