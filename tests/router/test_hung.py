"""A worker that hangs (SIGSTOP, network down) holds up no request; one that is only busy is never cut off.

The limits on a wait are left at their minutes: a test that ends within its time was ended by the health checks.
"""

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.router.app import Router
from kvferry.router.fleet.workers import Fleet
from kvferry.router.settings import RouterSettings
from tests.harness.scripted_vllm import VllmServer
from tests.harness.scripted_worker import (
    STREAM,
    Asked,
    Script,
    Worker,
    a_decode,
    a_prefill,
    decode_script,
    fleet,
    hanging,
    prefill_script,
    routing,
)
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post

# Half a second, so that a healthy worker does not look hung if the machine is busy for a moment.
SOON = RouterSettings(health_every_s=0.02, health_timeout_s=0.5, hung_after_s=0.1, restart_wait_s=0)
NEVER = RouterSettings(health_every_s=0.02, health_timeout_s=0.5, hung_after_s=0, restart_wait_s=0)
both_modes = pytest.mark.parametrize("mode", ["pull", "push"])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


def stops(worker: list[Worker], sent: bytes | None = None) -> Script:
    """A worker that is stopped while it works on the request, after `sent`; None: before its headers."""

    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        if sent is not None:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            if sent:
                await response.write(sent)
        worker[0].deaf = True
        return await hanging(request, asked)

    return script


def a_stopping_decode(mode: str, sent: bytes | None = None) -> Worker:
    itself: list[Worker] = []
    itself.append(a_decode("d0", stops(itself, sent), mode=mode))
    return itself[0]


async def checked(worker: Worker, times: int = 12) -> None:
    """Waits until its health was asked for this many times more."""
    target = worker.num_checks + times
    await until_async(lambda: worker.num_checks >= target)


@both_modes
@streamed_or_not
async def test_a_decode_that_hangs_before_its_headers_is_replaced(mode: str, stream: bool) -> None:
    p, d0, d1 = a_prefill(mode=mode), a_stopping_decode(mode), a_decode("d1", mode=mode)
    async with fleet(p, d0, d1, settings=SOON) as (url, router):
        response, _raw = await post(url, {**BODY, "stream": stream})
        assert (response.status, response.headers["x-kvferry-decode"]) == (200, "d1")
        assert router.fleet.decode[0].num_failures == 1
        await until_async(lambda: d0.asked[0].cancelled)
    ids = [asked.body["kv_transfer_params"]["transfer_id"] for asked in p.asked]
    assert len(set(ids)) == 2  # the worker may have claimed the first hand-off
    assert [one["transfer_id"] for one in p.released] == ids[:1]


@both_modes
async def test_a_decode_that_hangs_after_its_headers_is_replaced(mode: str) -> None:
    p, d0, d1 = a_prefill(mode=mode), a_stopping_decode(mode, b""), a_decode("d1", mode=mode)
    async with fleet(p, d0, d1, settings=SOON) as (url, _):
        response, raw = await post(url, {**BODY, "stream": True})
        await until_async(lambda: d0.asked[0].cancelled)
    assert (response.status, raw, response.headers["x-kvferry-decode"]) == (200, STREAM, "d1")


@both_modes
async def test_a_stream_whose_decode_hangs_ends_with_the_error(mode: str) -> None:
    d0, d1 = a_stopping_decode(mode, STREAM[:34]), a_decode("d1", mode=mode)
    async with fleet(a_prefill(mode=mode), d0, d1, settings=SOON) as (url, _):
        response, raw = await post(url, {**BODY, "stream": True})
        await until_async(lambda: d0.asked[0].cancelled)
    assert (response.status, raw[:34], d1.asked) == (200, STREAM[:34], [])
    message = json.loads(raw[34:].decode().strip().removeprefix("data: "))["error"]["message"]
    assert message.startswith(f"decode d0 ({d0.url}) has not answered its health checks for ")
    assert "the answer is incomplete" in message


@both_modes
@streamed_or_not
async def test_without_another_decode_the_client_gets_an_error(mode: str, stream: bool) -> None:
    async with fleet(a_prefill(mode=mode), a_stopping_decode(mode), settings=SOON) as (url, _):
        response, raw = await post(url, {**BODY, "stream": stream})
    assert response.status == 504
    assert "has not answered its health checks for" in json.loads(raw)["error"]["message"]


