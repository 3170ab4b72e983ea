"""The router's HTTP/1.1 connections to workers. Each carries one request at a time and is kept for the next one.

This client is written by hand because the client is half of what a request costs: a request through aiohttp's client
takes about 150 us of processor time, and about 50 us here (`python -m benchmarks.router`). aiohttp remains the server,
and the client for everything rare.

Life of a connection: IDLE (in the pool) -> BUSY (a request was sent; one task reads its answer) -> IDLE again if the
whole answer was read and the worker keeps the connection, else closed. Closing it aborts the request at the worker.
"""

import asyncio
import ssl
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from kvferry.router.upstream.http1_parse import BadAnswer, ResponseParser
from kvferry.web.body_fields import Parts

__all__ = ["Connection", "Pool", "Unreachable"]

_HIGH_BYTES = 256 << 10
"""Once this much of an answer is waiting for the client, no more of it is read from the worker."""
_PIECE_BYTES = 64 << 10
"""The longest piece in which a request's body is sent."""
_PIECES_AT_ONCE = 16
"""After this many pieces the loop serves others, even if the worker would take more at once."""
_IDLE_S = 4.0
"""Seconds after which an idle connection is closed. uvicorn, in front of vLLM, does so after 5 s; closing first avoids
sending a request on a connection that is being closed."""
_MAX_IDLE = 512
"""The number of idle connections that are kept per worker."""


class Unreachable(OSError):
    """There is no connection, so the worker has not seen the request."""


