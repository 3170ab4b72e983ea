"""Scripted workers that also report the stages of their requests, on clocks that are unrelated to ours."""

import asyncio
import time
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from kvferry.web.stages import TRACE_PATH, HandoffTotals, Stage, StageReport, TraceAnswer
from tests.harness.scripted_worker import PARAMS, Asked, Script, Worker

STREAM = b'data: {"choices":[{"text":"a"}]}\n\n'


@dataclass
class TracedWorker(Worker):
    """A clock that is `ahead_s` ahead of our monotonic clock."""

    ahead_s: float = 1000.0
    totals: dict[str, HandoffTotals] = field(default_factory=dict)
    reports: dict[str, StageReport] = field(default_factory=dict)
    num_traces: int = 0

    def now_s(self) -> float:
        return time.monotonic() + self.ahead_s

    def routes(self) -> list[web.RouteDef]:
        return [web.get(TRACE_PATH, self._trace), *super().routes()]

    async def _trace(self, request: web.Request) -> web.Response:
        received_s = self.now_s()
        self.num_traces += 1
        answer = TraceAnswer(
            engine=self.name,
            incarnation="i1",
            received_s=received_s,
            now_s=self.now_s(),
            requests=tuple(self.reports[one] for one in request.query.getall("request", []) if one in self.reports),
            handoffs=self.totals,
        )
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def run_stages(self, asked: Asked, *stages: tuple[str, float], tokens: int = 1) -> None:
        """Takes this long for each stage, and records it."""
        begun_s = at_s = self.now_s()
        taken = []
        for name, seconds in stages:
            await asyncio.sleep(seconds)
            taken.append(Stage(name, at_s, self.now_s()))
            at_s = taken[-1].end_s
        request_id = asked.headers["x-request-id"]
        self.reports[request_id] = StageReport(
            request_id=request_id, received_s=begun_s, began_s=at_s, ended_s=at_s + 60.0, status=200,
            stages=tuple(taken), num_tokens=tokens, bytes=3_000_000, runs=12, transfer_s=0.002,
        )  # fmt: skip


def a_prefill(name: str, *stages: tuple[str, float], **more: object) -> TracedWorker:
    """Returns a prefill worker that takes this long for each of its stages."""

    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        await worker.run_stages(asked, *stages)
        body = b'{"object":"text_completion","choices":[{"finish_reason":"length","text":"a"}],"kv_transfer_params":%s}'
        params = PARAMS.replace(b'"p0"', b'"%s"' % name.encode())
        return web.Response(body=body % params, content_type="application/json")

    worker = TracedWorker(name, script, "prefill", **more)  # type: ignore[arg-type]
    return worker


def a_decode(name: str, *stages: tuple[str, float], hold: asyncio.Event | None = None, **more: object) -> TracedWorker:
    """Returns a decode worker; with `hold`, its streams continue only after that is set."""

    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        await worker.run_stages(asked, *stages, tokens=2)
        handed = "507" if asked.body.get("kv_transfer_params") else "0"
        headers = {
            "x-kvferry-handed-over": handed,
            "x-kvferry-cached": "0",
            "x-kvferry-recomputed": str(512 - int(handed)),
        }
        if not asked.body.get("stream"):
            body = b'{"choices":[{"finish_reason":"length","text":"ab"}]}'
            return web.Response(body=body, content_type="application/json", headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        await response.write(STREAM)
        if hold is not None:
            await hold.wait()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    worker = TracedWorker(name, script, "decode", **more)  # type: ignore[arg-type]
    return worker


def refusing_script(status: int, message: str) -> Script:
    """Answers with an error, like `refusing` of the router's tests."""

    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status)

    return script
