"""A transport within one process: real copies between registered addresses, and faults if a test asks for them.

It is at least as strict as a real wire. A transfer copies while its owner polls, never in `post`; until then its
destination holds a poison pattern, so a caller that reads it early, or reuses its source early, gets wrong bytes at
once. Memory that is not registered, or is no longer, is refused.
"""

import ctypes
import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.errors import PeerLost, TransferError
from kvferry.ids import PeerName
from kvferry.layout.blocks import Runs
from kvferry.layout.description import MemoryKind, Region
from kvferry.transport.base import LOOK_EVERY_S, Completion, Operation, Polled, Received, Ticket, WakeAddress
from kvferry.transport.run_checks import check_message, check_regions, check_runs

__all__ = ["POISON", "MemoryFaults", "MemoryHub", "MemoryTransport"]

POISON = 0xA5
"""The byte that a destination holds between `post` and completion, and after a failure."""


@dataclass(slots=True)
class MemoryFaults:
    """What goes wrong, under a test's control. Change it at any time; counts run down by themselves."""

    fail_next: int = 0
    """This many of the next posted transfers end with an error, half copied."""
    fail_after: int = 0
    """This many transfers are posted without a fault before `fail_next` counts."""
    hold: bool = False
    """While true, no transfer moves or completes."""
    delay_polls: int = 0
    """A transfer completes only after this many more polls of its owner."""
    drop_messages: int = 0
    """This many of the next messages are lost on the way."""
    hold_messages: bool = False
    """While true, messages stay on the way."""
    on_post: Callable[[PeerName, PeerName, Operation], None] | None = None
    """Called with (from, to, operation) at each post, for instance to lose a peer at just that moment."""


@dataclass(slots=True, eq=False)
class _Transfer:
    ticket: Ticket
    peer: PeerName
    operation: Operation
    pieces: list[tuple[Runs, int, int]]
    """Runs, with the absolute addresses of the source region and the destination region."""
    message: bytes
    polls_left: int
    failing: str | None = None


@dataclass(slots=True)
class _Peer:
    regions: tuple[Region, ...]


@dataclass(slots=True)
class _End:
    """What the hub knows of one transport."""

    regions: tuple[Region, ...] = ()
    inbox: deque[Received] = field(default_factory=deque)
    awake: threading.Event = field(default_factory=threading.Event)
    """Set when there is something to poll, or `wake` was called; cleared by `wait`."""


