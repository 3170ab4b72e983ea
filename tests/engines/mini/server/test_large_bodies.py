"""However large a body is, the worker's loop goes on: no callback holds it, and what cannot fit is 400 at once."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.engines.mini.models.tokenizer import Tokenizer
from kvferry.engines.mini.server import request_reader
from kvferry.engines.mini.server.request_reader import RequestReader
from kvferry.web import body_fields
from kvferry.web.listen import Listener
from tests.harness.loop_monitor import HELD_S, LoopMonitor
from tests.harness.scripted_engine import a_server
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until_async

CONTEXT = 2000
WORDS = "the cat and a hat "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(make_tiny_model(tmp_path_factory.mktemp("text") / "m"))


@asynccontextmanager
async def served(tokenizer: Tokenizer) -> AsyncIterator[str]:
    server = a_server(tokenizer=tokenizer, max_model_len=CONTEXT, vocab_size=320)  # type: ignore[arg-type]
    listener = Listener(server.app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    try:
        yield listener.url
    finally:
        await listener.stop()


def words(num_bytes: int) -> bytes:
    return b'{"max_tokens":2,"prompt":"' + WORDS.encode() * (num_bytes // len(WORDS)) + b'"}'


def ids(num_bytes: int) -> bytes:
    return b'{"max_tokens":2,"prompt":[' + b", ".join([b"17"] * (num_bytes // 4)) + b"]}"


def messages(number: int, content: str = "Hi") -> bytes:
    return json.dumps({"max_tokens": 2, "messages": [{"role": "user", "content": content}] * number}).encode()


BIAS = dict.fromkeys(map(str, range(60_000)), 1)
LONG = "context_length_exceeded"
BODIES: dict[str, tuple[str, bytes, int, str | None]] = {
    "5 MB of words": ("completions", words(5 << 20), 400, LONG),
    "20 MB of words": ("completions", words(20 << 20), 400, LONG),
    "31 MB of ids": ("completions", ids(31 << 20), 400, LONG),
    "many prompts": ("completions", json.dumps({"prompt": [WORDS * 500] * 300}).encode(), 400, None),
    "mixed ids": ("completions", b'{"prompt":[[' + b"1,2],[" * 400_000 + b"3]]}", 400, "body_too_complex"),
    "20 MB of chat": ("chat/completions", messages(1, WORDS * (20 << 16)), 400, LONG),
    "a chat of 4,000": ("chat/completions", messages(4_000), 400, LONG),
    "a chat of a million": ("chat/completions", messages(500_000), 400, "body_too_complex"),
    "a chat that just does not fit": ("chat/completions", messages(900), 400, LONG),
    "a huge logit_bias": ("completions", json.dumps({"prompt": "a", "logit_bias": BIAS}).encode(), 400, "out_of_range"),
    "many stop strings": (
        "completions", json.dumps({"prompt": "a", "stop": ["x"] * 100_000}).encode(), 400, "out_of_range",
    ),
    "deep JSON": ("completions", b'{"prompt":"a","x":' + b"[" * 5_000_000, 400, "invalid_json"),
    "a long field": ("completions", b'{"prompt":"a","suffix":"' + b"x" * (8 << 20) + b'"}', 400, None),
    "words that fit": ("completions", words(2200), 200, None),
    "ids that fit": ("completions", ids(4000), 200, None),
    "a chat that fits": ("chat/completions", messages(40), 200, None),
}  # fmt: skip


async def answers(url: str, endpoint: str, raw: bytes) -> tuple[int, str | None]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/{endpoint}", data=_in_pieces(raw)) as response,
    ):
        body: dict[str, Any] = await response.json()
    return response.status, body["error"]["code"] if response.status >= 400 else None


async def _in_pieces(raw: bytes) -> AsyncIterator[bytes]:
    """The client shares the server's loop, so it must not hold it, either."""
    for start in range(0, len(raw), 1 << 16):
        yield raw[start : start + (1 << 16)]
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_the_loop(tokenizer: Tokenizer, name: str) -> None:
    endpoint, raw, status, code = BODIES[name]
    async with served(tokenizer) as url:
        with LoopMonitor():
            assert await answers(url, endpoint, raw) == (status, code)


