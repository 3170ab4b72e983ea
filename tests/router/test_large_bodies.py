"""However large a body is, the router's loop goes on, its bytes are held once, and workers get them unchanged."""

import asyncio
import json
import os
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.router.settings import PolicyName, RouterSettings
from kvferry.web import body_fields
from tests.harness.loop_monitor import HELD_S, LoopMonitor
from tests.harness.resident import resident_mib
from tests.harness.scripted_worker import Asked, Worker, decode_script, fleet, prefill_script
from tests.harness.until import until_async

SETTINGS = RouterSettings(
    health_every_s=0.05, connect_timeout_s=1.0, restart_wait_s=0, prefill_policy=PolicyName.PREFIX_AWARE
)


@dataclass
class Sink(Worker):
    """A scripted worker that keeps of a long body only its size, its digest and its first bytes."""

    got: list[tuple[int, str, bytes]] = field(default_factory=list)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        size, digest, begin = 0, sha256(), b""
        while chunk := await request.content.readany():
            for start in range(0, len(chunk), 1 << 16):
                digest.update(chunk[start : start + (1 << 16)])
                await asyncio.sleep(0)
            size, begin = size + len(chunk), (begin + chunk)[:200]
        self.got.append((size, digest.hexdigest(), begin))
        asked = Asked(request.path, b'{"stream":%s}' % (b"true" if b'"stream":true' in begin else b"false"), {}, 0.0)
        return await self.script(request, asked)


def a_fleet(mode: str) -> tuple[Sink, Sink]:
    return Sink("p0", prefill_script, "prefill", mode), Sink("d0", decode_script, "decode", mode)


async def _in_pieces(raw: bytes) -> AsyncIterator[bytes]:
    """The client shares the router's loop, so it must not hold it, either."""
    for start in range(0, len(raw), 1 << 16):
        yield raw[start : start + (1 << 16)]
        await asyncio.sleep(0)


async def post(url: str, raw: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url + path, data=_in_pieces(raw)) as response:
        return response.status, await response.read()