class MemoryHub:
    """The wire between MemoryTransports of one process. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.faults = MemoryFaults()
        self.ends: dict[PeerName, _End] = {}
        self._lost: set[PeerName] = set()

    def lose(self, name: PeerName) -> None:
        """That end dies for good: transfers with it fail, posts to it raise PeerLost, its messages go nowhere."""
        with self.lock:
            self._lost.add(name)

    def is_lost(self, name: PeerName) -> bool:
        """True if that end has died, or has closed."""
        return name in self._lost or name not in self.ends

    def deliver(self, sender: PeerName, to: PeerName, body: bytes) -> None:
        """Put a message into the inbox of `to`, unless it is lost on the way."""
        with self.lock:
            if self.faults.drop_messages > 0:
                self.faults.drop_messages -= 1
            elif not self.is_lost(to) and not self.is_lost(sender):
                end = self.ends[to]
                end.inbox.append(Received(sender, body))
                end.awake.set()


_DEFAULT_HUB = MemoryHub()
_MAX_EARLY = 1024
_IN_FLIGHT_S = 0.0001


class MemoryTransport:
    """One rank's end on a hub. Implements kvferry.transport.base.Transport."""

    def __init__(self, agent_name: PeerName, *, hub: MemoryHub | None = None) -> None:
        self.name = "memory"
        self.agent_name = agent_name
        self.hub = hub if hub is not None else _DEFAULT_HUB
        self._owners: tuple[object, ...] = ()
        self._regions: tuple[Region, ...] = ()
        self._peers: dict[PeerName, _Peer] = {}
        self._transfers: list[_Transfer] = []
        self._tickets = itertools.count(1)
        self._awake = threading.Event()
        self._closed = False

    def register(self, regions: Sequence[Region], owners: Sequence[object]) -> None:
        """Implements Transport.register."""
        with self.hub.lock:
            if self._closed or self.agent_name in self.hub.ends:
                raise TransferError(f"{self.agent_name!r} is registered already, or closed: make another transport")
            for region in regions:
                if region.kind is not MemoryKind.DRAM:
                    raise TransferError(f"the memory transport moves DRAM only, not {region!r}: use nixl")
            check_regions(regions)
            self._regions = tuple(regions)
            self._owners = tuple(owners)
            self.hub.ends[self.agent_name] = _End(self._regions, awake=self._awake)

    def metadata(self) -> bytes:
        """Implements Transport.metadata."""
        self._must_be_open()
        return json.dumps({"memory": self.agent_name}).encode()

    def connect(self, peer: PeerName, metadata: bytes, regions: Sequence[Region]) -> None:
        """Implements Transport.connect. Raises TransferError for metadata of another peer, and for unknown regions."""
        with self.hub.lock:
            self._must_be_open()
            try:
                named = json.loads(metadata)["memory"]
            except (ValueError, TypeError, KeyError) as error:
                raise TransferError(f"the metadata of peer {peer!r} is not a memory transport's: {error}") from error
            if named != peer:
                raise TransferError(f"the metadata names {named!r}, and the peer is {peer!r}")
            if self.hub.is_lost(peer):
                raise PeerLost(f"peer {peer!r} is not on this hub: it has closed, or runs in another process")
            strange = [region for region in regions if region not in self.hub.ends[peer].regions]
            if strange:
                raise TransferError(f"peer {peer!r} has not registered {strange[0]!r}")
            if peer in self._peers:
                raise TransferError(f"peer {peer!r} is connected already: disconnect it first")
            self._peers[peer] = _Peer(tuple(regions))
            self._awake.set()  # its messages may have come before

    def disconnect(self, peer: PeerName) -> None:
        """Implements Transport.disconnect."""
        with self.hub.lock:
            self._peers.pop(peer, None)
            for transfer in self._transfers:
                if transfer.peer == peer:
                    transfer.failing = transfer.failing or f"peer {peer!r} was disconnected"
            end = self.hub.ends.get(self.agent_name)
            if end:
                end.inbox = deque(message for message in end.inbox if message.peer != peer)

    def post(self, peer: PeerName, operation: Operation, runs: Sequence[Runs], message: bytes = b"") -> Ticket:
        """Implements Transport.post."""
        with self.hub.lock:
            self._must_be_open()
            known = self._must_be_connected(peer)
            check_message(message)
            faults = self.hub.faults
            if faults.on_post:
                faults.on_post(self.agent_name, peer, operation)
                known = self._must_be_connected(peer)
            check_runs(operation, runs, self._regions, known.regions, peer)
            reads = operation is Operation.READ
            sources, destinations = (known.regions, self._regions) if reads else (self._regions, known.regions)
            transfer = _Transfer(
                Ticket(next(self._tickets)),
                peer,
                operation,
                [(r, sources[r.source_region].address, destinations[r.destination_region].address) for r in runs],
                message,
                faults.delay_polls,
            )
            if faults.fail_after > 0:
                faults.fail_after -= 1
            elif faults.fail_next > 0:
                faults.fail_next -= 1
                transfer.failing = "a fault was asked for"
            for piece, _, destination in transfer.pieces:
                for offset, length in zip(piece.destination.tolist(), piece.length.tolist(), strict=True):
                    ctypes.memset(destination + offset, POISON, length)
            self._transfers.append(transfer)
            return transfer.ticket

    def send(self, peer: PeerName, message: bytes) -> None:
        """Implements Transport.send."""
        with self.hub.lock:
            self._must_be_open()
            self._must_be_connected(peer)
            check_message(message)
            self.hub.deliver(self.agent_name, peer, message)

    def poll(self) -> Polled:
        """Implements Transport.poll. Copies what is due."""
        with self.hub.lock:
            if self._closed or self.agent_name not in self.hub.ends:
                return Polled()
            completions = []
            waiting = []
            for transfer in self._transfers:
                if self.hub.faults.hold and not transfer.failing and not self.hub.is_lost(transfer.peer):
                    waiting.append(transfer)
                elif transfer.polls_left > 0:
                    transfer.polls_left -= 1
                    waiting.append(transfer)
                else:
                    completions.append(self._carry_out(transfer))
            self._transfers = waiting
            return Polled(tuple(completions), tuple(self._take_messages()))

    def wait(self, timeout_s: float, *, look_every_s: float = LOOK_EVERY_S) -> None:
        """Implements Transport.wait. All peers are in this process: their messages set our event."""
        if self._transfers:
            timeout_s = min(timeout_s, _IN_FLIGHT_S)  # only `poll` copies
        elif self.hub.faults.hold_messages:
            timeout_s = min(timeout_s, look_every_s)
        self._awake.wait(timeout_s)
        self._awake.clear()

    def wake(self) -> None:
        """Implements Transport.wake."""
        self._awake.set()

    def listen(self, host: str) -> None:
        """Implements Transport.listen. Peers need no address."""

    def set_wake_address(self, peer: PeerName, address: WakeAddress) -> None:
        """Implements Transport.set_wake_address. It is not needed."""

    def close(self) -> None:
        """Implements Transport.close."""
        with self.hub.lock:
            self._closed = True
            if self._regions or self._owners or self.agent_name in self.hub.ends:
                self.hub.ends.pop(self.agent_name, None)
            self._peers.clear()
            self._transfers.clear()
            self._regions = ()
            self._owners = ()

    def _carry_out(self, transfer: _Transfer) -> Completion:
        peer_end = self.hub.ends.get(transfer.peer)
        if self.hub.is_lost(transfer.peer) or self.hub.is_lost(self.agent_name) or peer_end is None:
            return Completion(transfer.ticket, f"peer {transfer.peer!r} is gone")
        for piece, source, destination in transfer.pieces:
            # A transfer that fails has still moved some of its bytes: no caller may rely on "all or nothing".
            runs = zip(piece.source.tolist(), piece.destination.tolist(), piece.length.tolist(), strict=True)
            for from_, to, length in itertools.islice(runs, len(piece) // 2 if transfer.failing else None):
                ctypes.memmove(destination + to, source + from_, length)
        if transfer.failing:
            return Completion(transfer.ticket, transfer.failing)
        if transfer.message:
            self.hub.deliver(self.agent_name, transfer.peer, transfer.message)
        return Completion(transfer.ticket)

    def _take_messages(self) -> list[Received]:
        if self.hub.faults.hold_messages or self.hub.is_lost(self.agent_name):
            return []
        end = self.hub.ends[self.agent_name]
        taken = [message for message in end.inbox if message.peer in self._peers]
        # A peer may connect to us before we connect to it: its first messages wait, and the oldest are dropped.
        early = [message for message in end.inbox if message.peer not in self._peers]
        end.inbox = deque(early[-_MAX_EARLY:])
        return taken

    def _must_be_open(self) -> None:
        if self._closed or self.agent_name not in self.hub.ends:
            raise TransferError(f"the transport of {self.agent_name!r} is closed, or has no memory registered yet")

    def _must_be_connected(self, peer: PeerName) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            raise PeerLost(f"peer {peer!r} is not connected")
        if self.hub.is_lost(peer) or self.hub.is_lost(self.agent_name):
            raise PeerLost(f"peer {peer!r} is gone")
        return known
