"""The router's own HTTP/1.1 client: what it accepts as an answer, and what it refuses."""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.router.upstream.deadlines import Deadlines
from kvferry.router.upstream.http1 import Connection, Pool, Unreachable
from kvferry.router.upstream.http1_parse import BadAnswer, ResponseParser
from tests.harness.until import until_async

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ncontent-length: 11\r\n\r\nhello world"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\nX-A:  2 \r\n\r\n"
    b"5\r\nhello\r\n1;name=value\r\n \r\n005\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
)
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
ZERO = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"
UNTIL_END = b"HTTP/1.0 200 OK\r\n\r\nhello world"


def parsed(raw: bytes, cuts: list[int] | None = None, *, end: bool = False) -> ResponseParser:
    parser = ResponseParser()
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts or ())})
    for start, stop in itertools.pairwise(edges):
        parser.feed(raw[start:stop])
    if end:
        parser.feed_end()
    return parser


@pytest.mark.parametrize(
    ("raw", "status", "body", "kept"),
    [(LENGTH, 200, b"hello world", True), (CHUNKED, 200, b"hello world", True), (INTERIM, 200, b"hello world", True),
     (EMPTY, 204, b"", True), (ZERO, 429, b"", True)],
)  # fmt: skip
@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_an_answer_is_the_same_however_it_is_cut(
    raw: bytes, status: int, body: bytes, kept: bool, cuts: list[int]
) -> None:
    parser = parsed(raw, cuts)
    assert (parser.status, b"".join(parser.parts), parser.complete, parser.keep_alive) == (status, body, True, kept)
    assert parser.size == len(body)


def test_headers_are_lower_case_and_repeated_ones_are_joined() -> None:
    assert parsed(CHUNKED).headers == {"transfer-encoding": "chunked", "x-a": "1, 2"}


def test_an_answer_without_a_length_ends_with_the_connection_and_is_not_kept() -> None:
    parser = parsed(UNTIL_END)
    assert not parser.complete
    parser.feed_end()
    assert (b"".join(parser.parts), parser.complete, parser.keep_alive) == (b"hello world", True, False)


