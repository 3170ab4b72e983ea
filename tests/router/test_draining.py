"""SIGTERM of a router: open requests end whole, new ones are refused with a reason, and what is cut says so."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.router.app import Router
from kvferry.router.observe.observer import Field
from kvferry.router.settings import RouterSettings
from tests.harness.scripted_worker import (
    STREAM,
    Asked,
    Script,
    a_decode,
    a_prefill,
    decode_script,
    fleet,
    prefill_script,
)
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post

both_modes = pytest.mark.parametrize("mode", ["pull", "push"])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])
PATIENT = RouterSettings(health_every_s=0.05, drain_timeout_s=60.0)
IMPATIENT = RouterSettings(health_every_s=0.05, drain_timeout_s=0.05)
FIRST = 34
"""The first event of STREAM."""


class Log:
    """An observer: every event's name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_event(self, dispatch: int, name: str, at_s: float, fields: Mapping[str, Field]) -> None:
        self.names.append(name)

    def worker_headers(self, dispatch: int, stage: str) -> Mapping[str, str]:
        return {}

    def named(self, name: str) -> int:
        return self.names.count(name)


def held(go_on: asyncio.Event, then: Script, sent: bytes = b"") -> Script:
    """Waits before it answers; a stream after `sent`."""

    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        if not (sent and asked.body.get("stream")):
            await go_on.wait()
            return await then(request, asked)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sent)
        await go_on.wait()
        await response.write(STREAM[len(sent) :])
        await response.write_eof()
        return response

    return script


async def drained(router: Router) -> None:
    async with asyncio.timeout(20):
        await router.draining.wait_ended()


async def health(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        return response.status, await response.json()


@both_modes
async def test_32_open_streams_and_requests_in_prefill_end_whole(mode: str) -> None:
    go_on = asyncio.Event()
    p = a_prefill(mode=mode)
    d = a_decode(script=held(go_on, decode_script, STREAM[:FIRST]), mode=mode)
    async with fleet(p, d, settings=PATIENT) as (url, router):
        asking = [asyncio.create_task(post(url, {**BODY, "stream": True})) for _ in range(32)]
        await until_async(lambda: len(d.asked) == 32)
        p.script = held(go_on, prefill_script)
        asking += [asyncio.create_task(post(url, {**BODY, "stream": bool(i % 2)})) for i in range(8)]
        await until_async(lambda: len(p.asked) == 40)
        router.draining.begin("SIGTERM")
        assert router.draining.num_open == 40
        response, raw = await post(url, BODY)
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert json.loads(raw)["error"]["code"] == "draining"
        assert response.headers["Connection"] == "close"
        assert await health(url) == (503, {"status": "unavailable", "reason": "draining"})
        go_on.set()
        await drained(router)
        answers = await asyncio.gather(*asking)
    assert [response.status for response, _ in answers] == [200] * 40
    assert all(
        raw.endswith(b"data: [DONE]\n\n") for response, raw in answers if "event-stream" in response.content_type
    )
    assert b"error" not in b"".join(raw for _, raw in answers)


async def test_a_request_that_waits_for_room_is_open_too() -> None:
    p, d = a_prefill(), a_decode()
    assert d.info is not None
    d.info |= {"limits": {"block_tokens": 16, "blocks": 100}, "room": {"free_blocks": 0}}
    async with fleet(p, d, settings=PATIENT) as (url, router):
        asking = asyncio.create_task(post(url, BODY))
        await until_async(lambda: router.context.admission.num_waiting == 1)
        router.draining.begin("SIGTERM")
        d.info["room"] = {"free_blocks": 100}
        await drained(router)
        assert (await asking)[0].status == 200


@both_modes
@streamed_or_not
@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_what_is_cut_says_so(mode: str, stream: bool, where: str) -> None:
    never = asyncio.Event()
    p, d = a_prefill(mode=mode), a_decode(script=held(never, decode_script, STREAM[:FIRST]), mode=mode)
    if where == "prefill":
        p.script, d.script = held(never, prefill_script), held(never, decode_script)
    async with fleet(p, d, settings=IMPATIENT) as (url, router):
        router.observers.add(log := Log())
        asking = asyncio.create_task(post(url, {**BODY, "stream": stream}))
        await until_async(lambda: bool(p.asked if where == "prefill" else d.asked))
        if stream and where == "decode":
            await until_async(lambda: bool(log.named("first_byte")))
        router.draining.begin("SIGTERM")
        await drained(router)
        response, raw = await asking
        await until_async(lambda: all(worker.num_open == 0 for worker in router.fleet.workers))
    if response.status == 200:
        assert (stream, where) == (True, "decode")
        assert raw.startswith(STREAM[:FIRST])
        raw = raw[FIRST:].strip().removeprefix(b"data: ")
    else:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
    error = json.loads(raw)["error"]
    assert error["code"] == "stopping"
    assert "--drain-timeout" in error["message"]


@both_modes
async def test_a_server_that_stops_at_once_tells_its_streams(mode: str) -> None:
    """SIGINT, or a second SIGTERM: no drain, but no silent end either."""
    d = a_decode(script=held(asyncio.Event(), decode_script, STREAM[:FIRST]), mode=mode)
    async with fleet(a_prefill(mode=mode), d, settings=PATIENT) as (url, router):
        router.observers.add(log := Log())
        asking = asyncio.create_task(post(url, {**BODY, "stream": True}))
        await until_async(lambda: bool(log.named("first_byte")))
    response, raw = await asking
    assert response.status == 200
    assert json.loads(raw[FIRST:].strip().removeprefix(b"data: "))["error"]["code"] == "stopping"