def ids(num_bytes: int, head: bytes = b'{"stream":true,') -> bytes:
    return head + b'"max_tokens":5,"prompt":[' + b", ".join([b"17"] * (num_bytes // 4)) + b"]}"


TEXT = b"the cat and a hat "
BODIES: dict[str, tuple[str, bytes, int]] = {
    "31 MB of ids": ("/v1/completions", ids(31 << 20), 200),
    "31 MB of ids at once": ("/v1/completions", ids(31 << 20, b'{"stream":false,'), 200),
    "20 MB of words": ("/v1/completions", b'{"stream":true,"prompt":"' + TEXT * (20 << 16) + b'"}', 200),
    "20 MB of chat": (
        "/v1/chat/completions",
        b'{"stream":true,"messages":[{"role":"user","content":"' + TEXT * (20 << 16) + b'"}]}',
        200,
    ),
    "a chat of 20,000": (
        "/v1/chat/completions",
        b'{"stream":true,"messages":[' + b",".join([b'{"role":"user","content":"Hi"}'] * 20_000) + b"]}",
        200,
    ),
    "a chat of a million": (
        "/v1/chat/completions",
        b'{"stream":true,"messages":[' + b",".join([b'{"role":"user","content":"Hi"}'] * 900_000) + b"]}",
        400,
    ),
    "deep JSON": ("/v1/completions", b'{"prompt":"a","x":' + b"[" * 5_000_000, 400),
    "a long name of a model": ("/v1/completions", b'{"prompt":"a","model":"' + b"x" * (20 << 20) + b'"}', 400),
    "a prompt that is an object": ("/v1/completions", b'{"prompt":{"a":"' + b"x" * (20 << 20) + b'"}}', 400),
}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_the_loop(name: str, mode: str) -> None:
    path, raw, status = BODIES[name]
    async with fleet(*a_fleet(mode), settings=SETTINGS) as (url, _):
        with LoopMonitor():
            assert (await post(url, raw, path))[0] == status


async def test_without_the_scanner_ids_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_fields, "SMALL_BYTES", 1 << 30)
    async with fleet(*a_fleet("pull"), settings=SETTINGS) as (url, _):
        with pytest.raises(AssertionError, match="was held"), LoopMonitor(within_s=HELD_S):
            await post(url, ids(31 << 20))


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_workers_get_every_value_as_it_came(mode: str) -> None:
    p, d = a_fleet(mode)
    prompt = json.dumps(['é🙂\\"x' * 20_000, "y"], indent=3).encode()
    raw = b'{ "seed" : 1.50 ,"prompt":' + prompt + b', "echo" :false}'
    async with fleet(p, d, settings=SETTINGS) as (url, _):
        assert (await post(url, raw))[0] == 200
    expected = b'{"seed":1.50,"prompt":' + prompt + b',"echo":false}'
    assert p.got == []  # two prompts: decode computes both
    assert d.got == [(len(expected), sha256(expected).hexdigest(), expected[:200])]


async def test_an_answer_that_comes_before_the_whole_body_is_sent_is_passed_on() -> None:
    class Refusing(Sink):
        async def _post(self, request: web.Request) -> web.StreamResponse:
            return web.json_response({"error": {"message": "too long"}}, status=400)

    p = Refusing("p0", prefill_script, "prefill")
    async with fleet(p, a_fleet("pull")[1], settings=SETTINGS) as (url, _):
        assert await post(url, ids(8 << 20)) == (400, b'{"error": {"message": "too long"}}')
        assert (await post(url, b'{"prompt":"Hi"}'))[0] == 400  # the connection was not used again in the middle


async def test_eight_bodies_at_once_are_held_once_each_and_not_while_answers_stream() -> None:
    go_on = asyncio.Event()

    async def streams(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"text":"a"}]}\n\n')
        await go_on.wait()
        return response

    samples = [0.0]

    def held_mib() -> float:
        traced, _ = tracemalloc.get_traced_memory()
        samples.append(traced / (1 << 20) + resident_mib(os.getpid(), "RssShmem") - before_mib)
        return samples[-1]

    p, d = a_fleet("pull")
    d.script = streams
    raw, before_mib = ids(8 << 20), resident_mib(os.getpid(), "RssShmem")
    async with fleet(p, d, settings=SETTINGS) as (url, _):
        tracemalloc.start(1)
        try:
            asked = [asyncio.create_task(post(url, raw)) for _ in range(8)]
            await until_async(lambda: held_mib() and len(d.got) == 8, within_s=60)
            await until_async(lambda: held_mib() < 8, "bodies are forgotten")
            go_on.set()
            await asyncio.gather(*asked)
        finally:
            tracemalloc.stop()
    assert 32 < max(samples) < 8 * 8 * 1.5


async def test_more_bodies_than_are_held_at_once_are_503() -> None:
    small = RouterSettings(health_every_s=0.05, connect_timeout_s=1.0, max_body_bytes=100_000)
    hold = asyncio.Event()

    async def slow(request: web.Request, asked: Asked) -> web.StreamResponse:
        await hold.wait()
        return await prefill_script(request, asked)

    p, d = a_fleet("pull")
    p.script = slow
    raw = ids(99_000)
    async with fleet(p, d, settings=small) as (url, _):
        asked = [asyncio.create_task(post(url, raw)) for _ in range(body_fields.BODIES_HELD)]
        await until_async(lambda: len(p.got) == body_fields.BODIES_HELD)
        status, body = await post(url, raw)
        error: dict[str, Any] = json.loads(body)["error"]
        assert (status, error["code"]) == (503, "overloaded")
        assert "--max-body-bytes" in error["message"]
        assert (await asyncio.wait_for(post(url, b'{"prompt":3}'), 10))[0] == 400  # small bodies are read
        hold.set()
        assert sorted(one[0] for one in await asyncio.gather(*asked)) == [200] * body_fields.BODIES_HELD
        assert (await post(url, raw))[0] == 200  # what ended was given back
