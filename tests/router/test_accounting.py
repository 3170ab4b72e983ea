"""What the router measures means what its name says: costs, first bytes, hand-offs."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.router.fleet.handoff_cost import MIN_SAMPLES, PROBE_EVERY, HandoffCost
from kvferry.router.settings import RouterSettings
from tests.harness.scripted_worker import (
    STREAM,
    Asked,
    a_decode,
    a_prefill,
    decode_script,
    fleet,
    hanging,
    prefill_script,
)
from tests.router.test_dispatch import BODY, post
from tests.router.test_room import recomputing

both_modes = pytest.mark.parametrize("mode", ["pull", "push"])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])
AUTO = RouterSettings(health_every_s=60.0, local_below="auto")


async def sample_count(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}_count"))


@both_modes
@streamed_or_not
async def test_only_streams_are_samples_of_first_bytes_and_of_the_hand_offs_cost(mode: str, stream: bool) -> None:
    async with fleet(a_prefill(mode=mode), a_decode(mode=mode)) as (url, router):
        for _ in range(3):
            await post(url, {**BODY, "stream": stream})
        await post(url, {**BODY, "stream": stream, "prompt": ["a", "b"]})  # decode computes it by choice
        handoffs = await sample_count(url, "kvferry_router_handoff_seconds")
        assert await sample_count(url, "kvferry_router_first_byte_seconds") == (4 if stream else 0)
        # In push mode decode may have begun before prefill's answer was read: then there is nothing to measure.
        assert handoffs in ((0, 1, 2, 3) if mode == "push" and stream else (3 if stream else 0,))
        assert (router.context.cost.handoff_s > 0) == bool(handoffs)


async def test_a_prompt_that_decode_had_to_compute_is_no_sample_of_the_hand_offs_cost() -> None:
    async def streams(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = await recomputing(request, asked)
        stream = web.StreamResponse(headers={**response.headers, "Content-Type": "text/event-stream"})
        stream.headers.popall("Content-Length", None)
        await stream.prepare(request)
        await stream.write(STREAM)
        return stream

    async with fleet(a_prefill(), a_decode(script=streams)) as (url, router):
        await post(url, {**BODY, "stream": True})
        assert await sample_count(url, "kvferry_router_handoff_seconds") == 0
        assert router.context.cost.handoff_s == 0


def measured(handoff_s: float) -> HandoffCost:
    """A line of 1 ms per token, and this cost of a hand-off."""
    cost = HandoffCost()
    for i in range(MIN_SAMPLES):
        cost.on_prefill(100 * i, 0.1 * i)
        cost.on_handoff(handoff_s)
    return cost


def test_a_limit_that_is_wrong_corrects_itself() -> None:
    """A stall made hand-offs look dear, so nearly every prompt is below the limit, and none of those is a sample."""
    cost = measured(4.2)
    assert cost.local_below_tokens > 4000
    rounds = 0
    while cost.local_below_tokens > 200:
        rounds += 1
        if cost.probe():
            cost.on_handoff(0.07)
    assert rounds < 400 * PROBE_EVERY


def test_one_prompt_in_many_is_a_probe_and_none_with_an_operators_limit() -> None:
    cost = measured(4.2)
    assert sum(cost.probe() for _ in range(10 * PROBE_EVERY)) == 10
    fixed = HandoffCost(64)
    assert not any(fixed.probe() for _ in range(10 * PROBE_EVERY))


async def test_answers_that_are_not_streamed_do_not_turn_hand_offs_off() -> None:
    """It was 4.2 s per hand-off and every prompt local after 16 requests."""

    async def grows(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = await prefill_script(request, asked)
        assert isinstance(response, web.Response)
        assert isinstance(response.body, bytes)
        response.body = response.body[:-1] + b',"kvferry":{"recomputed":%d}}' % len(asked.body["prompt"])
        return response

    async with fleet(a_prefill(script=grows), a_decode(), settings=AUTO) as (url, router):
        for i in range(2 * MIN_SAMPLES):
            response, _raw = await post(url, {**BODY, "prompt": list(range(10 * i + 1)), "stream": False})
            assert response.headers["x-kvferry-route"] == "pull"
        assert router.context.cost.handoff_s == 0


@streamed_or_not
@pytest.mark.parametrize("chat", [False, True])
async def test_in_push_an_answer_that_ends_with_its_first_token_is_prefills(stream: bool, chat: bool) -> None:
    """Decode would find that prefill has withdrawn, compute the prompt, and be counted as decode-only."""

    async def stopped(request: web.Request, asked: Asked) -> web.StreamResponse:
        text: dict[str, Any] = {"message": {"role": "assistant", "content": "a"}} if chat else {"text": "a"}
        kind = "chat.completion" if chat else "text_completion"
        choice = {"index": 0, "finish_reason": "stop", **text}
        return web.json_response({"id": "x", "object": kind, "created": 1, "model": "tiny", "choices": [choice]})

    p, d = a_prefill(script=stopped, mode="push"), a_decode(script=hanging, mode="push")
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with fleet(p, d) as (url, router):
        for _ in range(4):
            response, raw = await post(url, {**BODY, "stream": stream}, path)
            assert (response.status, response.headers["x-kvferry-route"]) == (200, "prefill")
            assert (b"[DONE]" in raw) is stream
        assert all(asked.cancelled for asked in d.asked)
        pair = router.fleet.pairs.of(router.fleet.prefill[0], router.fleet.decode[0])
        assert (pair.failed, router.context.alarm.last_reason) == (0, "")
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            assert (await response.json())["status"] == "ok"


async def test_in_push_several_choices_are_decodes_although_the_first_has_ended() -> None:
    go_on = asyncio.Event()

    async def stopped(request: web.Request, asked: Asked) -> web.StreamResponse:
        go_on.set()
        return web.json_response({"choices": [{"index": 0, "finish_reason": "stop", "text": "a"}]})

    async def later(request: web.Request, asked: Asked) -> web.StreamResponse:
        await go_on.wait()
        return await decode_script(request, asked)

    p, d = a_prefill(script=stopped, mode="push"), a_decode(script=later, mode="push")
    async with fleet(p, d) as (url, _):
        response, _raw = await post(url, {**BODY, "n": 2})
    assert response.headers["x-kvferry-route"] == "push"


async def test_what_is_down_is_named_once() -> None:
    d = a_decode("d0")
    async with fleet(a_prefill(), d, settings=RouterSettings(health_every_s=60.0, restart_wait_s=0)) as (url, _):
        await d.stop()
        await post(url, BODY)
        _, raw = await post(url, BODY)
    message = json.loads(raw)["error"]["message"]
    assert f"d0 ({d.url}) is down: cannot connect: " in message
    assert message.count("d0") == 1
