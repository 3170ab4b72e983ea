"""The client of `benchmarks.router`: minimal HTTP/1.1 over asyncio, so that it costs less than any router."""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import PeerLost

__all__ = ["Client", "Reply", "Target", "closed_loop", "open_loop", "percentile", "request_bytes"]

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, and when its parts came, in seconds after the request was sent."""

    status: int
    first_byte_s: float
    """Until the first byte of the body."""
    total_s: float
    body: bytes


Target = tuple[str, int]
"""Host and port."""


def request_bytes(target: Target, path: str, body: bytes, method: str = "POST") -> bytes:
    """Returns the bytes of a whole request."""
    host, port = target
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
    if method == "POST":
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


class Client(asyncio.Protocol):
    """One connection that is kept open, for one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._got: list[bytes] = []
        self._body_at = -1
        self._length: int | None = None
        self._size = 0
        self._tail = b""
        self._sent_s = 0.0
        self._first_s = 0.0

    @classmethod
    async def connect(cls, target: Target) -> "Client":
        """Opens a connection. Raises OSError."""
        _, client = await asyncio.get_running_loop().create_connection(cls, *target)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream connection"
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PeerLost(f"the connection ended in the middle of an answer: {error!r}"))

    def send(self, request: bytes) -> asyncio.Future[Reply]:
        """Sends a request; the future has the whole answer, or raises PeerLost if the connection ends before that."""
        assert self._transport is not None, "connected"
        self._got.clear()
        self._body_at, self._length, self._size, self._tail = -1, None, 0, b""
        self._answer = asyncio.get_running_loop().create_future()
        self._sent_s = time.perf_counter()
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        """Ends the connection."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._got.append(data)
        self._size += len(data)
        if self._body_at < 0:
            whole = data if len(self._got) == 1 else b"".join(self._got)
            end = whole.find(b"\r\n\r\n")
            if end < 0:
                return
            self._got[:] = [whole]
            self._body_at = end + 4
            head = whole[:end]
            if _CHUNKED.search(head) is None:
                found = _LENGTH.search(head)
                self._length = end + 4 + int(found[1] if found else 0)
        if self._first_s < self._sent_s and self._size > self._body_at:
            self._first_s = time.perf_counter()
        if self._length is not None:
            if self._size >= self._length:
                self._finish()
        else:
            self._tail = (self._tail + data)[-5:] if len(data) < 5 else data[-5:]
            if self._tail == b"0\r\n\r\n":  # no event of the scripted workers ends like that
                self._finish()

    def _finish(self) -> None:
        now_s = time.perf_counter()
        whole = self._got[0] if len(self._got) == 1 else b"".join(self._got)
        reply = Reply(
            int(whole[9:12]),
            (self._first_s if self._first_s >= self._sent_s else now_s) - self._sent_s,
            now_s - self._sent_s,
            whole[self._body_at :],
        )
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(reply)


async def closed_loop(target: Target, requests: Sequence[bytes], num_clients: int, for_s: float) -> list[Reply]:
    """Runs `num_clients` connections for about `for_s` seconds; each sends its next request after an answer.

    `requests` are sent one after the other as one turn: its reply is that of the last one, with the times of the whole
    turn. Raises PeerLost.
    """
    clients = [await Client.connect(target) for _ in range(num_clients)]
    ends_s = time.perf_counter() + for_s
    replies: list[Reply] = []

    async def work(client: Client) -> None:
        while time.perf_counter() < ends_s:
            replies.append(await _turn(client, requests))

    try:
        await asyncio.wait_for(asyncio.gather(*map(work, clients)), for_s + _TIMEOUT_S)
    finally:
        for client in clients:
            client.close()
    return replies


async def open_loop(
    targets: Sequence[Target], requests: Sequence[bytes], rate: float, for_s: float, max_open: int = 512
) -> list[Reply]:
    """Starts turns at an even rate, whether or not earlier ones have ended. `targets`: one per request of the turn."""
    idle: list[list[Client]] = []
    replies: list[Reply] = []
    open_turns: set[asyncio.Task[None]] = set()

    async def work() -> None:
        clients = idle.pop() if idle else [await Client.connect(target) for target in targets]
        first, total = 0.0, 0.0
        for client, request in zip(clients, requests, strict=True):
            reply = await client.send(request)
            first, total = total + reply.first_byte_s, total + reply.total_s
        replies.append(Reply(reply.status, first, total, reply.body))
        idle.append(clients)

    begin_s = time.perf_counter()
    for index in range(int(rate * for_s)):
        ahead_s = begin_s + index / rate - time.perf_counter()
        if ahead_s > 0:
            await asyncio.sleep(ahead_s)
        if len(open_turns) < max_open:
            task = asyncio.create_task(work())
            open_turns.add(task)
            task.add_done_callback(open_turns.discard)
    await asyncio.wait_for(asyncio.gather(*open_turns), _TIMEOUT_S)
    for clients in idle:
        for client in clients:
            client.close()
    return replies


async def _turn(client: Client, requests: Sequence[bytes]) -> Reply:
    first, total = 0.0, 0.0
    for request in requests:
        reply = await client.send(request)
        first, total = total + reply.first_byte_s, total + reply.total_s
    return Reply(reply.status, first, total, reply.body)


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the value below which this many percent of the values lie; nan for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else float("nan")