@both_modes
@streamed_or_not
async def test_a_prefill_that_hangs_is_replaced(mode: str, stream: bool) -> None:
    itself: list[Worker] = []
    itself.append(a_prefill("p0", stops(itself), mode=mode))
    [p0], p1 = itself, a_prefill("p1", mode=mode)

    async def waits_for_p1(request: web.Request, asked: Asked) -> web.StreamResponse:
        return await (decode_script if p1.asked else hanging)(request, asked)

    d = a_decode(script=waits_for_p1, mode=mode)
    async with fleet(p0, p1, d, settings=SOON) as (url, _):
        response, _raw = await post(url, {**BODY, "stream": stream})
        assert (response.status, response.headers["x-kvferry-prefill"]) == (200, "p1")
        await until_async(lambda: p0.asked[0].cancelled)


@both_modes
async def test_without_another_prefill_decode_serves_alone_with_the_reason(mode: str) -> None:
    itself: list[Worker] = []
    itself.append(a_prefill("p0", stops(itself), mode=mode))

    async def waits_for_kv(request: web.Request, asked: Asked) -> web.StreamResponse:
        return await (hanging if asked.body.get("kv_transfer_params") else decode_script)(request, asked)

    async with fleet(*itself, a_decode(script=waits_for_kv, mode=mode), settings=SOON) as (url, _):
        response, _raw = await post(url, BODY)
    assert (response.status, response.headers["x-kvferry-route"]) == (200, "alone")
    assert "has not answered its health checks for" in response.headers["x-kvferry-why"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@both_modes
@streamed_or_not
async def test_a_busy_worker_that_answers_its_checks_is_never_cut_off(role: str, mode: str, stream: bool) -> None:
    done = asyncio.Event()

    def busy(then: Script) -> Script:
        async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
            await done.wait()
            return await then(request, asked)

        return script

    p = a_prefill(script=busy(prefill_script) if role == "prefill" else prefill_script, mode=mode)
    d = a_decode(script=busy(decode_script) if role == "decode" else decode_script, mode=mode)
    async with fleet(p, d, settings=RouterSettings(health_every_s=0.02, hung_after_s=0.05)) as (url, router):
        asking = asyncio.create_task(post(url, {**BODY, "stream": stream}))
        slow = p if role == "prefill" else d
        await until_async(lambda: bool(slow.asked))
        await checked(slow)
        done.set()
        response, _raw = await asking
        assert [worker.num_failures for worker in router.fleet.workers] == [0, 0]
    assert (response.status, response.headers["x-kvferry-route"]) == (200, mode)


@pytest.mark.parametrize("answers", [True, False], ids=["it says nothing of use", "the check is switched off"])
async def test_a_worker_that_is_down_but_not_hung_is_not_cut_off(answers: bool) -> None:
    """Any answer is a sign of life; 0 switches all of this off."""
    done = asyncio.Event()

    async def no_more_checks(request: web.Request, asked: Asked) -> web.StreamResponse:
        d.info, d.deaf = None, not answers
        await done.wait()
        return await decode_script(request, asked)

    d = a_decode(script=no_more_checks)
    async with fleet(a_prefill(), d, settings=SOON if answers else NEVER) as (url, router):
        asking = asyncio.create_task(post(url, BODY))
        await until_async(lambda: router.fleet.decode[0].down is not None)
        await checked(d)
        done.set()
        assert (await asking)[0].status == 200


class Waiting:
    """Returns a `Wait` of which only the time matters."""

    def __init__(self, since_s: float | None) -> None:
        self.waiting_since_s = since_s
        self.reasons: list[str] = []

    def give_up(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize(
    ("silent_for_s", "waits_for_s", "ended"),
    [(11, 11, 1), (9, 11, 0), (11, 9, 0), (11, None, 0), (None, 11, 0)],
    ids=["both", "silence too short", "bytes came since", "it waits for its client", "the first check that fails"],
)
async def test_which_requests_are_given_up(silent_for_s: float | None, waits_for_s: float | None, ended: int) -> None:
    """Streams that still bring bytes continue, whatever the health checks say."""
    d = a_decode()
    await d.start()
    now_s, patient = asyncio.get_running_loop().time(), Fleet([], [d.url], RouterSettings())
    known = Fleet([], [d.url], RouterSettings(health_timeout_s=0.02))
    [worker] = known.decode
    wait = Waiting(None if waits_for_s is None else now_s - waits_for_s)
    async with aiohttp.ClientSession() as session:
        with worker.ending(wait):
            d.deaf = True
            worker.silent_since_s = None if silent_for_s is None else now_s - silent_for_s
            await known.ask(session, worker)
            assert len(wait.reasons) == ended
            silent_since_s = worker.silent_since_s
            assert silent_since_s is not None
            d.deaf = False
            await patient.ask(session, worker)
            assert worker.silent_since_s is None  # one answer, and the count restarts
        wait.reasons.clear()
        d.deaf, worker.silent_since_s = True, now_s - 99
        await known.ask(session, worker)
        assert not wait.reasons  # it has left
    await d.stop()


async def test_a_refused_connection_is_not_silence() -> None:
    """A kvferry worker that shuts down accepts no connection and may still answer; a dead one's connections end."""
    d = a_decode()
    await d.start()
    await d.stop()
    known = Fleet([], [d.url], RouterSettings())
    async with aiohttp.ClientSession() as session:
        known.decode[0].silent_since_s = 0.0
        await known.ask(session, known.decode[0])
    assert "cannot connect" in str(known.decode[0].down)
    assert known.decode[0].silent_since_s is None


@streamed_or_not
async def test_a_vllm_server_that_is_ending_holds_no_stream(stream: bool) -> None:
    """After SIGTERM vLLM's engine ends, its socket closes, and open streams may stay silent for ever."""
    d = VllmServer("engine-d", "decode")
    p = VllmServer("engine-p", "prefill")
    began = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if stream:
            await response.write(STREAM[:34])
        began.set()
        await asyncio.Event().wait()
        return response

    d.answers = silent
    await d.start()
    await p.start()
    async with TcpProxy.to(d.port) as proxy, routing(Router([p.url], [proxy.url], SOON)) as url:
        asking = asyncio.create_task(post(url, {**BODY, "stream": stream}))
        await asyncio.wait_for(began.wait(), 10)
        proxy.refuse()
        response, raw = await asyncio.wait_for(asking, 10)
    await d.stop()
    await p.stop()
    assert response.status == (200 if stream else 504)
    assert b"has not accepted a connection for" in raw


async def test_a_stream_of_many_chunks_sets_no_timer_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """One timer for all waits, however many chunks; it still ends a pause."""
    loop, go_on, timers = asyncio.get_running_loop(), asyncio.Event(), []
    real, began_s = loop.call_at, time.monotonic()

    def counting(when: float, callback: Any, *args: Any, **more: Any) -> asyncio.TimerHandle:
        if getattr(callback, "__qualname__", "") in ("Deadlines._check", "Answer.on_due"):
            timers.append(when)
        return real(when, callback, *args, **more)

    monkeypatch.setattr(loop, "call_at", counting)

    async def by_and_by(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(50):
            await response.write(b"data: x\n\n")
            await go_on.wait()
            go_on.clear()
        return await hanging(request, asked)

    d, got = a_decode(script=by_and_by), b""
    async with (
        fleet(a_prefill(), d, settings=RouterSettings(between_bytes_timeout_s=0.5)) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        while chunk := await response.content.readany():
            got += chunk
            go_on.set()
        assert got.count(b"data: x\n\n") == 50
        assert b"paused for 0.5 s in its answer" in got
    assert 1 <= len(timers) <= 1 + (time.monotonic() - began_s) / 0.05


async def test_a_worker_that_is_only_slow_is_used_if_there_is_no_other() -> None:
    """A busy machine misses a health check. But a worker that must be assumed to hang is not used."""
    slow = RouterSettings(health_every_s=0.02, health_timeout_s=0.1, hung_after_s=30, restart_wait_s=0)
    d = a_decode()
    async with fleet(a_prefill(), d, settings=slow) as (url, router):
        d.deaf = True
        await until_async(lambda: router.fleet.decode[0].down is not None)
        response, _ = await post(url, BODY)
        assert response.status == 200
        assert d.info is not None
        worker = router.fleet.decode[0]
        assert worker.silent_since_s is not None
        worker.silent_since_s -= 31
        response, _ = await post(url, BODY)
        assert response.status == 503
