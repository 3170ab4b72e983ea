"""Room on decode is checked before prefill gets work; short prompts stay with decode; breakers of pairs."""

import asyncio
import base64
import json
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.router.settings import PolicyName, RouterSettings
from tests.harness.moved_clock import MovedClock
from tests.harness.scripted_worker import (
    FAST,
    Asked,
    Worker,
    a_decode,
    a_prefill,
    decode_script,
    fleet,
    hanging,
    prefill_script,
    refusing,
)
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post

IDS = {**BODY, "prompt": list(range(3, 103))}
"""100 tokens: 7 blocks of 16."""


def with_room(worker: Worker, free_blocks: int, blocks: int = 100) -> Worker:
    assert worker.info is not None
    worker.info |= {"limits": {"block_tokens": 16, "blocks": blocks}, "room": {"free_blocks": free_blocks}}
    return worker


NO_TURN = RouterSettings(health_every_s=0.05, connect_timeout_s=1.0, room_turn_s=1000.0)
"""Requests without room wait in the router."""


async def test_a_request_goes_where_there_is_room() -> None:
    p, full, roomy = a_prefill(), with_room(a_decode("d0"), 3), with_room(a_decode("d1"), 50)
    async with fleet(p, full, roomy) as (url, _):
        for _ in range(3):
            response, _raw = await post(url, IDS)
            assert response.headers["x-kvferry-decode"] == "d1"
    assert full.asked == []


async def test_prefill_gets_no_work_while_no_decode_has_room() -> None:
    p, d = a_prefill(), with_room(a_decode(), 3)
    async with fleet(p, d, settings=NO_TURN) as (url, router):
        asking = asyncio.create_task(post(url, IDS))
        await until_async(lambda: router.context.admission.num_waiting == 1)
        checks = d.num_checks
        await until_async(lambda: d.num_checks > checks + 2)
        assert p.asked == []
        with_room(d, 50)
        response, _ = await asking
        assert response.status == 200
        assert router.context.admission.num_waiting == 0


async def test_a_large_prompt_has_its_turn_and_small_ones_pass_it() -> None:
    """It is prefilled and waits in decode, without a reservation; a second large one waits in the router."""
    go_on = asyncio.Event()

    async def held(request: web.Request, asked: Asked) -> web.StreamResponse:
        if len(asked.body["prompt"]) > 50:
            await go_on.wait()
        return await decode_script(request, asked)

    p, d = a_prefill(), with_room(a_decode(script=held), 3)
    async with fleet(p, d, settings=RouterSettings(health_every_s=0.05, room_turn_s=0)) as (url, router):
        large = [asyncio.create_task(post(url, IDS)) for _ in range(2)]
        await until_async(lambda: len(d.asked) == 1 and router.context.admission.num_waiting == 1)
        for _ in range(3):
            response, _raw = await post(url, {**BODY, "prompt": [5] * 20})
            assert response.status == 200
        go_on.set()
        assert [response.status for response, _ in await asyncio.gather(*large)] == [200, 200]
    assert len(p.asked) == len(d.asked) == 5


async def test_the_wait_for_room_ends_with_503_and_retry_after() -> None:
    p, d = a_prefill(), with_room(a_decode(), 3)
    async with fleet(p, d, settings=RouterSettings(health_every_s=0.05, room_wait_s=0.1)) as (url, _):
        response, raw = await post(url, IDS)
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    error = json.loads(raw)["error"]
    assert (error["code"], error["type"]) == ("overloaded", "overloaded_error")
    assert "d0 has 3 free blocks" in error["message"]
    assert (p.asked, d.asked) == ([], [])


async def test_at_most_a_given_number_wait() -> None:
    p, d = a_prefill(), with_room(a_decode(), 3)
    async with fleet(p, d, settings=RouterSettings(health_every_s=0.05, max_waiting=0)) as (url, _):
        response, raw = await post(url, IDS)
    assert response.status == 503
    assert "0 requests wait already" in json.loads(raw)["error"]["message"]


