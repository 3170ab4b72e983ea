"""Whose fault it was: who is tried next, which breaker counts it, and what the client gets. (router.fleet.outcomes)"""

import json
from typing import Any

import pytest
from aiohttp import web

from kvferry.router.app import Router
from kvferry.router.settings import RouterSettings
from tests.harness.scripted_worker import (
    Asked,
    Script,
    Worker,
    a_decode,
    a_prefill,
    cutting,
    decode_script,
    fleet,
    hanging,
    refusing,
)
from tests.router.test_dispatch import BODY, post

SLOW_CHECKS = RouterSettings(health_every_s=60.0, restart_wait_s=0, breaker_open_s=60.0)
both_modes = pytest.mark.parametrize("mode", ["pull", "push"])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


def two_and_two(mode: str, prefill: Script | None = None, decode: Script | None = None) -> list[Worker]:
    """Two prefill and two decode workers; a script replaces that of both."""
    workers = [
        a_prefill("p0", mode=mode),
        a_prefill("p1", mode=mode),
        a_decode("d0", mode=mode),
        a_decode("d1", mode=mode),
    ]
    for worker in workers:
        worker.script = (prefill if worker.role == "prefill" else decode) or worker.script
    return workers


def waits_for_kv(then: Script) -> Script:
    """Decode that has a hand-off waits for it: prefill's failure has to end the wait in push mode."""

    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        return await (hanging if asked.body.get("kv_transfer_params") else then)(request, asked)

    return script


def open_breakers(router: Router) -> list[str]:
    """Every worker and pair that is left alone, or would be after one more failure."""
    fleet = router.fleet
    breakers = [fleet.pairs.of(prefill, decode).breaker for prefill in fleet.prefill for decode in fleet.decode]
    breakers += [worker.breaker for worker in fleet.workers]
    return [breaker.reason for breaker in breakers if breaker.reason]


async def is_well(url: str, mode: str) -> None:
    """The next request is handed over."""
    response, _ = await post(url, BODY)
    assert (response.status, response.headers["x-kvferry-route"]) == (200, mode)


REASON = "computing this request raised OverflowError: int too large"


@both_modes
@streamed_or_not
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_that_fails_by_itself_is_tried_once_and_blames_no_worker(
    mode: str, stream: bool, role: str
) -> None:
    failing = refusing(500, REASON, "request_failed")
    workers = two_and_two(mode, **{role: failing, **({"decode": waits_for_kv(failing)} if role == "prefill" else {})})
    async with fleet(*workers, settings=SLOW_CHECKS) as (url, router):
        for count in range(1, 5):
            response, raw = await post(url, {**BODY, "stream": stream})
            error = json.loads(raw)["error"]
            assert (response.status, error["code"], error["message"]) == (500, "request_failed", REASON)
            assert sum(len(worker.asked) for worker in workers if worker.role == role) == count
        assert open_breakers(router) == []
        for worker in workers:
            worker.script = a_prefill().script if worker.role == "prefill" else decode_script
        await is_well(url, mode)


@both_modes
@streamed_or_not
@pytest.mark.parametrize("message", ["Internal server error", "boom"])
async def test_requests_that_fail_everywhere_leave_every_breaker_closed(mode: str, stream: bool, message: str) -> None:
    """Also with workers that do not say whose fault it was, as vLLM's."""
    failing = refusing(500, message)
    workers = two_and_two(mode, failing, failing)
    async with fleet(*workers, settings=SLOW_CHECKS) as (url, router):
        for _ in range(4):
            response, _raw = await post(url, {**BODY, "stream": stream})
            assert response.status == 502
        assert open_breakers(router) == []
        for worker in workers:
            worker.script = a_prefill().script if worker.role == "prefill" else decode_script
        await is_well(url, mode)


async def test_a_worker_that_fails_what_another_one_serves_is_left_alone() -> None:
    """The other side of the rule above."""
    p0, p1, d0, d1 = workers = two_and_two("pull")
    p0.script = d0.script = refusing(500, "boom")
    async with fleet(*workers, settings=SLOW_CHECKS) as (url, router):
        for _ in range(12):
            response, _raw = await post(url, BODY)
            assert (response.status, response.headers["x-kvferry-route"]) == (200, "pull")
        assert (len(p0.asked), len(d0.asked)) == (3, 3)
        assert all("boom" in reason for reason in open_breakers(router))
    assert p1.asked
    assert d1.asked


