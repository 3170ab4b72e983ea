"""The port that every transport implements. Its conformance suite is kvferry.testing.transport_suite.TransportSuite.

Life of a transport: made; `register` (once); `listen` (at most once); then `connect`, `post`, `send`, `poll`, `wait`
and `disconnect`, any number of times; `close`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from kvferry.ids import PeerName
from kvferry.layout.blocks import Runs
from kvferry.layout.description import Region

__all__ = [
    "LOOK_EVERY_S",
    "MAX_MESSAGE_BYTES",
    "Completion",
    "Operation",
    "Polled",
    "Received",
    "Ticket",
    "Transport",
    "WakeAddress",
]

Ticket = NewType("Ticket", int)

MAX_MESSAGE_BYTES = 64 << 10
"""A longer message is refused by `send` and `post`."""
LOOK_EVERY_S = 0.001
"""How late `wait` may notice a message of a peer that does not wake us, unless its caller says otherwise."""


class Operation(StrEnum):
    """READ: the peer's memory into ours; a run's source is remote. WRITE: ours into the peer's; source is local."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Completion:
    """One posted transfer has ended. `error` is None, or says why its bytes cannot be trusted."""

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


@dataclass(frozen=True, slots=True)
class WakeAddress:
    """Where a peer can end our `wait`. It travels in the peer protocol; only transports know what it means."""

    host: str
    """The host of the rank's side channel. A name instead of an address cannot be used."""
    port: int
    token: bytes
    """What shows that it is the peer who wakes us."""


class Transport(Protocol):
    """One rank's end. Not thread-safe: one thread (the driver's) calls everything but the constructor, `wake` and
    `close`.

    `post` and `send` raise PeerLost for a peer that is not connected, or known to be gone, and TransferError if the
    library refuses; they never raise anything else for what a peer or the network does.
    """

    name: str

    def register(self, regions: Sequence[Region], owners: Sequence[object]) -> None:
        """Make local memory reachable. `owners` keep the memory alive: they are held until `close`.

        Called once, before any connect. Region i of later Runs is regions[i].
        """
        ...

    def metadata(self) -> bytes:
        """Return what a peer needs to connect to us; valid after `register`. Opaque; it travels in the handshake."""
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
        """Return completions and messages since the last call. Never blocks."""
        ...

    def wait(self, timeout_s: float, *, look_every_s: float = LOOK_EVERY_S) -> None:
        """Sleep until `poll` may have something, `wake` was called, or `timeout_s` has passed.

        It may return early for no reason; call `poll` after it. A peer that does not wake us has to be looked for: then
        it returns after `look_every_s` at the latest.
        """
        ...

    def wake(self) -> None:
        """End the present `wait`, or else the next one. From any thread; never blocks; does nothing after `close`."""
        ...

    def listen(self, host: str) -> WakeAddress | None:
        """Let peers end our `wait`, at a port of `host`, an address of this machine.

        Called at most once, after `register`. Returns what peers need for that; None if they cannot do it, or need
        nothing for it.
        """
        ...

    def set_wake_address(self, peer: PeerName, address: WakeAddress) -> None:
        """Wake a connected peer there after each message. `disconnect` forgets it. The peer chose it: it is hostile."""
        ...

    def close(self) -> None:
        """End everything, deregister, and release the owners. Idempotent."""
        ...
