"""Servers that answer as stock vLLM 0.32.0 with its NIXL connectors does: no /v1/kvferry, and a decode side that reads
its parameters without a default. Read from that release's sources; the real one is tested elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from tests.harness.scripted_server import ScriptedServer
from tests.harness.scripted_worker import Asked

PULLS_BLOCKS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""The `kv_transfer_params[...]` that the metadata of its pull worker reads."""
REGISTERS_WITH = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
"""The `params[...]` that its push scheduler reads."""
METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {waiting}.0
vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} {usage}
vllm:cache_config_info{{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="100"}} 1.0
process_start_time_seconds {started}
"""
FERRY_METRICS = """kvferry_handoffs_landed_total{{engine="0",model_name="tiny"}} {landed}.0
kvferry_handoffs_failed_total{{engine="0",model_name="tiny"}} {failed}.0
"""


@dataclass
class VllmServer(ScriptedServer):
    """A server of this kind. `mode` is what its connector does; only its parameters show it."""

    name: str
    role: str
    mode: str = "pull"
    version: str = "0.32.0"
    models: tuple[str, ...] = ("tiny",)
    num_models_asked: int = 0
    usage: float = 0.25
    running: int = 0
    waiting: int = 0
    started: float = 1000.5
    asked: list[Asked] = field(default_factory=list)
    landed: int | None = None
    """With kvferry's connector: its counter of hand-offs that have landed; None for another connector."""
    failed: int = 0
    answers: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    """Answers in place of all that follows here."""
    finish: str = "length"
    """The finish reason of prefill's one token."""
    partner: "VllmServer | None" = None
    """Where the prompt's KV comes from, for decode in push mode."""
    fails: str = ""
    """The text with which decode refuses a hand-off."""
    finished: set[str] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/version", self._version),
            web.get("/v1/models", self._models),
            web.get("/metrics", self._metrics),
            web.post("/v1/completions", self._post),
            web.post("/v1/chat/completions", self._post),
        ]

    async def _version(self, _: web.Request) -> web.Response:
        return await _json({"version": self.version})

    async def _models(self, _: web.Request) -> web.Response:
        self.num_models_asked += 1
        return await _json({"data": [{"id": name, "max_model_len": 2048} for name in self.models]})

    async def _metrics(self, _: web.Request) -> web.Response:
        numbers = {"running": self.running, "waiting": self.waiting, "usage": self.usage, "started": self.started}
        text = METRICS.format(**numbers)
        if self.landed is not None:
            text += FERRY_METRICS.format(landed=self.landed, failed=self.failed)
        return web.Response(text=text)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        if self.answers is not None:
            return await self.answers(request)
        at_s = asyncio.get_running_loop().time()
        asked = Asked(request.path, await request.read(), {k.lower(): v for k, v in request.headers.items()}, at_s)
        self.asked.append(asked)
        params = asked.body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            return await self._prefill(asked)
        if params.get("do_remote_prefill"):
            problem = self.fails or await self._receive(asked, params)
            if problem:
                return web.json_response({"error": {"message": problem, "type": "x", "code": 500}}, status=500)
        return await _json({
            "id": _request_id(asked), "object": "text_completion", "model": "tiny",
            "choices": [{"index": 0, "text": "ab", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        })  # fmt: skip

    async def _prefill(self, asked: Asked) -> web.Response:
        self.finished.add(_request_id(asked))
        self.news.set()
        params: dict[str, Any] = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]],
            "remote_engine_id": self.name, "remote_request_id": _request_id(asked) + "-0-abcdef01",
            "remote_host": "10.0.0.9", "remote_port": 5600, "tp_size": 2, "dcp_size": 1, "pp_size": 3,
            "remote_num_tokens": 5, "transfer_mode": self.mode,
        }  # fmt: skip
        return await _json({
            "id": _request_id(asked), "object": "text_completion", "model": "tiny",
            "choices": [{"index": 0, "text": "a", "finish_reason": self.finish}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
            "kv_transfer_params": params,
        })  # fmt: skip

    async def _receive(self, asked: Asked, params: dict[str, Any]) -> str:
        """Returns the reason why it would fail, or "" if the prompt's KV is here."""
        needs = REGISTERS_WITH if self.mode == "push" else PULLS_BLOCKS
        missing = [name for name in needs if params.get(name) is None]
        if missing:
            return f"KeyError: {missing}"
        if self.mode == "push":
            assert self.partner is not None
            if params["remote_engine_id"] != self.partner.name:
                await asyncio.Event().wait()  # it never registers, and waits
            while _request_id(asked) not in self.partner.finished:
                self.partner.news.clear()
                await self.partner.news.wait()
        return ""


def _request_id(asked: Asked) -> str:
    kind = "chatcmpl" if "chat" in asked.path else "cmpl"
    return f"{kind}-{asked.headers['x-request-id']}"


async def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
