"""The listener: one thread and one port per engine, on which peers ask to shake hands.

It survives whatever is sent to it. Frames of the wrong number or size are dropped and counted, a handler that raises is
logged and answered, and a peer that asks too often is answered BUSY without calling the handler. libzmq ends
connections whose messages are too long, that do not finish their greeting, or that have gone silent. On any address
other than loopback every connection is authenticated (CURVE, sidechannel.shared_key) before any of its bytes are read.

Known limit: libzmq does not limit the number of frames of one message, so a client with the key (on loopback: any local
user) can make the listener hold many frames at once.
"""

import logging
import resource
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.clock import Clock, MonotonicClock
from kvferry.errors import ConfigError
from kvferry.settings import SideChannelSettings
from kvferry.sidechannel.late_answer import LateAnswer
from kvferry.sidechannel.rate_limit import RateLimit
from kvferry.sidechannel.shared_key import load_key, require_key
from kvferry.wire.envelope import Envelope, Kind, encode_envelope

__all__ = ["MAX_TOKEN_BYTES", "OnEnvelope", "SideChannelServer", "SideChannelStats"]

logger = logging.getLogger(__name__)

OnEnvelope = Callable[[bytes, str], bytes | LateAnswer]
"""Maps (message, peer's address) to the answer, or to one that is given later. It is called on the listener's thread,
and should take milliseconds."""

MAX_TOKEN_BYTES = 16
_GREETING_MS = 3000
_HEARTBEAT_MS = 5000


@dataclass(frozen=True, slots=True)
class SideChannelStats:
    """What the listener has counted since its start."""

    answered: int = 0
    malformed: int = 0
    """Messages that were dropped because no peer sends such frames."""
    limited: int = 0
    """Messages that were answered BUSY, because more than max_handshakes_per_s came from one address."""
    denied: int = 0
    """Connections that were refused: the key was wrong, or more than max_peers or half of our descriptors were open."""
    failed: int = 0
    """Messages for which the handler or the socket raised an error."""
    connections: int = 0
    """Connections that are open now."""


