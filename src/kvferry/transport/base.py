"""The port that every transport implements. Its conformance suite is kvferry.testing.transport_suite.TransportSuite."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from kvferry.ids import PeerName
from kvferry.layout.blocks import Runs
from kvferry.layout.description import Region

__all__ = ["MAX_MESSAGE_BYTES", "Completion", "Operation", "Polled", "Received", "Ticket", "Transport"]

Ticket = NewType("Ticket", int)

MAX_MESSAGE_BYTES = 64 << 10
"""A longer message is refused by `send` and `post`."""


class Operation(StrEnum):
    """READ: the peer's memory into ours; a run's source is remote. WRITE: ours into the peer's; source is local."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Completion:
    """One posted transfer has ended: `error` is None, or says why its bytes cannot be trusted."""

    ticket: Ticket
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a peer's rank. `body` is hostile until decoded."""

    peer: PeerName
    body: bytes


@dataclass(frozen=True, slots=True)
class Polled:
    """What has happened since the last poll."""

    completions: tuple[Completion, ...] = ()
    messages: tuple[Received, ...] = ()


class Transport(Protocol):
    """One rank's end. Not thread-safe: one thread (the driver's) calls everything but the constructor and `close`.

    `post` and `send` raise PeerLost for a peer that is not connected, or known to be gone, and TransferError where the
    library refuses; they never raise anything else for what a peer or the network does.
    """

    name: str

    def register(self, regions: Sequence[Region], owners: Sequence[object]) -> None:
        """Make local memory reachable. `owners` keep the memory alive: they are held until `close`.

        Called once, before any connect. Region i of later Runs is regions[i].
        """
        ...

    def metadata(self) -> bytes:
        """What a peer needs to connect to us; valid after `register`. Opaque, travels in the handshake."""
        ...

    def connect(self, peer: PeerName, metadata: bytes, regions: Sequence[Region]) -> None:
        """Learn of an accepted peer. `regions` are already checked; remote region i of later Runs is regions[i]."""
        ...

    def disconnect(self, peer: PeerName) -> None:
        """Forget a peer and all that was kept for it. Posted transfers with it end, with an error if need be."""
        ...

    def post(self, peer: PeerName, operation: Operation, runs: Sequence[Runs], message: bytes = b"") -> Ticket:
        """Start a transfer; may block for the whole copy. `message` reaches the peer after the last byte, never before.

        Until the ticket's completion was polled, local memory in `runs` must not be reused by the caller.
        """
        ...

    def send(self, peer: PeerName, message: bytes) -> None:
        """Send a short message (at most 64 KiB). Delivered in order or lost with the peer."""
        ...

    def poll(self) -> Polled:
        """Completions and messages since the last call. Never blocks."""
        ...

    def close(self) -> None:
        """End everything, deregister, let go of the owners. Idempotent."""
        ...