@pytest.mark.parametrize(("head", "kept"), [
    (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False), (b"HTTP/1.1 200 OK\r\nConnection: x, Close\r\n", False),
    (b"HTTP/1.0 200 OK\r\n", False), (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
])  # fmt: skip
def test_a_worker_says_whether_it_keeps_the_connection(head: bytes, kept: bool) -> None:
    assert parsed(head + b"Content-Length: 1\r\n\r\nx").keep_alive is kept


BAD = {
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "status": b"HTTP/1.1 20 OK\r\n\r\n",
    "switching": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "length beside chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "plus": b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\na",
    "no digits": "HTTP/1.1 200 OK\r\nContent-Length: ١\r\n\r\na".encode(),
    "huge": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
    "other coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "folded header": b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
    "space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 3\r\n\r\nabc",
    "bare line feed": b"HTTP/1.1 200 OK\r\nA: b\nContent-Length: 3\r\n\r\nabc",
    "too much": LENGTH + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "too much after chunks": CHUNKED + b"x",
    "chunk size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n",
    "0x": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n",
    "chunk longer than it says": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhello\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000,
    "endless size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 20_000,
    "endless trailer": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * 10_000,
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_answers_are_refused(name: str) -> None:
    with pytest.raises(BadAnswer):
        parsed(BAD[name], [100])


@pytest.mark.parametrize("raw", [b"", LENGTH[:20], LENGTH[:-1], CHUNKED[:-1], CHUNKED[:-30]])
def test_a_truncated_answer_is_an_error(raw: bytes) -> None:
    with pytest.raises(BadAnswer, match="closed"):
        parsed(raw, end=True)


@settings(deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6))
def test_arbitrary_bytes_are_at_worst_refused(raw: bytes, cuts: list[int]) -> None:
    for prefix in (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"):
        with suppress(BadAnswer):
            parsed(prefix + raw, cuts, end=True)


# ---- connections ----

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def a_worker(serve: Serve) -> AsyncIterator[tuple[str, Pool]]:
    """Yields the address of a server with this behaviour, and a pool."""
    pool = Pool()
    writers: list[asyncio.StreamWriter] = []

    async def serve_and_note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await serve(reader, writer)

    server = await asyncio.start_server(serve_and_note, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", pool
    finally:
        pool.stop()
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Returns one POST as a worker reads it: head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


async def ask(pool: Pool, url: str, body: bytes = b"{}") -> tuple[Connection, bytes]:
    connection = await pool.acquire(url, 5.0)
    connection.send(pool.request_head(url, "/v1/completions", len(body), {"X-Request-Id": "r"}), deque([body]))
    await connection.head()
    while not connection.parser.complete:
        await connection.wait()
    return connection, connection.take()


async def test_a_connection_is_used_again_and_a_prefix_of_the_address_is_kept() -> None:
    heads: list[bytes] = []
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        for _ in range(3):
            heads.append((await request(reader))[0])
            writer.write(LENGTH)
        writer.close()

    async with a_worker(serve) as (url, pool):
        url += "/base"
        for _ in range(3):
            connection, body = await ask(pool, url)
            assert body == b"hello world"
            pool.release(url, connection)
    assert num_connections == 1
    host = url.removeprefix("http://").removesuffix("/base").encode()
    assert heads[0].startswith(b"POST /base/v1/completions HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: 2\r\n")


async def test_a_connection_that_the_worker_closed_while_idle_is_not_used() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(LENGTH)
        writer.close()  # it promised to keep it open

    async with a_worker(serve) as (url, pool):
        for _ in range(3):
            connection, _ = await ask(pool, url)
            pool.release(url, connection)
            await until_async(lambda one=connection: not one.usable)  # type: ignore[misc]


async def test_an_unrequested_answer_never_answers_the_next_request() -> None:
    idle = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(LENGTH)
        await idle.wait()
        writer.write(LENGTH.replace(b"hello", b"HELLO"))

    async with a_worker(serve) as (url, pool):
        connection, body = await ask(pool, url)
        pool.release(url, connection)
        assert body == b"hello world"
        idle.set()
        await until_async(lambda: not connection.usable)
        idle.clear()
        other, body = await ask(pool, url)
        assert other is not connection
        assert body == b"hello world"
        idle.set()


async def test_an_old_idle_connection_is_closed_by_us_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.upstream.http1._IDLE_S", -1.0)
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await request(reader)
        writer.write(LENGTH)

    async with a_worker(serve) as (url, pool):
        for _ in range(2):
            connection, _ = await ask(pool, url)
            pool.release(url, connection)
    assert num_connections == 2
    assert not connection.usable


async def test_a_slow_client_makes_the_worker_wait() -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1

    async with a_worker(serve) as (url, pool):
        connection = await pool.acquire(url, 5.0)
        connection.send(pool.request_head(url, "/", 2, {}), deque([b"{}"]))
        await connection.head()
        transport = connection._transport
        assert transport is not None
        await until_async(lambda: not transport.is_reading(), "the connection reads no more")
        assert sum(map(len, connection.parser.parts)) < 8 << 20, "64 MiB are not held for a client that takes nothing"
        assert sent < 64
        taken = 0
        while not connection.parser.complete or connection.parser.parts:
            if not connection.parser.parts:
                await connection.wait()
            taken += len(connection.take())
        assert taken == 64 << 20


async def test_reading_a_whole_answer_does_not_stop_at_a_length() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (4 << 20))
        writer.write(b"x" * (4 << 20))

    async with a_worker(serve) as (url, pool):
        _, body = await asyncio.wait_for(ask(pool, url), 20)
        assert len(body) == 4 << 20


async def test_a_closed_port_is_unreachable() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with a_worker(serve) as (url, pool):
        pass
    with pytest.raises(Unreachable, match="cannot connect"):
        await pool.acquire(url, 5.0)


def test_a_header_cannot_smuggle_in_a_request() -> None:
    with pytest.raises(ValueError, match="line break"):
        Pool().request_head("http://h:1", "/", 0, {"X-Request-Id": "a\r\nTransfer-Encoding: chunked"})


# ---- deadlines ----


class Wait:
    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.num_due = 0

    def on_due(self) -> None:
        self.num_due += 1


async def test_a_deadline_fires_until_it_is_removed_and_others_do_not() -> None:
    deadlines = Deadlines(0.001)
    now_s = asyncio.get_running_loop().time()
    late, later = Wait(now_s - 1), Wait(now_s + 1000)
    deadlines.add(late)
    deadlines.add(later)
    await until_async(lambda: late.num_due > 1)
    deadlines.discard(late)
    num_due = late.num_due
    again = Wait(now_s)
    deadlines.add(again)
    await until_async(lambda: again.num_due > 0)
    assert (late.num_due, later.num_due) == (num_due, 0)
    deadlines.stop()