async def test_a_client_that_hangs_up_stops_waiting() -> None:
    p, d = a_prefill(), with_room(a_decode(), 3)
    async with fleet(p, d, settings=NO_TURN) as (url, router):
        asking = asyncio.create_task(post(url, IDS))
        await until_async(lambda: router.context.admission.num_waiting == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until_async(lambda: router.context.admission.num_waiting == 0)


async def test_reserved_room_is_not_given_twice() -> None:
    """Ten requests come at once, and there is room for two; no report comes in between."""
    p, d = a_prefill(script=hanging), with_room(a_decode(), 15)
    async with fleet(p, d, settings=RouterSettings(health_every_s=60.0, room_turn_s=1000.0)) as (url, router):
        asking = [asyncio.create_task(post(url, IDS)) for _ in range(10)]
        await until_async(lambda: router.context.admission.num_waiting == 8 and len(p.asked) == 2)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_a_prompt_that_no_cache_can_hold_is_refused_by_decode() -> None:
    p, d = a_prefill(), with_room(a_decode(script=refusing(400)), 4, blocks=4)
    async with fleet(p, d) as (url, _):
        response, _ = await post(url, IDS)
    assert response.status == 400


async def test_short_prompts_stay_with_decode_with_the_reason() -> None:
    p, d = a_prefill(), a_decode()
    async with fleet(p, d, settings=RouterSettings(health_every_s=0.05, local_below="50")) as (url, router):
        short, _ = await post(url, {**BODY, "prompt": [5] * 49})
        long, _ = await post(url, {**BODY, "prompt": [5] * 50})
        assert not router.context.alarm.rings(asyncio.get_running_loop().time())
    assert short.headers["x-kvferry-route"] == "local"
    assert "49 of its tokens" in short.headers["x-kvferry-why"]
    assert long.headers["x-kvferry-route"] == "pull"


async def test_a_long_prompt_that_decode_has_cached_is_short() -> None:
    """Prefill reports the prompt's blocks once; then decode reports that it has them."""
    p, d = a_prefill(script=telling_blocks), a_decode()
    assert p.info is not None
    p.info |= {"abilities": ["prompt-blocks"], "limits": {"block_tokens": 16, "blocks": 10}}
    text = "word " * 200
    async with fleet(p, d, settings=RouterSettings(health_every_s=0.05, local_below="60")) as (url, router):
        first, _ = await post(url, {**BODY, "prompt": text})
        assert first.headers["x-kvferry-route"] == "pull"
        assert p.asked[0].headers["x-kvferry-want"] == "prompt-blocks"
        d.blocks = BLOCKS
        assert d.info is not None
        d.info["cache"] = {"version": 7, "blocks": 62}
        await until_async(lambda: len(router.fleet.decode[0].cached.blocks) == 62)
        again, _ = await post(url, {**BODY, "prompt": text})
    assert again.headers["x-kvferry-route"] == "local"


BLOCKS = b"".join(i.to_bytes(8, "big") for i in range(62))


async def telling_blocks(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Returns a prompt of a thousand tokens of one byte each."""
    return web.json_response({
        "choices": [{"finish_reason": "length", "text": "a"}], "usage": {"prompt_tokens": 1000},
        "kv_transfer_params": {"remote_engine_id": "p0"}, "prompt_blocks": base64.b64encode(BLOCKS).decode(),
    })  # fmt: skip


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_prefix_aware_choice_by_workers_reports(role: str) -> None:
    workers = [a_prefill("p0", telling_blocks), a_decode("d0")]
    workers.append(a_prefill("p1", telling_blocks) if role == "prefill" else a_decode("d1"))
    for worker in workers:
        assert worker.info is not None
        worker.info |= {"abilities": ["prompt-blocks"], "limits": {"block_tokens": 16, "blocks": 1000}}
        worker.info["cache"] = {"version": 0, "blocks": 0}
    has = workers[2]
    policy: dict[str, Any] = {f"{role}_policy": PolicyName.PREFIX_AWARE}
    async with fleet(*workers, settings=RouterSettings(health_every_s=0.05, **policy)) as (url, router):
        await post(url, {**BODY, "prompt": "word " * 200})
        has.blocks = BLOCKS
        assert has.info is not None
        has.info["cache"] = {"version": 1, "blocks": 62}
        noted_s = time.monotonic()
        await until_async(lambda: any(worker.cached.blocks for worker in router.fleet.workers))
        await until_async(lambda: all(worker.report.asked_s > noted_s for worker in router.fleet.workers))
        before = len(has.asked)
        for i in range(6):
            await post(url, {**BODY, "prompt": "word " * 200 + f"and {i}"})
    assert len(has.asked) - before == 6


async def test_a_measured_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill takes 1 ms per 10 tokens; the hand-off costs some more: `auto` finds from where it pays."""

    clock = MovedClock(monkeypatch)

    async def slow(request: web.Request, asked: Asked) -> web.StreamResponse:
        clock.advance(len(asked.body["prompt"]) * 1e-4)
        return await prefill_script(request, asked)

    async def landing(request: web.Request, asked: Asked) -> web.StreamResponse:
        clock.advance(0.01)
        return await decode_script(request, asked)

    p, d = a_prefill(script=counted(slow)), a_decode(script=landing)
    async with fleet(p, d, settings=RouterSettings(health_every_s=0.05, local_below="auto")) as (url, router):
        for i in range(20):
            response, _ = await post(url, {**BODY, "prompt": [5] * (100 + 100 * (i % 5)), "stream": True})
            assert response.headers["x-kvferry-route"] == "pull" or i >= 16
        await until_async(lambda: router.context.cost.local_below_tokens > 0)
        async with aiohttp.ClientSession() as session:
            view = await (await session.get(f"{url}/v1/kvferry")).json()
        assert view["local_below_tokens"] == router.context.cost.local_below_tokens > 20
        assert view["measured"]["handoff_s"] >= 0.009
        response, _ = await post(url, {**BODY, "prompt": [5] * 20})
        assert response.headers["x-kvferry-route"] == "local"


def counted(script: Any) -> Any:
    """Prefill reports how many tokens it computed."""

    async def script_with_usage(request: web.Request, asked: Asked) -> web.StreamResponse:
        await script(request, asked)
        return web.json_response({
            "choices": [{"finish_reason": "length", "text": "a"}],
            "kv_transfer_params": {"remote_engine_id": "p0"},
            "kvferry": {"recomputed": len(asked.body["prompt"])},
        })  # fmt: skip

    return script_with_usage


async def recomputing(request: web.Request, asked: Asked) -> web.StreamResponse:
    """A decode worker that reports that nothing was handed over."""
    headers = {"x-kvferry-handed-over": "0", "x-kvferry-recomputed": "6", "x-kvferry-why": "p0 is unreachable"}
    return web.json_response({"choices": [{"text": "ab"}]}, headers=headers)


async def test_a_pair_whose_hand_offs_fail_is_left_alone_and_its_workers_pair_with_others() -> None:
    d0, d1 = a_decode("d0", recomputing), a_decode("d1")
    async with fleet(a_prefill(), d0, d1, settings=RouterSettings(breaker_failures=2, breaker_open_s=60.0)) as (url, _):
        seen = []
        for _ in range(10):
            response, _raw = await post(url, BODY)
            seen.append((response.headers["x-kvferry-decode"], response.headers["x-kvferry-route"]))
        async with aiohttp.ClientSession() as session:
            view = await (await session.get(f"{url}/v1/kvferry")).json()
            metrics = await (await session.get(f"{url}/metrics")).text()
    assert seen.count(("d0", "pull")) == 2
    assert ("d0", "alone") in seen  # it still serves alone
    assert ("d1", "pull") in seen[4:]
    pair = next(pair for pair in view["pairs"] if pair["decode"] == "d0")
    assert (pair["failed"], pair["breaker"], pair["last_why"]) == (2, "open", "p0 is unreachable")
    assert 'kvferry_router_pair_breaker_open{decode="d0",prefill="p0"} 1.0' in metrics
    assert 'kvferry_router_pair_handoffs_total{decode="d0",outcome="failed",prefill="p0"} 2.0' in metrics


async def test_a_worker_that_fails_repeatedly_is_left_alone_except_for_errors_of_clients() -> None:
    settings = RouterSettings(health_every_s=0.05, breaker_failures=2, breaker_open_s=60.0)
    bad, good = a_prefill("p0", refusing(500)), a_prefill("p1")
    async with fleet(bad, good, a_decode(), settings=settings) as (url, _):
        for _ in range(10):
            response, _raw = await post(url, BODY)
            assert response.headers["x-kvferry-route"] == "pull"
    assert len(bad.asked) == 2

    wrong, other = a_prefill("p0", refusing(422)), a_prefill("p1", refusing(422))
    async with fleet(wrong, other, a_decode(), settings=settings) as (url, _):
        for _ in range(10):
            response, _raw = await post(url, BODY)
            assert response.status == 422
    assert len(wrong.asked) == len(other.asked) == 5


async def test_a_restart_closes_the_breaker() -> None:
    settings = RouterSettings(health_every_s=0.05, breaker_failures=2, breaker_open_s=60.0)
    p = a_prefill(script=refusing(500))
    async with fleet(p, a_decode(), settings=settings) as (url, router):
        for _ in range(4):
            await post(url, BODY)
        assert len(p.asked) == 2
        p.script = prefill_script
        assert p.info is not None
        p.info["incarnation"] = "i2"
        await until_async(lambda: router.fleet.prefill[0].unavailable_reason() is None)
        response, _ = await post(url, BODY)
    assert response.headers["x-kvferry-route"] == "pull"


async def test_if_every_decode_is_left_alone_one_is_tried() -> None:
    settings = RouterSettings(health_every_s=0.05, breaker_failures=1, breaker_open_s=60.0)
    d = a_decode(script=refusing(500))
    async with fleet(a_prefill(), d, settings=settings) as (url, _):
        for _ in range(3):
            response, _raw = await post(url, BODY)
            assert response.status == 502
        d.script = decode_script
        response, _ = await post(url, BODY)
    assert response.status == 200


async def test_the_alarm_is_in_health_and_metrics() -> None:
    d = a_decode(script=recomputing)
    async with fleet(a_prefill(), d, settings=FAST) as (url, _), aiohttp.ClientSession() as session:
        assert (await (await session.get(f"{url}/health")).json())["status"] == "ok"
        await post(url, BODY)
        health = await (await session.get(f"{url}/health")).json()
        metrics = await (await session.get(f"{url}/metrics")).text()
    assert health["status"] == "degraded"
    assert "decode only for 100% of the latest requests; the last: p0 is unreachable" in health["reason"]
    assert "kvferry_router_decode_only_alarm 1.0" in metrics


async def test_freed_room_is_seen_at_once() -> None:
    """Health checks are rare; the end of a request is enough."""
    p, d = a_prefill(), with_room(a_decode(), 8)
    go_on = asyncio.Event()

    async def held(request: web.Request, asked: Asked) -> web.StreamResponse:
        await go_on.wait()
        return await decode_script(request, asked)

    d.script = held
    async with fleet(p, d, settings=RouterSettings(health_every_s=60.0, room_turn_s=1000.0)) as (url, router):
        asking = [asyncio.create_task(post(url, IDS)) for _ in range(3)]
        await until_async(lambda: router.context.admission.num_waiting == 2 and len(d.asked) == 1)
        go_on.set()
        assert [response.status for response, _ in await asyncio.gather(*asking)] == [200] * 3


async def test_a_request_goes_to_workers_of_its_model() -> None:
    workers = [a_prefill("p0"), a_decode("d0"), a_prefill("p1"), a_decode("d1")]
    for worker in workers[2:]:
        assert worker.info is not None
        worker.info |= {"model": "other", "mode": "push"}
    async with fleet(*workers) as (url, _):
        for model, prefill, decode, route in (("tiny", "p0", "d0", "pull"), ("other", "p1", "d1", "push")):
            for _ in range(3):
                response, _raw = await post(url, {**BODY, "model": model})
                served = [response.headers[f"x-kvferry-{name}"] for name in ("prefill", "decode", "route")]
                assert served == [prefill, decode, route]
            response, _ = await post(url, {**BODY, "model": model, "max_tokens": 1})
            assert response.headers["x-kvferry-prefill"] == prefill


async def test_an_engine_does_not_hand_over_to_itself() -> None:
    p, d = a_prefill("same"), a_decode("same")
    async with fleet(p, d) as (url, _):
        response, _ = await post(url, BODY)
    assert response.headers["x-kvferry-route"] == "alone"
    assert "both are the engine 'same'" in response.headers["x-kvferry-why"]
