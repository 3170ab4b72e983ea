"""Answers incoming handshakes, and starts outgoing ones to peers that requests name. No I/O.

Threads: `answer` is called by the side channel's listener, the rest by the engine's thread; both may at any time.
An engine's loop, once a step:

    handshaker.want(engine, incarnation, host, port, now)   for each request that names a peer; ACCEPTED: go on
    for ask in handshaker.take_asks(): client.ask_nowait(ask.host, ask.port, ask.body, ask.token)
    for token, reply in client.poll(): handshaker.replied(token, reply, now)
    for gone in handshaker.take_gone(): tell the worker halves to disconnect it
    for accepted in handshaker.take_accepted(): tell the worker halves
"""

import itertools
import logging
import threading
from dataclasses import dataclass

from kvferry.errors import FerryError, MalformedMessage
from kvferry.handshake.exchange import Accepted, AskAgain, LocalSide, Refused, ask, judge_ask, judge_reply, refuse
from kvferry.handshake.peer_table import BackOff, Peer, PeerAccepted, PeerBook, PeerGone, PeerState
from kvferry.ids import EngineId, Incarnation
from kvferry.wire.envelope import Envelope, decode_envelope
from kvferry.wire.hello import encode_hello

__all__ = ["Ask", "Handshaker"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to send; `token` comes back with its reply."""

    token: int
    host: str
    port: int
    body: bytes


@dataclass(frozen=True, slots=True)
class _Sent:
    engine: EngineId
    host: str
    port: int
    protocol: int


class Handshaker:
    """One an engine."""

    def __init__(self, local: LocalSide, *, max_peers: int = 4096, back_off: BackOff | None = None) -> None:
        self.local = local
        self.book = PeerBook(local.engine, local.incarnation, max_peers=max_peers, back_off=back_off)
        self._lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._sent: dict[int, _Sent] = {}
        self._asks: list[Ask] = []
        self._accepted: list[PeerAccepted] = []
        self._gone: list[PeerGone] = []

    def want(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int, now_s: float) -> Peer:
        """A request names a peer. Asks it if that is due. Returns what is known; cheap, called for every request.

        ACCEPTED with the request's own incarnation (or where it names none): go on. ASKING: look again at the next
        step. REFUSED and LOST: end or recompute the request, `reason` says why. ACCEPTED with another incarnation than
        the request names: that one is not here; the request's cache is gone.
        """
        if self.book.may_ask(engine, now_s, incarnation):
            obstacle = self.book.asking(engine, now_s, address=f"{host}:{port}", incarnation=incarnation)
            if obstacle:
                return Peer(engine=engine, state=PeerState.REFUSED, reason=obstacle, since_s=now_s)
            self._send(engine, host, port, self.local.protocols.newest)
            logger.info("handshake asked peer=%s address=%s:%s", engine, host, port)
        return self.book.get(engine)

    def take_asks(self) -> list[Ask]:
        """Questions to send now; each is handed out once."""
        with self._lock:
            asks, self._asks = self._asks, []
            return asks

    def take_accepted(self) -> list[PeerAccepted]:
        """Peers accepted since the last call, on either side's question; each is handed out once."""
        with self._lock:
            accepted, self._accepted = self._accepted, []
            return accepted

    def take_gone(self) -> list[PeerGone]:
        """Incarnations to disconnect; each is handed out once. Before `take_accepted`, in each step."""
        with self._lock:
            gone, self._gone = self._gone, []
            return gone

    def replied(self, token: int, reply: bytes | FerryError, now_s: float) -> None:
        """The side channel has an answer, or says why there is none. An unknown token changes nothing."""
        with self._lock:
            sent = self._sent.pop(token, None)
        if sent is None:
            return
        if isinstance(reply, FerryError):
            self._lost(sent.engine, None, now_s, str(reply))
            return
        outcome = judge_reply(self.local, reply, asked_protocol=sent.protocol)
        if isinstance(outcome, AskAgain):
            if sent.protocol != self.local.protocols.newest:
                self._refused(sent.engine, None, now_s, f"{sent.engine!r} asked a second time for another protocol")
                return
            self._send(sent.engine, sent.host, sent.port, outcome.protocol)
            return
        address = f"{sent.host}:{sent.port}"
        if outcome.engine is not None and outcome.engine != sent.engine:
            reason = (
                f"{address} answers as {str(outcome.engine)!r} and not as {str(sent.engine)!r}: the request names the "
                "wrong address, or two engines share one. Check the router's list of workers"
            )
            self._refused(sent.engine, None, now_s, reason)
        elif isinstance(outcome, Refused):
            if outcome.temporary:
                self._lost(sent.engine, None, now_s, outcome.reason)
            else:
                self._refused(sent.engine, outcome.incarnation, now_s, outcome.reason, address)
        else:
            heard = self.book.heard(outcome.engine, outcome.incarnation, address=address)
            if heard.conflict or heard.full:
                self._refused(sent.engine, None, now_s, heard.conflict or heard.full, address)
            else:
                self._welcome(outcome, now_s, address)

    def answer(self, body: bytes, address: str, now_s: float) -> bytes:
        """What to send back to one who asks from `address`. Never raises for anything that a peer sends."""
        try:
            envelope = decode_envelope(body)
        except MalformedMessage as error:
            logger.warning("handshake malformed address=%s cause=%s", address, error)
            return refuse(self.local, str(error))
        engine, incarnation = EngineId(envelope.engine), Incarnation(envelope.incarnation)
        heard = self.book.heard(engine, incarnation, address=address)
        if heard.conflict or heard.full:
            logger.warning(
                "handshake refused peer=%s address=%s cause=%s", engine, address, heard.conflict or heard.full
            )
            return refuse(self.local, heard.conflict or heard.full)
        return self._judge(envelope, address, now_s)

    def lost(self, engine: EngineId, incarnation: Incarnation, reason: str, now_s: float) -> None:
        """The transport says that an accepted peer is gone. It is asked again when a request needs it."""
        self._lost(engine, incarnation, now_s, reason)

    def close(self) -> None:
        """Forget everything that is under way."""
        with self._lock:
            self._sent.clear()
            self._asks.clear()

    def _judge(self, envelope: Envelope, address: str, now_s: float) -> bytes:
        reply, outcome = judge_ask(self.local, envelope)
        if isinstance(outcome, Accepted):
            self._welcome(outcome, now_s, _listening(outcome, address))
        elif isinstance(outcome, Refused):
            self._refused(EngineId(envelope.engine), Incarnation(envelope.incarnation), now_s, outcome.reason, address)
        return reply

    def _send(self, engine: EngineId, host: str, port: int, protocol: int) -> None:
        body = ask(self.local, protocol)
        with self._lock:
            token = next(self._tokens)
            self._sent[token] = _Sent(engine, host, port, protocol)
            self._asks.append(Ask(token, host, port, body))

    def _welcome(self, accepted: Accepted, now_s: float, address: str) -> None:
        with self._lock:
            known = self.book.get(accepted.engine)
            replaced = self.book.accepted(
                accepted.engine,
                accepted.incarnation,
                now_s,
                address=address,
                protocol=accepted.protocol,
                notes=accepted.verdict.notes(),
            )
            if replaced is not None:
                self._gone.append(
                    PeerGone(accepted.engine, replaced, f"replaced by incarnation {accepted.incarnation!r}")
                )
            if known.paired and known.incarnation == accepted.incarnation:
                return  # asked by both sides, or once more: it has been introduced
            self._accepted.append(PeerAccepted(accepted.engine, accepted.incarnation, encode_hello(accepted.hello)))
        logger.info(
            "handshake accepted peer=%s incarnation=%s address=%s protocol=%s verdict=%s notes=%s",
            accepted.engine,
            accepted.incarnation,
            address,
            accepted.protocol,
            accepted.verdict.kind,
            "; ".join(accepted.verdict.notes()) or "none",
        )

    def _refused(
        self, engine: EngineId, incarnation: Incarnation | None, now_s: float, reason: str, address: str = ""
    ) -> None:
        level = self._level(engine, reason)
        with self._lock:
            gone = self.book.refused(engine, incarnation, now_s, reason, address=address)
            if gone is not None:
                self._gone.append(PeerGone(engine, gone, reason))
        logger.log(level, "handshake refused peer=%s incarnation=%s cause=%s", engine, incarnation, reason)

    def _level(self, engine: EngineId, reason: str) -> int:
        """A failure is news once: a peer that fails for the same reason again must not fill the log."""
        return logging.DEBUG if self.book.get(engine).reason == reason else logging.WARNING

    def _lost(self, engine: EngineId, incarnation: Incarnation | None, now_s: float, reason: str) -> None:
        level = self._level(engine, reason)
        with self._lock:
            gone = self.book.lost(engine, incarnation, now_s, reason)
            if gone is not None:
                self._gone.append(PeerGone(engine, gone, reason))
        logger.log(level, "peer lost peer=%s incarnation=%s cause=%s", engine, incarnation, reason)


def _listening(accepted: Accepted, address: str) -> str:
    """Where the peer can be asked: what it tells, else where it spoke from (version 1 tells nothing)."""
    return f"{accepted.hello.host}:{accepted.hello.port}" if accepted.hello.host else address