class Connection(asyncio.Protocol):
    """One connection. One task at a time calls its methods, on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.idle_since_s = 0.0
        self.parser = ResponseParser()
        self.parser.complete = True  # no request was sent yet: an answer that comes now is an error
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._paused = False
        self._unsent: Parts = deque()
        self._full = False

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed(data)
        except BadAnswer as error:
            self.fail(error)
            return
        if self.parser.size > _HIGH_BYTES and not self._paused and not self.parser.complete:
            self._pause_if_full()
        self._wake()

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            try:
                self.parser.feed_end()
            except BadAnswer as broken:
                error = broken
        if error is not None and self._failure is None:
            self._failure = error
        self._transport = None
        self._unsent.clear()
        self._wake()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._send_more()

    # ---- one request ----

    def send(self, head: bytes, body: Parts) -> None:
        """Sends a request and prepares for its answer. The connection must be usable.

        Parts are taken out of `body` as they are sent. A long body is sent in pieces, as fast as the worker takes them,
        so that no copy of it waits in the transport.
        """
        assert self._transport is not None, "the pool hands out usable connections only"
        self.parser = ResponseParser()
        self._failure = None
        if sum(map(len, body)) <= _PIECE_BYTES:
            self._transport.writelines((head, *body))
            body.clear()
            return
        self._transport.write(head)
        self._unsent = body
        self._send_more()

    def _send_more(self) -> None:
        for _ in range(_PIECES_AT_ONCE):
            if not self._unsent or self._full or self._transport is None or self._transport.is_closing():
                return
            part = memoryview(self._unsent.popleft())
            if len(part) > _PIECE_BYTES:
                self._unsent.appendleft(part[_PIECE_BYTES:])
            self._transport.write(part[:_PIECE_BYTES])
        self._loop.call_soon(self._send_more)

    async def head(self) -> None:
        """Waits until `parser` has status and headers. Raises BadAnswer, OSError, or the error given to `fail`."""
        while not self.parser.status:
            await self.wait()

    async def wait(self) -> None:
        """Waits until there is more to take or the answer is complete. Raises the same errors as `head`."""
        if self._failure is not None:
            raise self._failure
        if self._paused and self._transport is not None:  # a reader of the whole body takes nothing before its end
            self._paused = False
            self._transport.resume_reading()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> bytes:
        """Returns what has arrived of the body since the last call."""
        parts = self.parser.parts
        taken = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return taken

    def fail(self, error: Exception) -> None:
        """Ends the current wait, and every later one, with this error. The connection cannot be used any more."""
        if self._failure is None:
            self._failure = error
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def close(self) -> None:
        """Closes it now, whatever is still being transferred."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        """True if it can take a request."""
        return self._transport is not None and not self._transport.is_closing() and self._failure is None

    @property
    def reusable(self) -> bool:
        """True if its answer is complete and was taken, and the worker keeps the connection."""
        parser = self.parser
        return self.usable and parser.complete and parser.keep_alive and not parser.parts and not self._unsent

    def _pause_if_full(self) -> None:
        if sum(map(len, self.parser.parts)) > _HIGH_BYTES and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Pool:
    """The connections to all workers. It is used on the event loop."""

    def __init__(self) -> None:
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)
        self._addresses: dict[str, _Address] = {}
        self._tls: ssl.SSLContext | None = None
        self._open: set[Connection] = set()

    async def acquire(self, url: str, connect_timeout_s: float) -> Connection:
        """Returns a usable connection to the worker at `url`. Raises Unreachable or TimeoutError."""
        loop = asyncio.get_running_loop()
        idle = self._idle.get(url)
        while idle:
            connection: Connection = idle.pop()  # the latest one: the others age and are closed
            if connection.usable and loop.time() - connection.idle_since_s < _IDLE_S:
                return connection
            self.drop(connection)
        address = self._address(url)
        context = self._context() if address.tls else None
        try:
            async with asyncio.timeout(connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), address.host, address.port, ssl=context, **address.race
                )
        except TimeoutError:
            raise
        except OSError as error:
            cause = error.strerror or str(error) or type(error).__name__
            raise Unreachable(f"cannot connect: {cause}") from error
        self._open.add(connection)
        return connection

    def release(self, url: str, connection: Connection) -> None:
        """Takes a connection back: it is kept if it can be reused, else closed."""
        idle = self._idle[url]
        if not connection.reusable or len(idle) >= _MAX_IDLE:
            self.drop(connection)
            return
        connection.idle_since_s = asyncio.get_running_loop().time()
        idle.append(connection)
        # A connection that is too old is closed by the next request, or here: at most two for each that comes back.
        for _ in range(2):
            if len(idle) > 1 and connection.idle_since_s - idle[0].idle_since_s > _IDLE_S:
                self.drop(idle.pop(0))

    def drop(self, connection: Connection) -> None:
        """Closes a connection."""
        self._open.discard(connection)
        connection.close()

    def stop(self) -> None:
        """Closes every connection."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()

    def request_head(self, url: str, path: str, num_bytes: int, headers: Mapping[str, str]) -> bytes:
        """Returns the head of a POST. Raises ValueError for a header with a line break, which could smuggle in another
        request."""
        address = self._address(url)
        first = f"POST {address.prefix}{path} HTTP/1.1\r\n".encode()
        lines = [first, address.host_line, b"Content-Length: %d\r\n" % num_bytes]
        for name, value in headers.items():
            line = f"{name}: {value}".encode("utf-8", "surrogateescape")
            if b"\r" in line or b"\n" in line or b"\0" in line:
                raise ValueError(f"the header {name!r} has a line break in it")
            lines.append(line + b"\r\n")
        return b"".join((*lines, b"\r\n"))

    def _address(self, url: str) -> "_Address":
        found = self._addresses.get(url)
        if found is None:
            found = self._addresses[url] = _Address.of(url)
        return found

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


@dataclass(frozen=True, slots=True)
class _Address:
    """The parts of a worker's address."""

    host: str
    port: int
    tls: bool
    prefix: str
    """The prefix of every path."""
    host_line: bytes
    race: dict[str, Any]
    """Happy-eyeballs options (RFC 8305), for a name that may have several addresses. They are left out for an IP
    address, because the race costs more than the connection itself."""

    @classmethod
    def of(cls, url: str) -> "_Address":
        parts = urlsplit(url)
        assert parts.hostname is not None, "addresses of workers are checked when they are added"
        tls = parts.scheme == "https"
        host_line = f"Host: {parts.netloc.rpartition('@')[2]}\r\n".encode()
        is_name = not all(char in "0123456789.:abcdef" for char in parts.hostname)
        port = parts.port or (443 if tls else 80)
        return cls(
            parts.hostname,
            port,
            tls,
            parts.path.rstrip("/"),
            host_line,
            {"happy_eyeballs_delay": 0.25} if is_name else {},
        )
