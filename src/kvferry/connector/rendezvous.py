"""Where an engine meets others: the handshaker, which decides, and the two sockets of the side channel.

Threads: the listener's thread answers peers. `view` is called on the engine's thread: it sends questions and takes the
answers, without blocking. The worker halves learn of a peer before the peer learns that it was accepted, so that its
first message comes to a driver that knows it. An incarnation that was replaced, was refused later, or was lost (`lost`,
on a driver's thread) is gone from the worker halves before they learn of its successor.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from kvferry.clock import Clock, MonotonicClock
from kvferry.connector.finding import Finder, Questions
from kvferry.connector.peers import Asked, PeerStatus, PeerView, Question
from kvferry.handoff.orders import StepOrders
from kvferry.handshake.exchange import LocalSide
from kvferry.handshake.handshaker import Handshaker
from kvferry.handshake.peer_table import Peer, PeerState
from kvferry.ids import EngineId, Incarnation
from kvferry.settings import FetchSettings, SideChannelSettings
from kvferry.sidechannel.client import SideChannelClient
from kvferry.sidechannel.late_answer import LateAnswer
from kvferry.sidechannel.listener import SideChannelServer
from kvferry.wire import find as find_messages
from kvferry.wire.find import Find
from kvferry.wire.versions import FIND

__all__ = ["Rendezvous"]

logger = logging.getLogger(__name__)

_EXPIRE_EVERY_S = 10.0


class Rendezvous:
    """The side channel of one engine. It binds when it is made, so that the address is known before `start`."""

    def __init__(
        self,
        settings: SideChannelSettings,
        fetch: FetchSettings | None = None,
        *,
        name: str,
        clock: Clock | None = None,
    ) -> None:
        """Bind. Raises ConfigError if the address or the key cannot be used. `name` is the engine's, for threads."""
        fetch = fetch or FetchSettings()
        self._settings = settings
        self._clock = clock or MonotonicClock()
        self._handshaker: Handshaker | None = None
        self._send: Callable[[StepOrders], None] = lambda orders: None
        self._sending = threading.Lock()
        self._expire_at_s = float("-inf")
        self._server = SideChannelServer(settings, self._answer, name=name, clock=self._clock)
        self._client = SideChannelClient(settings, clock=self._clock)
        self._finder = Finder(settings, fetch.answer_s, clock=self._clock)
        self._questions = Questions(fetch, lambda: self._on_question())
        self._on_question: Callable[[], None] = lambda: None

    @property
    def host(self) -> str:
        """The address that peers are given."""
        return self._server.host

    @property
    def port(self) -> int:
        """The port that was bound."""
        return self._server.port

    def start(self, local: LocalSide, send: Callable[[StepOrders], None]) -> None:
        """Begin to answer and to ask, as `local`.

        `send` hands orders to every worker half at once: here, the peers that came and went. It is called on any
        thread, and must not block.
        """
        self._handshaker, self._send = Handshaker(local, max_peers=self._settings.max_peers), send
        self._server.start()

    def restart(self, local: LocalSide, send: Callable[[StepOrders], None]) -> None:
        """Go on as another incarnation, with other worker halves. Every peer is forgotten, and met again.

        Called on the engine's thread.
        """
        self._client.close()  # the answer to an old question must not be taken for the answer to a new one
        self._client = SideChannelClient(self._settings, clock=self._clock)
        self._questions.refuse_all("it has restarted: what it held is gone")
        # In this order: a peer that the new handshaker accepts is for the new worker halves.
        self._send = send
        self._handshaker = Handshaker(local, max_peers=self._settings.max_peers)

    def view(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int) -> PeerView:
        """Return whether that engine can be used now; ask it if that is due. Never blocks."""
        handshaker = self._started()
        if len(self._client):
            # A question that timed out while no request needed it must not be taken for one that is under way.
            self._exchange(handshaker)
        peer = handshaker.want(engine, incarnation, host, port, self._clock.now_s())
        if peer.state is not PeerState.ACCEPTED:
            self._exchange(handshaker)
            peer = handshaker.peers.get(engine) if peer.state is not PeerState.REFUSED else peer
        else:
            # The listener's thread may have accepted it a moment ago: the worker halves must learn of the peer before
            # they receive an order that names it.
            self._send_peers(handshaker)
        return _view(peer, engine, incarnation)

    def lost(self, engine: EngineId, incarnation: Incarnation, reason: str) -> None:
        """A worker half has found that an accepted peer is gone: the next request that names it shakes hands again.

        The other ranks learn of it. From any thread; never blocks.
        """
        handshaker = self._started()
        handshaker.lost(engine, incarnation, reason, self._clock.now_s())
        self._send_peers(handshaker)

    def peers(self) -> tuple[Peer, ...]:
        """Return all known peers, with the reason if one was refused."""
        return self._handshaker.peers.snapshot() if self._handshaker is not None else ()

    def close(self) -> None:
        """Close both sockets and end the listener's thread. Idempotent."""
        self._server.close()
        self._client.close()
        self._finder.close()

    # Questions about prefixes

    def on_question(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on the listener's thread, when another engine has asked: `take_questions` has something."""
        self._on_question = wake

    def find(self, host: str, port: int, find: Find) -> Asked:
        """Ask an accepted engine for KV (PrefixBoard)."""
        return self._finder.ask(host, port, find)

    def poll_finds(self) -> None:
        """Take the answers that have come (PrefixBoard)."""
        self._finder.poll()

    def take_questions(self, max_bytes: int) -> Sequence[Question]:
        """Return questions of other engines (PrefixBoard)."""
        if len(self._questions) and len(self._client):
            self._exchange(self._started())  # the answer that accepts who asks may have come
        return self._questions.take(max_bytes, self._may_ask)

    @property
    def num_questions(self) -> int:
        """The number of questions that wait (PrefixBoard)."""
        return len(self._questions)

    def _may_ask(self, engine: EngineId, incarnation: Incarnation) -> bool | None:
        peer = self._started().peers.get(engine)
        if peer.paired and peer.incarnation == incarnation and peer.protocol >= FIND:
            return True
        return None if peer.state is PeerState.ASKING else False

    def _started(self) -> Handshaker:
        assert self._handshaker is not None, "start() comes before any peer"
        return self._handshaker

    def _answer(self, body: bytes, address: str) -> bytes | LateAnswer:
        handshaker = self._started()
        if body[: len(find_messages.MAGIC)] == find_messages.MAGIC:
            return self._questions.ask(body, handshaker.local.incarnation, self._may_ask)
        reply = handshaker.answer(body, address, self._clock.now_s())
        self._send_peers(handshaker)
        return reply

    def _exchange(self, handshaker: Handshaker) -> None:
        """Send the questions that are due, and take the answers that have come."""
        for ask in handshaker.take_asks():
            self._client.ask_nowait(ask.host, ask.port, ask.body, ask.token)
        for token, reply in self._client.poll():
            handshaker.replied(token, reply, self._clock.now_s())
        self._send_peers(handshaker)

    def _send_peers(self, handshaker: Handshaker) -> None:
        """Send the worker halves the peers that came and went."""
        with self._sending:  # one thread at a time: what one has taken must not be sent after what another takes later
            gone = tuple(handshaker.take_gone())
            for peer in gone:
                logger.info("peer gone peer=%s incarnation=%s cause=%s", peer.engine, peer.incarnation, peer.reason)
            came = []
            for accepted in handshaker.take_accepted():
                now = handshaker.peers.get(accepted.engine)
                if now.paired and now.incarnation == accepted.incarnation:  # else it has gone in between
                    came.append(accepted)
            if gone or came:
                self._send(StepOrders(accepted=tuple(came), gone=gone))
            now_s = self._clock.now_s()
            if now_s >= self._expire_at_s:
                self._expire_at_s = now_s + _EXPIRE_EVERY_S
                handshaker.peers.expire(now_s)


def _if_both_run(peer: Peer, incarnation: Incarnation) -> str:
    """Returns what to do if the incarnation that was replaced is still running, under the same id."""
    address = next((address for former, address in peer.former if former == incarnation), peer.address)
    if address == peer.address:
        return ""
    return (
        f". If both are running, at {address} and at {peer.address}, two engines have one id: "
        "give each its own --engine-id"
    )


def _view(peer: Peer, engine: EngineId, incarnation: Incarnation | None) -> PeerView:
    if peer.state is PeerState.ACCEPTED:
        if incarnation is None or incarnation == peer.incarnation:
            return PeerView(
                PeerStatus.ACCEPTED,
                incarnation=peer.incarnation,
                protocol=peer.protocol,
                fetch_obstacle=peer.fetch_obstacle,
            )
        return PeerView(
            PeerStatus.REFUSED,
            f"engine {engine!r} has restarted since it computed the prompt (it was {incarnation!r}, and is "
            f"{peer.incarnation!r}): its cache is gone{_if_both_run(peer, incarnation)}",
        )
    if peer.state in (PeerState.ASKING, PeerState.UNKNOWN):
        return PeerView(PeerStatus.ASKING)
    return PeerView(PeerStatus.REFUSED, peer.reason)
