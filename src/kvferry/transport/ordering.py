"""Puts messages in order, whatever the wire does, and keeps nothing for ever for a peer that we do not know.

UCX delivers short messages in order on one lane, and does not promise it over several. So each message carries the
sender's connection (a random number, new at each connect) and its place in it.
"""

import logging
import os
import struct
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvferry.ids import PeerName

__all__ = ["Inbox", "Outbox"]

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<QQ")
MAX_AHEAD = 256
MAX_STRANGERS = 64
MAX_HELD_BYTES = 4 << 20


class Outbox:
    """Numbers the messages to one peer of one connection."""

    def __init__(self) -> None:
        self._connection = int.from_bytes(os.urandom(8), "little")
        self._next = 0

    def frame(self, body: bytes) -> bytes:
        """Returns the body with its place. Frames must be sent in the order in which they were made."""
        framed = _HEADER.pack(self._connection, self._next) + body
        self._next += 1
        return framed


@dataclass(slots=True)
class _Stream:
    connection: int
    next: int = 0
    ahead: dict[int, bytes] = field(default_factory=dict)
    ready: deque[bytes] = field(default_factory=deque)
    held_bytes: int = 0


class Inbox:
    """Puts the messages of all peers in order. Those of a peer that is not connected yet are held, up to a bound.

    A peer may connect to us before we connect to it; then its first messages come early, and must not be lost.
    """

    def __init__(self) -> None:
        self._streams: OrderedDict[PeerName, _Stream] = OrderedDict()
        self._known: set[PeerName] = set()
        self._restarted: set[PeerName] = set()
        self.num_dropped = 0

    def admit(self, peer: PeerName) -> None:
        """From now on this peer's messages are delivered, also those that came early."""
        self._known.add(peer)

    def forget(self, peer: PeerName) -> None:
        """The peer is disconnected: nothing of it is kept."""
        self._known.discard(peer)
        self._streams.pop(peer, None)

    def put(self, peer: PeerName, framed: bytes) -> None:
        """Takes a message as it came off the wire. One that no correct peer sends is dropped and counted."""
        if len(framed) < _HEADER.size:
            return self._drop(peer, "it has no header")
        connection, place = _HEADER.unpack_from(framed)
        stream = self._streams.get(peer)
        if stream is None or stream.connection != connection:
            # A new connection starts at 0. Anything else is the tail of one that has ended.
            if stream is not None and place != 0:
                return self._drop(peer, "its connection has ended")
            if stream is not None:
                self._restarted.add(peer)
            ready = stream.ready if stream else deque[bytes]()
            stream = self._streams[peer] = _Stream(connection, ready=ready)
        if not stream.next <= place < stream.next + MAX_AHEAD or place in stream.ahead:
            return self._drop(peer, f"its place is {place}, and {stream.next} comes next")
        stream.ahead[place] = framed[_HEADER.size :]
        stream.held_bytes += len(framed)
        while stream.next in stream.ahead:
            stream.ready.append(stream.ahead.pop(stream.next))
            stream.next += 1
        if peer not in self._known:
            self._bound_strangers(peer, stream)
        return None

    def take(self) -> list[tuple[PeerName, bytes]]:
        """Returns all messages of connected peers that are in order; each once."""
        taken: list[tuple[PeerName, bytes]] = []
        for peer, stream in self._streams.items():
            if stream.ready and peer in self._known:
                taken.extend((peer, body) for body in stream.ready)
                stream.ready.clear()
                stream.held_bytes = sum(map(len, stream.ahead.values()))
        return taken

    def take_restarted(self) -> set[PeerName]:
        """Returns peers that have connected to us again. They forgot our place, so our Outbox to them restarts."""
        taken, self._restarted = self._restarted, set()
        return taken

    def _bound_strangers(self, peer: PeerName, stream: _Stream) -> None:
        if stream.held_bytes > MAX_HELD_BYTES:
            del self._streams[peer]
            self._drop(peer, f"more than {MAX_HELD_BYTES} bytes came before it was connected")
        strangers = [name for name in self._streams if name not in self._known]
        if len(strangers) > MAX_STRANGERS:
            del self._streams[strangers[0]]
            self._drop(strangers[0], f"more than {MAX_STRANGERS} unknown peers send")

    def _drop(self, peer: PeerName, reason: str) -> None:
        self.num_dropped += 1
        if self.num_dropped & (self.num_dropped - 1) == 0:  # 1, 2, 4, 8 ...: a flood must not fill the log
            logger.warning("message dropped peer=%s cause=%s dropped_so_far=%d", peer, reason, self.num_dropped)
