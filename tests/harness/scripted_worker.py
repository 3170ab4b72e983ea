"""Workers that answer HTTP from a script and record the requests that they got, for tests of the router."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from kvferry.router.app import Router
from kvferry.router.settings import RouterSettings
from kvferry.web.listen import Listener
from tests.harness.scripted_server import ScriptedServer

if TYPE_CHECKING:
    from tests.harness.scripted_vllm import VllmServer

PARAMS = b'{"remote_block_ids":[[1,2]],  "remote_engine_id":"p0","odd":1.50,"transfer_mode":"pull"}'
"""Odd spacing and numbers on purpose: decode must get exactly these bytes."""
STREAM = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":"b"}]}\n\ndata: [DONE]\n\n'


@dataclass
class Asked:
    """One POST that a worker got."""

    path: str
    raw: bytes
    headers: dict[str, str]
    at_s: float
    cancelled: bool = False

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = msgspec.json.decode(self.raw)
        return body


Script = Callable[[web.Request, Asked], Awaitable[web.StreamResponse]]


async def prefill_script(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Answers with one token and the parameters."""
    body = b'{"object":"text_completion","choices":[{"finish_reason":"length","text":"a"}],"kv_transfer_params":%s}'
    return web.Response(body=body % PARAMS, content_type="application/json")


async def decode_script(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Answers with a short text, streamed if that was asked for."""
    headers = {"x-kvferry-handed-over": "5", "x-kvferry-cached": "0", "x-kvferry-recomputed": "1", "x-secret": "1"}
    if not asked.body.get("stream"):
        body = b'{"choices":[{"finish_reason":"length","text":"ab"}], "n":1.0}'
        return web.Response(body=body, content_type="application/json", headers=headers)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
    await response.prepare(request)
    await response.write(STREAM[:20])
    await response.write(STREAM[20:])
    await response.write_eof()
    return response


@dataclass
class Worker(ScriptedServer):
    """A scripted worker. `info` is what it reports of itself; None means 404."""

    name: str
    script: Script
    role: str
    mode: str = "pull"
    info: dict[str, Any] | None = None
    asked: list[Asked] = field(default_factory=list)
    released: list[dict[str, Any]] = field(default_factory=list)
    """The hand-offs that the router gave up."""
    deaf: bool = False
    """True if it answers no health check, like a process that is stopped."""
    num_checks: int = 0
    blocks: bytes = b""
    """The answer of GET /v1/kvferry/blocks."""
    met: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.info = {
            "engine": self.name,
            "incarnation": "i1",
            "role": self.role,
            "mode": self.mode,
            "side_channel": {"host": "10.0.0.1", "port": 77},
            "model": "tiny",
            "state": "ready",
            "unknown": [1],
        }

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/kvferry", self._describe),
            web.get("/v1/kvferry/blocks", self._blocks),
            web.post("/v1/kvferry/release", self._release),
            web.post("/v1/kvferry/meet", self._tell_decode),
            web.post("/v1/{rest:.*}", self._post),
        ]

    async def _describe(self, _: web.Request) -> web.Response:
        self.num_checks += 1
        if self.deaf:
            await asyncio.Event().wait()
        return web.Response(status=404) if self.info is None else web.json_response(self.info)

    async def _release(self, request: web.Request) -> web.Response:
        self.released.append(await request.json())
        return web.json_response({"released": True})

    async def _blocks(self, _: web.Request) -> web.Response:
        return web.Response(body=self.blocks)

    async def _tell_decode(self, request: web.Request) -> web.Response:
        self.met.append(await request.json())
        return web.json_response({"state": "accepted"})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        at_s = time.monotonic()
        asked = Asked(request.path, await request.read(), {k.lower(): v for k, v in request.headers.items()}, at_s)
        self.asked.append(asked)
        try:
            return await self.script(request, asked)
        except asyncio.CancelledError:
            asked.cancelled = True
            raise


def a_prefill(name: str = "p0", script: Script = prefill_script, **more: Any) -> Worker:
    return Worker(name, script, "prefill", **more)


def a_decode(name: str = "d0", script: Script = decode_script, **more: Any) -> Worker:
    return Worker(name, script, "decode", **more)


FAST = RouterSettings(health_every_s=0.05, connect_timeout_s=1.0, restart_wait_s=0)


@asynccontextmanager
async def routing(router: Router) -> AsyncIterator[str]:
    """Starts to listen, and returns its address."""
    listener = Listener(router.app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    try:
        yield listener.url
    finally:
        await listener.stop()


@asynccontextmanager
async def fleet(*workers: "Worker | VllmServer", settings: RouterSettings = FAST) -> AsyncIterator[tuple[str, Router]]:
    """Yields the address of a router in front of the workers. Workers with port 1 are not started."""
    for worker in workers:
        if worker.port != 1:
            await worker.start()
    prefill = [worker.url for worker in workers if worker.role == "prefill"]
    decode = [worker.url for worker in workers if worker.role != "prefill"]
    router = Router(prefill, decode, settings)
    try:
        async with routing(router) as url:
            yield url, router
    finally:
        for worker in workers:
            await worker.stop()


def refusing(status: int, message: str = "no room", code: str | None = None) -> Script:
    """Answers with this status each time, and an OpenAI error body."""

    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": message, "type": "x", "param": None, "code": code}}, status=status
        )

    return script


async def cutting(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Closes the connection without an answer, as a process that dies does."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError("never woken")


async def hanging(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError("never woken")
