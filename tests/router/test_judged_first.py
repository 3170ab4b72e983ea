"""What decode will refuse is refused before prefill has worked, and only if no worker of the fleet takes it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from kvferry.router.app import Router
from kvferry.router.settings import RouterSettings
from tests.harness.scripted_engine import ScriptedWorker, listening
from tests.harness.scripted_worker import (
    Script,
    Worker,
    a_decode,
    a_prefill,
    decode_script,
    fleet,
    hanging,
    prefill_script,
    refusing,
    routing,
)
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post

both_modes = pytest.mark.parametrize("mode", ["pull", "push"])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])
SETTINGS = RouterSettings(health_every_s=60.0, restart_wait_s=0)
TEXT = {"model": "tiny", "prompt": "x" * 50, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 30}], "temperature": 0}
"""Both have 50 tokens: one per character, `user: ` and `\\nassistant: ` with the chat."""


@dataclass
class Reporting(ScriptedWorker):
    """A real server over a scripted engine, which reports what it takes."""

    longest: int = 500
    free_blocks: int = 1000

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "abilities": ["first-token", "decode-checks"],
            "limits": {"max_model_len": 4096, "block_tokens": 16, "blocks": 1000, "tokens": self.longest},
            "room": {"free_blocks": self.free_blocks},
        }


@asynccontextmanager
async def servers(*workers: Reporting) -> AsyncIterator[str]:
    """A router in front of them; its address."""
    urls: dict[str, list[str]] = {"prefill": [], "decode": []}
    async with _listening(list(workers), urls):
        router = Router(urls["prefill"], urls["decode"], SETTINGS)
        async with routing(router) as url:
            yield url


@asynccontextmanager
async def _listening(workers: list[Reporting], urls: dict[str, list[str]]) -> AsyncIterator[None]:
    if not workers:
        yield
        return
    async with listening(workers[0], max_model_len=workers[0].longest) as url:
        urls[workers[0].role].append(url)
        async with _listening(workers[1:], urls):
            yield


WRONG: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "max_tokens above the context": ({"max_tokens": 100_000}, "at most 500 fit together", "context_length_exceeded"),
    "max_tokens below 0": ({"max_tokens": -5}, "max_tokens=-5", None),
    "min_tokens above max_tokens": ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5 is above max_tokens=4", None),
    "min_tokens above the default": ({"min_tokens": 100_000}, "min_tokens=100000 is above max_tokens", None),
    "too many choices": ({"n": 1000, "max_tokens": 4}, "send 1 to 128", "out_of_range"),
    "an unknown option of the stream": (
        {"max_tokens": 4, "stream_options": {"odd": 1}},
        "stream_options.odd",
        "unsupported",
    ),
    "an option of a wrong type": (
        {"max_tokens": 4, "stream_options": {"continuous_usage_stats": 1}},
        "stream_options.continuous",
        "invalid_type",
    ),
    "no choices": ({"n": 0, "max_tokens": 4}, "n=0: send 1 or more", None),
}


@both_modes
@streamed_or_not
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("chat", [False, True])
async def test_what_decode_refuses_is_400_before_prefill_has_worked(
    mode: str, stream: bool, what: str, chat: bool
) -> None:
    fields, part, code = WRONG[what]
    p, d = Reporting(role="prefill", mode=mode, engine_id="p0"), Reporting(role="decode", mode=mode, engine_id="d0")
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with servers(p, d) as url:
        response, raw = await post(url, {**(CHAT if chat else TEXT), **fields, "stream": stream}, path)
    error = json.loads(raw)["error"]
    assert (response.status, error["code"]) == (400, code)
    assert part in error["message"]
    assert p.engine.added == []
    assert mode == "push" or d.engine.added == []


@both_modes
@streamed_or_not
async def test_what_decode_takes_is_served(mode: str, stream: bool) -> None:
    """The other side of the rule above: the same fields within their bounds."""
    p, d = Reporting(role="prefill", mode=mode, engine_id="p0"), Reporting(role="decode", mode=mode, engine_id="d0")
    async with servers(p, d) as url:
        for fields in ({"max_tokens": 450}, {"max_tokens": 5, "min_tokens": 5}, {"n": 3, "max_tokens": 4}, {}):
            response, raw = await post(url, {**TEXT, **fields, "stream": stream})
            assert (response.status, response.headers["x-kvferry-route"]) == (200, mode)
            assert b"error" not in raw


async def test_without_the_routers_header_prefill_checks_its_own_fields_only() -> None:
    """A foreign router: prefill gets `max_tokens` 1 and knows no more."""
    p = Reporting(role="prefill", engine_id="p0")
    body = {**TEXT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "t"}}
    async with listening(p) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200
        checks = {"x-kvferry-decode-checks": '{"max_tokens": 100000, "longest_request": 500}'}
        async with session.post(f"{url}/v1/completions", json=body, headers=checks) as response:
            assert response.status == 400


async def test_completions_have_no_max_completion_tokens() -> None:
    """Only the chat endpoint has that field: elsewhere it decides nothing."""
    p, d = a_prefill(), a_decode()
    async with fleet(p, d) as (url, _):
        response, _ = await post(url, {**BODY, "max_tokens": 50, "max_completion_tokens": 1})
        assert response.headers["x-kvferry-route"] == "pull"
        assert p.asked[-1].body["max_completion_tokens"] == 1  # as it came
        p.script = decode_script
        response, _ = await post(url, {**BODY, "max_tokens": 1, "max_completion_tokens": 50})
        assert response.headers["x-kvferry-route"] == "prefill"
        chat = {"model": "tiny", "messages": [], "max_tokens": 50, "max_completion_tokens": 1}
        response, _ = await post(url, chat, "/v1/chat/completions")
        assert response.headers["x-kvferry-route"] == "prefill"


# ---- unequal workers


def taking(worker: Worker, longest: int, free_blocks: int = 10_000) -> Worker:
    """A scripted worker that reports its limit."""
    assert worker.info is not None
    worker.info |= {
        "limits": {"block_tokens": 16, "blocks": 10_000, "tokens": longest}, "room": {"free_blocks": free_blocks}
    }  # fmt: skip
    return worker


def ids(count: int) -> dict[str, Any]:
    return {**BODY, "prompt": list(range(count)), "max_tokens": 9}


TOO_LONG = refusing(400, "too long here", "context_length_exceeded")


@both_modes
@streamed_or_not
@pytest.mark.parametrize("small", ["prefill", "decode"])
@pytest.mark.parametrize("exact", [True, False])
async def test_whoever_takes_the_request_serves_it(mode: str, stream: bool, small: str, exact: bool) -> None:
    """1,500 tokens: as ids the router knows their number; the text looks shorter than it is."""
    workers = [
        taking(a_prefill("p0", mode=mode), 10_000), taking(a_prefill("p1", mode=mode), 10_000),
        taking(a_decode("d0", mode=mode), 10_000), taking(a_decode("d1", mode=mode), 10_000),
    ]  # fmt: skip
    weak = workers[0 if small == "prefill" else 2]
    taking(weak, 640)
    weak.script = TOO_LONG
    if small == "prefill" and mode == "push":
        for decode in workers[2:]:
            decode.script = _unless(weak, decode_script)
    body = {**(ids(1500) if exact else {**BODY, "prompt": "x " * 800}), "stream": stream}
    async with fleet(*workers, settings=SETTINGS) as (url, router):
        for _ in range(6):
            response, _raw = await post(url, body)
            assert (response.status, response.headers["x-kvferry-route"]) == (200, mode)
        assert (weak.asked == []) is exact
        assert [worker.breaker.reason for worker in router.fleet.workers] == [""] * 4


def _unless(weak: Worker, then: Script) -> Script:
    """Decode in push mode: waits for the KV of a prefill that refuses."""

    async def script(request: Any, asked: Any) -> Any:
        waits = asked.body.get("kv_transfer_params", {}).get("remote_engine_id") == weak.name
        return await (hanging if waits else then)(request, asked)

    return script


@pytest.mark.parametrize("exact", [True, False])
async def test_a_prompt_too_long_for_every_prefill_is_computed_by_decode(exact: bool) -> None:
    p, d = taking(a_prefill(script=TOO_LONG), 640), taking(a_decode(), 10_000)
    async with fleet(p, d, settings=SETTINGS) as (url, _):
        response, _raw = await post(url, ids(1500) if exact else {**BODY, "prompt": "x " * 800})
    assert (response.status, response.headers["x-kvferry-route"]) == (200, "alone")
    assert "p0" in response.headers["x-kvferry-why"]


@both_modes
@streamed_or_not
async def test_a_request_that_no_worker_takes_is_400_at_once(mode: str, stream: bool) -> None:
    workers = [taking(a_prefill(mode=mode), 10_000), *(taking(a_decode(f"d{i}", mode=mode), 640) for i in range(2))]
    async with fleet(*workers, settings=SETTINGS) as (url, _):
        response, raw = await post(url, {**ids(1500), "stream": stream})
    error = json.loads(raw)["error"]
    assert (response.status, error["code"]) == (400, "context_length_exceeded")
    assert "1500 tokens" in error["message"]
    assert "640 together" in error["message"]
    assert [worker.asked for worker in workers] == [[], [], []]


@both_modes
@pytest.mark.parametrize("busy", [False, True])
async def test_text_that_no_worker_can_hold_waits_for_no_room(mode: str, busy: bool) -> None:
    """40,000 words, alone or beside an open stream, which takes some of the blocks: a worker says 400 at once."""
    p = taking(a_prefill(script=TOO_LONG, mode=mode), 640)
    d = taking(a_decode(script=TOO_LONG, mode=mode), 640, free_blocks=5 if busy else 10_000)
    async with fleet(p, d, settings=SETTINGS) as (url, router):
        response, raw = await post(url, {**BODY, "prompt": "word " * 40_000})
        assert router.context.admission.num_waiting == 0
    assert (response.status, json.loads(raw)["error"]["code"]) == (400, "context_length_exceeded")


async def test_while_the_worker_that_takes_it_is_down_the_client_has_to_wait() -> None:
    """It is not the request's fault."""
    small, large = taking(a_decode("d0"), 640), taking(a_decode("d1"), 10_000)
    settings = RouterSettings(health_every_s=0.05, restart_wait_s=0)
    async with fleet(a_prefill(), small, large, settings=settings) as (url, router):
        await large.stop()
        await until_async(lambda: router.fleet.decode[1].down is not None)
        response, _raw = await post(url, ids(1500))
        assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_decode_is_chosen_again_once_prefill_has_counted() -> None:
    """The estimate fits the small decode worker, the count does not: the hand-off goes to the large one."""

    async def counts(request: Any, asked: Any) -> Any:
        response: Any = await prefill_script(request, asked)
        response.body = response.body.replace(b'"choices"', b'"usage":{"prompt_tokens":1500},"choices"')
        return response

    p = a_prefill(script=counts)
    small, large = taking(a_decode("d0", TOO_LONG), 640), taking(a_decode("d1"), 10_000)
    async with fleet(p, small, large, settings=SETTINGS) as (url, _):
        response, _raw = await post(url, {**BODY, "prompt": "x " * 800, "stream": True})
    assert (response.status, response.headers["x-kvferry-decode"]) == (200, "d1")
    assert (len(p.asked), small.asked, p.released) == (1, [], [])


# ---- bodies that are not what they say


@pytest.mark.parametrize("where", ["worker", "router"])
async def test_a_body_that_is_not_gzip_is_400(where: str) -> None:
    p, d = Reporting(role="prefill", engine_id="p0"), Reporting(role="decode", engine_id="d0")
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with servers(p, d) as router_url, listening(d) as worker_url, aiohttp.ClientSession() as session:
        url = router_url if where == "router" else worker_url
        async with session.post(f"{url}/v1/completions", data=json.dumps(TEXT), headers=headers) as response:
            error = (await response.json())["error"]
    assert response.status == 400
    assert "Content-Encoding" in error["message"]


async def test_a_body_that_is_gzip_is_read() -> None:
    d = Reporting(role="decode", engine_id="d0")
    async with (
        listening(d) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=TEXT, compress="gzip") as response,
    ):
        assert response.status == 200
