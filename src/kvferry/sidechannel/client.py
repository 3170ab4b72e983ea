"""The client: many concurrent handshakes on one thread of the caller, none of which waits for another.

Every question has its own socket, which is closed after its answer or its timeout: a peer that is dead or refused
leaves nothing behind.
"""

import time
from collections import deque
from dataclasses import dataclass

import zmq

from kvferry.clock import Clock, MonotonicClock
from kvferry.errors import ConfigError, FerryError, MalformedMessage, PeerLost
from kvferry.settings import SideChannelSettings
from kvferry.sidechannel.shared_key import load_key, require_key

__all__ = ["MAX_IN_FLIGHT", "SideChannelClient"]

MAX_IN_FLIGHT = 256
"""The largest number of questions with an open socket. Others wait; their timeout starts when they are sent."""


@dataclass(slots=True)
class _Asked:
    socket: "zmq.Socket[bytes]"
    token: int
    address: str
    deadline_s: float


class SideChannelClient:
    """Asks peers. Not thread-safe: one thread calls all methods. `ask_nowait` and `poll` never block."""

    def __init__(self, settings: SideChannelSettings, *, clock: Clock | None = None) -> None:
        """Loads the key. Raises ConfigError if it cannot be read."""
        self._settings = settings
        self._key = load_key(settings)
        self._clock = clock or MonotonicClock()
        self._context = zmq.Context()
        self._context.linger = 0
        self._poller = zmq.Poller()
        self._asked: dict[zmq.Socket[bytes], _Asked] = {}
        self._waiting: deque[tuple[str, int, bytes, int]] = deque()
        self._done: list[tuple[int, bytes | FerryError]] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._asked) + len(self._waiting) + len(self._done)

    def ask_nowait(self, host: str, port: int, body: bytes, token: int) -> None:
        """Sends a question. `poll` returns its answer, or the error instead, with `token`. Never raises."""
        self._waiting.append((host, port, body, token))
        self._send_waiting()

    def poll(self) -> list[tuple[int, bytes | FerryError]]:
        """Returns the answers since the last call; PeerLost if there was none within settings.timeout_s. Never
        blocks."""
        if self._asked:
            for socket, _ in self._poller.poll(0):
                self._receive(self._asked[socket])
            now_s = self._clock.now_s()
            for asked in [asked for asked in self._asked.values() if now_s >= asked.deadline_s]:
                self._end(asked, self._no_answer(asked.address))
            self._send_waiting()
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> None:
        """Blocks until `poll` may return something, or for `timeout_s`. For command lines and tests."""
        if self._done:
            return
        if self._asked:
            soonest_s = min(asked.deadline_s for asked in self._asked.values()) - self._clock.now_s()
            self._poller.poll(max(0, int(1000 * min(timeout_s, soonest_s)) + 1))

    def ask(self, host: str, port: int, body: bytes, timeout_s: float | None = None) -> bytes:
        """Asks one question and waits for the answer. Raises the error that `poll` would return.

        Call it only if no other question is open.
        """
        assert not len(self), "ask() is only for a client that has no open question"
        self.ask_nowait(host, port, body, 0)
        end_s = time.monotonic() + (self._settings.timeout_s if timeout_s is None else timeout_s)
        while True:
            for _, reply in self.poll():
                if isinstance(reply, FerryError):
                    raise reply
                return reply
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                for asked in list(self._asked.values()):
                    self._end(asked, PeerLost(""))
                self._done.clear()
                raise self._no_answer(f"{host}:{port}")
            self.wait(left_s)

    def close(self) -> None:
        """Gives up all open questions, and leaves nothing behind. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for asked in list(self._asked.values()):
            self._end(asked, PeerLost(""))
        self._waiting.clear()
        self._done.clear()
        self._context.destroy(linger=0)

    def _send_waiting(self) -> None:
        while self._waiting and len(self._asked) < MAX_IN_FLIGHT:
            host, port, body, token = self._waiting.popleft()
            try:
                self._send(host, port, body, token)
            except FerryError as error:
                self._done.append((token, error))
            except zmq.ZMQError as error:
                self._done.append((token, PeerLost(f"cannot ask {host}:{port}: {error.strerror}")))

    def _send(self, host: str, port: int, body: bytes, token: int) -> None:
        require_key(self._key, host, "connect to it")
        if not 1 <= port <= 65535:
            raise ConfigError(f"side-channel port {port!r} of {host!r} is not a port; it must be between 1 and 65535")
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.maxmsgsize = self._settings.max_message_bytes
            socket.ipv6 = True
            socket.reconnect_ivl = 200
            if self._key is not None:
                socket.curve_serverkey = self._key.public
                socket.curve_publickey = self._key.public
                socket.curve_secretkey = self._key.secret
            plain = host.strip("[]")
            socket.connect(f"tcp://[{plain}]:{port}" if ":" in plain else f"tcp://{plain}:{port}")
            socket.send_multipart([token.to_bytes(8, "big"), body], zmq.NOBLOCK)
        except BaseException:
            socket.close(linger=0)
            raise
        deadline_s = self._clock.now_s() + self._settings.timeout_s
        self._asked[socket] = _Asked(socket, token, f"{host}:{port}", deadline_s)
        self._poller.register(socket, zmq.POLLIN)

    def _receive(self, asked: _Asked) -> None:
        try:
            frames = asked.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            self._end(asked, PeerLost(f"{asked.address}: {error.strerror}"))
            return
        if len(frames) == 2 and frames[0] == asked.token.to_bytes(8, "big"):
            self._end(asked, frames[1])
        else:
            self._end(asked, MalformedMessage(f"{asked.address} answered with {len(frames)} frames; expected 2"))

    def _end(self, asked: _Asked, result: bytes | FerryError) -> None:
        del self._asked[asked.socket]
        self._poller.unregister(asked.socket)
        asked.socket.close(linger=0)
        self._done.append((asked.token, result))

    def _no_answer(self, address: str) -> PeerLost:
        key = "with our key" if self._key is not None else "without a key"
        return PeerLost(
            f"{address} gave no answer to a handshake within side_channel.timeout_s={self._settings.timeout_s:g} "
            f"({key}). Is it running, is its port open, and does it use the same --key-file?"
        )