def dying(workers: list[Worker]) -> Script:
    """The process dies: its connections break, and it answers no health check."""

    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        next(worker for worker in workers if asked in worker.asked).info = None
        return await cutting(request, asked)

    return script


CRASHED = refusing(503, "the engine of this worker has ended", "engine_crashed")


@both_modes
@streamed_or_not
@pytest.mark.parametrize("how", ["dies", "crashes"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_that_kills_workers_is_given_to_one_other_at_most(
    mode: str, stream: bool, how: str, role: str
) -> None:
    workers = [
        *(a_prefill(f"p{i}", mode=mode) for i in range(4)), *(a_decode(f"d{i}", mode=mode) for i in range(4)),
    ]  # fmt: skip
    killing = dying(workers) if how == "dies" else CRASHED
    for worker in workers:
        if worker.role == role:
            worker.script = killing
        elif worker.role == "decode":
            worker.script = waits_for_kv(killing)
    async with fleet(*workers, settings=SLOW_CHECKS) as (url, _):
        response, raw = await post(url, {**BODY, "stream": stream})
    broken = [worker for worker in workers if worker.role == role and worker.asked]
    assert len(broken) == 2
    error = json.loads(raw)["error"]
    assert (response.status, error["code"]) == (502, "worker_failed")
    assert all(f"{worker.name} ({worker.url})" in error["message"] for worker in broken)
    assert "not given to a third worker" in error["message"]


async def test_prefills_and_decodes_breakdowns_are_counted_together() -> None:
    """One prefill worker dies of it, and then decode that computes it alone: no second decode worker follows."""
    workers = [a_prefill(), a_decode("d0"), a_decode("d1")]
    for worker in workers:
        worker.script = dying(workers)
    async with fleet(*workers, settings=SLOW_CHECKS) as (url, _):
        response, _raw = await post(url, BODY)
    assert response.status == 502
    assert len(workers[0].asked) == 1
    assert sum(len(worker.asked) for worker in workers) == 2


@both_modes
async def test_an_engine_that_was_dead_before_is_no_reason_to_stop(mode: str) -> None:
    dead = refusing(503, "the engine of this worker has ended", "engine_dead")
    workers = [a_prefill(mode=mode), *(a_decode(f"d{i}", dead, mode=mode) for i in range(3)), a_decode("d3", mode=mode)]
    async with fleet(*workers, settings=SLOW_CHECKS) as (url, _):
        response, _raw = await post(url, BODY)
    assert (response.status, response.headers["x-kvferry-decode"]) == (200, "d3")


@both_modes
@streamed_or_not
async def test_a_hand_off_that_failed_by_policy_counts_against_the_pair(mode: str, stream: bool) -> None:
    failing = refusing(500, "the KV did not arrive", "handoff_failed")
    workers = two_and_two(mode, decode=failing)
    async with fleet(*workers, settings=SLOW_CHECKS) as (url, router):
        response, raw = await post(url, {**BODY, "stream": stream})
        assert (response.status, json.loads(raw)["error"]["code"]) == (500, "handoff_failed")
        assert [worker.breaker.reason for worker in router.fleet.workers] == [""] * 4
        pairs: list[Any] = [router.fleet.pairs.of(p, d) for p in router.fleet.prefill for d in router.fleet.decode]
        assert sum(pair.failed for pair in pairs) == 2


@both_modes
@pytest.mark.parametrize("code", ["draining", "stopping", "aborted", "overloaded"])
async def test_a_worker_that_leaves_or_is_full_is_not_blamed(mode: str, code: str) -> None:
    workers = two_and_two(mode, decode=refusing(503, "not now", code))
    async with fleet(*workers, settings=SLOW_CHECKS) as (url, router):
        for _ in range(4):
            response, _raw = await post(url, BODY)
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert open_breakers(router) == []
