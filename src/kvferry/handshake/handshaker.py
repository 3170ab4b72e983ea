"""Answers incoming handshakes, and starts outgoing ones to peers that requests name. No I/O.

Threads: the side channel's listener calls `answer`, and the engine's thread calls everything else, both at any time.
An engine's loop does this once per step:

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
from kvferry.handshake.peer_table import BackOff, Peer, PeerAccepted, PeerGone, PeerState, PeerTable
from kvferry.ids import EngineId, Incarnation
from kvferry.wire.envelope import Envelope, decode_envelope
from kvferry.wire.hello import encode_hello

__all__ = ["Ask", "Handshaker"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to send; `token` identifies its reply."""

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
    """The handshakes of one engine."""

    def __init__(self, local: LocalSide, *, max_peers: int = 4096, back_off: BackOff | None = None) -> None:
        self.local = local
        self.peers = PeerTable(local.engine, local.incarnation, max_peers=max_peers, back_off=back_off)
        self._lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._sent: dict[int, _Sent] = {}
        self._asks: list[Ask] = []
        self._accepted: list[PeerAccepted] = []
        self._gone: list[PeerGone] = []

    def want(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int, now_s: float) -> Peer:
        """Returns what is known of a peer that a request names, and asks the peer if that is due.

        It is cheap, as it is called for every request. If the state is ACCEPTED with the incarnation that the request
        names (or the request names none), the hand-off can start; with another incarnation, the one that the request
        names is not there, and its cache is gone. ASKING means to call again in the next step. REFUSED and LOST mean to
        recompute the request or to end it with an error, for the given `reason`.
        """
        if self.peers.may_ask(engine, now_s, incarnation):
            obstacle = self.peers.asking(engine, now_s, address=f"{host}:{port}", incarnation=incarnation)
            if obstacle:
                return Peer(engine=engine, state=PeerState.REFUSED, reason=obstacle, since_s=now_s)
            self._send(engine, host, port, self.local.protocols.newest)
            logger.info("handshake asked peer=%s address=%s:%s", engine, host, port)
        return self.peers.get(engine)

    def take_asks(self) -> list[Ask]:
        """Returns the questions to send now, each of them once."""
        with self._lock:
            asks, self._asks = self._asks, []
            return asks

    def take_accepted(self) -> list[PeerAccepted]:
        """Returns the peers that were accepted since the last call, whichever side asked, each of them once."""
        with self._lock:
            accepted, self._accepted = self._accepted, []
            return accepted

    def take_gone(self) -> list[PeerGone]:
        """Returns the incarnations to disconnect, each of them once. Call it before `take_accepted` in each step."""
        with self._lock:
            gone, self._gone = self._gone, []
            return gone

    def replied(self, token: int, reply: bytes | FerryError, now_s: float) -> None:
        """Takes the reply to a question, or the error if there is none. An unknown token changes nothing."""
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
                self._refused(
                    sent.engine, None, now_s, f"{sent.engine!r} asked for another protocol version a second time"
                )
                return
            self._send(sent.engine, sent.host, sent.port, outcome.protocol)
            return
        address = f"{sent.host}:{sent.port}"
        if outcome.engine is not None and outcome.engine != sent.engine:
            reason = (
                f"{address} answers as {str(outcome.engine)!r} and not as {str(sent.engine)!r}: the request names the "
                "wrong address, or two engines share an address. Check the router's list of workers"
            )
            self._refused(sent.engine, None, now_s, reason)
        elif isinstance(outcome, Refused):
            if outcome.temporary:
                self._lost(sent.engine, None, now_s, outcome.reason)
            else:
                self._refused(sent.engine, outcome.incarnation, now_s, outcome.reason, address)
        else:
            check = self.peers.check_sender(outcome.engine, outcome.incarnation, address=address)
            if check.conflict or check.full:
                self._refused(sent.engine, None, now_s, check.conflict or check.full, address)
            else:
                self._welcome(outcome, now_s, address)

    def answer(self, body: bytes, address: str, now_s: float) -> bytes:
        """Returns the reply to a peer that asks from `address`. Nothing that a peer sends makes it raise."""
        try:
            envelope = decode_envelope(body)
        except MalformedMessage as error:
            logger.warning("handshake malformed address=%s cause=%s", address, error)
            return refuse(self.local, str(error))
        engine, incarnation = EngineId(envelope.engine), Incarnation(envelope.incarnation)
        check = self.peers.check_sender(engine, incarnation, address=address)
        if check.conflict or check.full:
            logger.warning(
                "handshake refused peer=%s address=%s cause=%s", engine, address, check.conflict or check.full
            )
            return refuse(self.local, check.conflict or check.full)
        return self._judge(envelope, address, now_s)

    def lost(self, engine: EngineId, incarnation: Incarnation, reason: str, now_s: float) -> None:
        """Records that the transport lost an accepted peer. The peer is asked again when a request needs it."""
        self._lost(engine, incarnation, now_s, reason)

    def close(self) -> None:
        """Forgets all questions that have no reply yet."""
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
            known = self.peers.get(accepted.engine)
            replaced = self.peers.accepted(
                accepted.engine,
                accepted.incarnation,
                now_s,
                address=address,
                protocol=accepted.protocol,
                notes=accepted.verdict.notes(),
                fetch_obstacle=accepted.fetch_obstacle,
            )
            if replaced is not None:
                self._gone.append(
                    PeerGone(accepted.engine, replaced, f"replaced by incarnation {accepted.incarnation!r}")
                )
            if known.paired and known.incarnation == accepted.incarnation:
                return  # both sides asked, or one side asked again: the peer is already in use
            hello = encode_hello(accepted.hello)
            self._accepted.append(PeerAccepted(accepted.engine, accepted.incarnation, hello, accepted.protocol))
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
            gone = self.peers.refused(engine, incarnation, now_s, reason, address=address)
            if gone is not None:
                self._gone.append(PeerGone(engine, gone, reason))
        logger.log(level, "handshake refused peer=%s incarnation=%s cause=%s", engine, incarnation, reason)

    def _level(self, engine: EngineId, reason: str) -> int:
        """Returns WARNING for a new failure, and DEBUG for one with the same reason as the last, to keep the log
        short."""
        return logging.DEBUG if self.peers.get(engine).reason == reason else logging.WARNING

    def _lost(self, engine: EngineId, incarnation: Incarnation | None, now_s: float, reason: str) -> None:
        level = self._level(engine, reason)
        with self._lock:
            gone = self.peers.lost(engine, incarnation, now_s, reason)
            if gone is not None:
                self._gone.append(PeerGone(engine, gone, reason))
        logger.log(level, "peer lost peer=%s incarnation=%s cause=%s", engine, incarnation, reason)


def _listening(accepted: Accepted, address: str) -> str:
    """Returns where the peer can be asked: the address that it reports, or the sender's (version 1 reports none)."""
    return f"{accepted.hello.host}:{accepted.hello.port}" if accepted.hello.host else address
