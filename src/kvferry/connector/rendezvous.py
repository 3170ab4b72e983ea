"""Where an engine meets others: the handshaker that judges, and the two sockets of the side channel.

Threads: the listener's thread answers peers; `view` is called on the engine's thread, sends questions and takes answers
without blocking. An accepted peer is introduced to the worker halves before it is told that it was accepted, so that
its first message finds somebody who knows it. An incarnation that was replaced, refused later, or lost (`lost`, on a
driver's thread) departs from the worker halves before its successor is introduced.
"""

import logging
import threading
from collections.abc import Callable

from kvferry.clock import Clock, MonotonicClock
from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.handoff.orders import PeerAccepted, PeerGone
from kvferry.handshake.exchange import LocalSide
from kvferry.handshake.handshaker import Handshaker
from kvferry.handshake.peer_table import Peer, PeerState
from kvferry.ids import EngineId, Incarnation
from kvferry.settings import SideChannelSettings
from kvferry.sidechannel.client import SideChannelClient
from kvferry.sidechannel.listener import SideChannelServer

__all__ = ["Rendezvous"]

logger = logging.getLogger(__name__)

_EXPIRE_EVERY_S = 10.0


class Rendezvous:
    """One an engine. Binds when made, so that the address is known; answers from `start` to `close`."""

    def __init__(
        self,
        settings: SideChannelSettings,
        introduce: Callable[[PeerAccepted], None],
        depart: Callable[[PeerGone], None],
        *,
        name: str,
        clock: Clock | None = None,
    ) -> None:
        """`introduce` hands an accepted peer to every worker half, `depart` takes one from them; from any thread, must
        not block.
        """
        self._settings = settings
        self._introduce = introduce
        self._depart = depart
        self._telling = threading.Lock()
        self._expire_at_s = float("-inf")
        self._clock = clock or MonotonicClock()
        self._desk: Handshaker | None = None
        self._server = SideChannelServer(settings, self._answer, name=name, clock=self._clock)
        self._client = SideChannelClient(settings, clock=self._clock)

    @property
    def host(self) -> str:
        """The address to tell peers."""
        return self._server.host

    @property
    def port(self) -> int:
        """The port that was bound."""
        return self._server.port

    def start(self, local: LocalSide) -> None:
        """Begin to answer and to ask, as `local`."""
        self._desk = Handshaker(local, max_peers=self._settings.max_peers)
        self._server.start()

    def restart(self, local: LocalSide) -> None:
        """Go on as another incarnation: every peer is forgotten, and met again. On the engine's thread."""
        self._client.close()  # an answer to an old question must not be taken for one to a new question
        self._client = SideChannelClient(self._settings, clock=self._clock)
        self._desk = Handshaker(local, max_peers=self._settings.max_peers)

    def view(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int) -> PeerView:
        """Where that engine stands; asks it if that is due. Never blocks."""
        handshaker = self._open_desk()
        if len(self._client):
            self._pump(handshaker)  # a question that ended while nobody looked must not be taken for one under way
        peer = handshaker.want(engine, incarnation, host, port, self._clock.now_s())
        if peer.state is not PeerState.ACCEPTED:
            self._pump(handshaker)
            peer = handshaker.book.get(engine) if peer.state is not PeerState.REFUSED else peer
        else:
            # The listener's thread may have accepted it a moment ago: an order of ours must not reach the worker halves
            # before it does.
            self._tell_workers(handshaker)
        return _view(peer, engine, incarnation)

    def lost(self, engine: EngineId, incarnation: Incarnation, reason: str) -> None:
        """A worker half has found that an accepted peer is gone: the next request that names it shakes hands again.

        From any thread; never blocks. Other ranks are told.
        """
        handshaker = self._open_desk()
        handshaker.lost(engine, incarnation, reason, self._clock.now_s())
        self._tell_workers(handshaker)

    def peers(self) -> tuple[Peer, ...]:
        """All that are known, with why they were refused."""
        return self._open_desk().book.peers() if self._desk is not None else ()

    def close(self) -> None:
        """No socket, no thread remains. Idempotent."""
        self._server.close()
        self._client.close()

    def _open_desk(self) -> Handshaker:
        assert self._desk is not None, "start() comes before any peer"
        return self._desk

    def _answer(self, body: bytes, address: str) -> bytes:
        handshaker = self._open_desk()
        reply = handshaker.answer(body, address, self._clock.now_s())
        self._tell_workers(handshaker)
        return reply

    def _pump(self, handshaker: Handshaker) -> None:
        for ask in handshaker.take_asks():
            self._client.ask_nowait(ask.host, ask.port, ask.body, ask.token)
        for token, reply in self._client.poll():
            handshaker.replied(token, reply, self._clock.now_s())
        self._tell_workers(handshaker)

    def _tell_workers(self, handshaker: Handshaker) -> None:
        # One thread at a time: what one has taken must not be told after what another takes later.
        with self._telling:
            for gone in handshaker.take_gone():
                logger.info("peer gone peer=%s incarnation=%s cause=%s", gone.engine, gone.incarnation, gone.reason)
                self._depart(gone)
            for peer in handshaker.take_accepted():
                now = handshaker.book.get(peer.engine)
                if now.paired and now.incarnation == peer.incarnation:  # else it has gone in between
                    self._introduce(peer)
            now_s = self._clock.now_s()
            if now_s >= self._expire_at_s:
                self._expire_at_s = now_s + _EXPIRE_EVERY_S
                handshaker.book.expire(now_s)


def _view(peer: Peer, engine: EngineId, incarnation: Incarnation | None) -> PeerView:
    if peer.state is PeerState.ACCEPTED:
        if incarnation is None or incarnation == peer.incarnation:
            return PeerView(PeerStatus.ACCEPTED, incarnation=peer.incarnation)
        return PeerView(
            PeerStatus.REFUSED,
            f"engine {engine!r} has restarted since it computed the prompt (it was {incarnation!r}, and is "
            f"{peer.incarnation!r}): its cache is gone",
        )
    if peer.state in (PeerState.ASKING, PeerState.UNKNOWN):
        return PeerView(PeerStatus.ASKING)
    return PeerView(PeerStatus.REFUSED, peer.reason)
