"""Carries out what the state machines ask for: sends messages, posts parts, gives connections up.

Messages go before posts, and one post per call: over shared memory a post is the whole copy, and a long copy must delay
no heartbeat more than it has to.
"""

import logging
from collections import deque

from kvferry.clock import Clock
from kvferry.errors import FerryError, PeerLost, TransferError
from kvferry.handoff.actions import Disconnect, Peer, Post, Send
from kvferry.handoff.driver.connections import Connections
from kvferry.handoff.driver.inbox import Inbox
from kvferry.handoff.driver.mover import Moved, Mover
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.transport.base import Transport, WakeAddress
from kvferry.wire.handoff_messages import Renew, RenewAck, frames, with_bell
from kvferry.wire.versions import DOORBELL

__all__ = ["Carrier"]

logger = logging.getLogger(__name__)


class Carrier:
    """One per driver, on its thread."""

    def __init__(
        self,
        protocol: RankProtocol,
        transport: Transport,
        connections: Connections,
        inbox: Inbox,
        mover: Mover,
        clock: Clock,
    ) -> None:
        self._protocol = protocol
        self._transport = transport
        self._connections = connections
        self._inbox = inbox
        self._mover = mover
        self._clock = clock
        self._posts: deque[Post] = deque()
        self.wake_address: WakeAddress | None = None
        """Where peers can wake us; they learn it from our first message to them."""

    @property
    def num_waiting(self) -> int:
        """The number of posts that have not been started."""
        return len(self._posts)

    @property
    def busy(self) -> bool:
        """True if a post waits to be started, or has not ended."""
        return bool(self._posts or self._mover.num_in_flight)

    def act(self) -> bool:
        """Carries out everything short, and one post. True: there was something to do."""
        acted = False
        while actions := self._protocol.take_actions():
            acted = True
            for action in actions:
                if isinstance(action, Post):
                    self._posts.append(action)
                elif isinstance(action, Send):
                    self._send(action)
                else:
                    self._disconnect(action)
        if self._posts:
            acted = True
            self._post(self._posts.popleft())
        return acted

    def moved(self, moved: Moved | None) -> None:
        """A post has ended, or (None) not yet. The time is read now: a lease that is valid now was valid at its end."""
        if moved is not None:
            self._protocol.completed(
                moved.post, moved.error, self._clock.now_s(), num_bytes=moved.num_bytes, num_runs=moved.num_runs
            )

    def say_goodbye(self) -> None:
        """Ends every hand-off, and sends what can still be sent of that."""
        try:
            self._protocol.shut_down(self._clock.now_s())
            for action in self._protocol.take_actions():
                if isinstance(action, Send) and self._connections.is_connected(action.peer.name):
                    self._send(action)
            # One more look, so that what was sent leaves.
            self._transport.poll()
        except FerryError as error:
            logger.debug("goodbye not said cause=%s", error)

    def _send(self, action: Send) -> None:
        peer, message = action.peer, action.message
        address = self.wake_address if peer.protocol >= DOORBELL else None
        if isinstance(message, Renew | RenewAck) and not message.seq and address is not None:
            # The first message that each sends to the other.
            message = with_bell(message, address.port, address.token)
        try:
            if self._connections.connect(peer.name):
                for frame in frames(message):
                    self._transport.send(peer.name, frame)
        except (PeerLost, TransferError) as error:
            self._lose(peer, str(error), dead=isinstance(error, PeerLost))

    def _lose(self, peer: Peer, reason: str, *, dead: bool) -> None:
        self._connections.stay_away(peer.name)
        logger.info("peer lost peer=%s cause=%s", peer.name, reason)
        self._protocol.peer_lost(peer.name, reason, self._clock.now_s(), dead=dead)

    def _disconnect(self, action: Disconnect) -> None:
        self._connections.disconnect(action.peer.name)
        self._inbox.forget(action.peer.name)

    def _post(self, post: Post) -> None:
        peer = post.peer
        try:
            connected = self._connections.connect(peer.name)
        except (PeerLost, TransferError) as error:
            self._protocol.completed(post.post, str(error), self._clock.now_s())
            self._lose(peer, str(error), dead=isinstance(error, PeerLost))
            return
        now_s = self._clock.now_s()
        if not connected:
            self._protocol.completed(post.post, f"peer {peer.name!r} is gone", now_s)
        elif now_s > post.not_after_s:
            self._protocol.completed(post.post, None, now_s, started=False)
        elif (moved := self._mover.start(post, self._connections.links[peer.name])) is not None:
            self.moved(moved)
            if moved.lost:
                self._lose(peer, moved.error or "gone", dead=True)