class SideChannelServer:
    """The listener. It binds its port when it is made, and answers from `start`, which is called once, until
    `close`."""

    def __init__(
        self,
        settings: SideChannelSettings,
        on_envelope: OnEnvelope,
        *,
        name: str = "kvferry",
        clock: Clock | None = None,
    ) -> None:
        """Binds the port. Raises ConfigError for an address that needs a key, or that cannot be bound."""
        self._key = load_key(settings)
        require_key(self._key, settings.host, "listen there")
        self._settings = settings
        self._on_envelope = on_envelope
        self._clock = clock or MonotonicClock()
        self._limit = RateLimit(settings.max_handshakes_per_s)
        self._busy = _busy(name, f"more than {settings.max_handshakes_per_s:g} handshakes per second from one address")
        self._broken = _busy(name, "the handshake failed with an internal error; this engine's log has the traceback")
        self._stats = SideChannelStats()
        self._connections: set[int] = set()
        # Clients must not be able to use up all file descriptors of the engine.
        self._max_connections = min(settings.max_peers, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._late: deque[tuple[bytes, bytes, bytes]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._context = zmq.Context()
        self._context.linger = 0
        try:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind("inproc://zeromq.zap.01")
            self._stop_out = self._context.socket(zmq.PAIR)
            self._stop_in = self._context.socket(zmq.PAIR)
            self._stop_in.bind("inproc://stop")
            self._stop_out.connect("inproc://stop")
            self._socket = self._bind()
        except BaseException:
            self._context.destroy(linger=0)
            self._close_wakers()
            raise

    @property
    def port(self) -> int:
        """The port that was bound; it differs from settings.port if that is 0."""
        return self._port

    @property
    def host(self) -> str:
        """The address to report to peers."""
        return self._settings.host

    def stats(self) -> SideChannelStats:
        """Returns a snapshot of the counters."""
        return replace(self._stats, connections=len(self._connections))

    def start(self) -> None:
        """Starts the thread that answers."""
        assert self._thread is None, "a listener is started once"
        self._thread = threading.Thread(target=self._run, name="kvferry-side-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops, and leaves no thread, socket or descriptor behind. Waits for the handler. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._stop_out.send(b"")
            self._thread.join()
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
        self._close_wakers()

    def _close_wakers(self) -> None:
        self._woken.close()
        self._waker.close()

    def _bind(self) -> "zmq.Socket[bytes]":
        settings = self._settings
        router = self._context.socket(zmq.ROUTER)
        router.maxmsgsize = settings.max_message_bytes
        router.ipv6 = ":" in settings.host
        router.handshake_ivl = _GREETING_MS
        router.heartbeat_ivl = _HEARTBEAT_MS
        router.heartbeat_timeout = 3 * _HEARTBEAT_MS
        router.rcvhwm = router.sndhwm = 16  # per peer
        router.setsockopt(zmq.BACKLOG, 1024)
        router.zap_domain = b"kvferry"  # makes libzmq call our ZAP handler, even without a key
        if self._key is not None:
            router.curve_server = True
            router.curve_secretkey = self._key.secret
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._monitor = router.get_monitor_socket(events)
        host = settings.host.strip("[]")
        host = f"[{host}]" if ":" in host else host
        try:
            router.bind(f"tcp://{host}:{settings.port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"side_channel.host={settings.host!r} side_channel.port={settings.port!r} cannot be bound: "
                f"{error.strerror}. Choose an address of this machine (--side-channel-host) and a free port "
                "(--side-channel-port; 0 takes a free one)"
            ) from error
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._port = int(endpoint.rsplit(":", 1)[1])
        return router

    def _run(self) -> None:
        poller = zmq.Poller()
        for sock in (self._stop_in, self._zap, self._monitor, self._socket, self._woken):
            poller.register(sock, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_in in ready:
                return
            try:
                if self._monitor in ready:
                    self._count_connection()
                if self._zap in ready:
                    self._admit()
                if self._woken.fileno() in ready:
                    self._send_late_answers()
                if self._socket in ready:
                    self._answer()
            except zmq.ZMQError as error:
                self._count(failed=1)
                logger.warning("side channel error=%s", error)
            except Exception:  # the listener outlives any message
                self._count(failed=1)
                logger.exception("side channel: a message could not be handled")

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + num for name, num in more.items()})

    def _count_connection(self) -> None:
        event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._connections.add(event["value"])
        else:
            self._connections.discard(event["value"])

    def _admit(self) -> None:
        """Answers a ZAP request (RFC 27): libzmq asks for each connection, before any of its bytes are read."""
        frames = self._zap.recv_multipart(zmq.NOBLOCK)
        version, request, _, _, _, mechanism, *credentials = [*frames, b"", b"", b"", b"", b"", b""]
        known = self._key is None or (mechanism == b"CURVE" and credentials[0] == self._key.raw_public)
        room = len(self._connections) <= self._max_connections
        if not (known and room):
            self._count(denied=1)
        # 300 is temporary: libzmq closes the connection, and the client tries again. After 400 it does not.
        status = (b"200", b"OK") if known and room else (b"300", b"too many peers") if known else (b"400", b"wrong key")
        self._zap.send_multipart([version, request, *status, b"peer", b""])

    def _answer(self) -> None:
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        if len(frames) != 3 or len(frames[1]) > MAX_TOKEN_BYTES:
            self._count(malformed=1)
            return
        identity, token, body = frames
        address = _address(body)
        if not self._limit.allow(address, self._clock.now_s()):
            self._count(limited=1)
            reply = self._busy
        else:
            try:
                answer = self._on_envelope(body.bytes, address)
                if isinstance(answer, LateAnswer):
                    answer.then(partial(self._answer_later, identity.bytes, token.bytes))
                    return
                reply = answer
                self._count(answered=1)
            except Exception:
                # A bug of ours may cost this peer its answer, but must not end the listener for all others.
                self._count(failed=1)
                logger.exception("side channel: the handler failed address=%s", address)
                reply = self._broken
        self._send(identity.bytes, token.bytes, reply)

    def _send(self, identity: bytes, token: bytes, reply: bytes) -> None:
        try:
            self._socket.send_multipart([identity, token, reply], zmq.NOBLOCK)
        except zmq.Again:
            self._count(failed=1)  # the peer does not read its answers

    def _answer_later(self, identity: bytes, token: bytes, reply: bytes) -> None:
        """Called on any thread."""
        self._late.append((identity, token, reply))
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            pass  # it is awake already
        except OSError:
            logger.debug("an answer came after the listener was closed")

    def _send_late_answers(self) -> None:
        self._woken.recv(4096)
        while self._late:
            self._count(answered=1)
            self._send(*self._late.popleft())


def _address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "unknown"


def _busy(name: str, reason: str) -> bytes:
    return encode_envelope(
        Envelope(
            kind=Kind.BUSY,
            engine=name,
            incarnation="-",
            protocol_min=0,
            protocol_max=0,
            protocol=0,
            digest=b"",
            facts=(),
            reason=reason,
        )
    )