async def test_eight_large_bodies_at_once(tokenizer: Tokenizer) -> None:
    raw = ids(8 << 20)
    async with served(tokenizer) as url:
        with LoopMonitor():
            found = await asyncio.gather(*(answers(url, "completions", raw) for _ in range(8)))
    assert found == [(400, LONG)] * 8


async def test_the_loop_sleeps_after_each_piece_of_a_long_body(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the pieces the engine's thread gets the interpreter: else streams stand while a body is read."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def record(delay: float) -> None:
        pauses.append(delay)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", record)
    async with served(tokenizer) as url:
        await answers(url, "completions", ids(1 << 20))
    real = [pause for pause in pauses if pause == request_reader.PAUSE_S]
    assert len(real) >= (1 << 20) // body_fields.PIECE_BYTES


async def test_without_the_scanner_ids_hold_the_loop(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_fields, "SMALL_BYTES", 1 << 30)
    async with served(tokenizer) as url:
        with pytest.raises(AssertionError, match="was held"), LoopMonitor(within_s=HELD_S):
            await answers(url, "completions", ids(31 << 20))


async def test_without_other_threads_tokenising_holds_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reader, "INLINE_BYTES", 1 << 30)
    monkeypatch.setattr(RequestReader, "_check_chars", lambda *_: None)
    async with served(tokenizer) as url:
        with pytest.raises(AssertionError, match="was held"), LoopMonitor(within_s=HELD_S):
            await answers(url, "completions", words(500_000))


async def test_what_cannot_fit_is_never_tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised: list[int] = []

    def encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
        tokenised.append(len(text))
        return [17] * 3000

    monkeypatch.setattr(Tokenizer, "encode", encode)
    most = CONTEXT * 12  # the longest token is <|im_start|>
    assert tokenizer.max_chars_per_token == 12
    async with served(tokenizer) as url:
        for num_chars in (most + 1, most * 2, most * 13, 5 << 20):
            body = json.dumps({"prompt": "x" * num_chars}).encode()
            assert await answers(url, "completions", body) == (400, LONG)
        assert await answers(url, "chat/completions", messages(1, "x" * most)) == (400, LONG)
        assert tokenised == []
        monkeypatch.setattr(RequestReader, "_check_chars", lambda *_: None)  # without the guard it is
        monkeypatch.setattr(RequestReader, "_check_sizes", lambda *_: None)
        assert await answers(url, "completions", json.dumps({"prompt": "x" * most * 13}).encode()) == (400, LONG)
        assert tokenised == [most * 13]


async def test_a_client_that_hangs_up_ends_its_work_between_two_steps(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering, go_on, tokenised = threading.Event(), threading.Event(), list[str]()
    gone, chat = asyncio.Event(), RequestReader.chat

    async def watched(self: RequestReader, request: web.Request) -> Any:
        try:
            return await chat(self, request)
        except asyncio.CancelledError:
            gone.set()
            raise

    def encode(self: Tokenizer, text: str, **_: object) -> list[int]:
        tokenised.append(text)
        return [17]

    def render(self: Tokenizer, *_: object) -> str:
        rendering.set()
        go_on.wait(10)
        return "text"

    monkeypatch.setattr(Tokenizer, "render_chat", render)
    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(RequestReader, "chat", watched)
    async with served(tokenizer) as url:
        asked = asyncio.create_task(answers(url, "chat/completions", messages(100)))
        await until_async(rendering.is_set)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await asyncio.wait_for(gone.wait(), 10)
        go_on.set()
        assert await answers(url, "completions", ids(4000)) == (200, None)
    assert tokenised == []
