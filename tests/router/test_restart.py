"""Every decode worker is down for a moment, as in a restart: requests wait until one is back, within a limit.

And each refusal has a cause, whatever happened.
"""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvferry.router.app import Router
from kvferry.router.fleet.failures import WorkerFailed
from kvferry.router.fleet.outcomes import Outcome
from kvferry.router.fleet.worker import Source
from kvferry.router.fleet.worker import Worker as RouterWorker
from kvferry.router.settings import RouterSettings
from kvferry.router.upstream.http1 import Pool, Unreachable
from kvferry.settings import Role
from tests.harness.scripted_worker import (
    Asked,
    Script,
    Worker,
    a_decode,
    a_prefill,
    cutting,
    decode_script,
    fleet,
    prefill_script,
    refusing,
)
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post

WAITS = RouterSettings(health_every_s=0.02, connect_timeout_s=1.0, restart_wait_s=20.0)
"""Far longer than a test may take, so a test that ends did not wait for it."""
SOON = replace(WAITS, restart_wait_s=0.2)


async def restart(worker: Worker) -> None:
    """Starts another process at the same address."""
    assert worker.info is not None
    worker.info |= {"incarnation": worker.info["incarnation"] + "+", "state": "ready"}
    await worker.start()


async def waiting(router: Router, count: int = 1) -> None:
    await until_async(lambda: router.context.admission.num_waiting == count)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_restart_of_every_decode_worker_fails_no_request(mode: str, stream: bool) -> None:
    p, d0, d1 = a_prefill(mode=mode), a_decode("d0", mode=mode), a_decode("d1", mode=mode)
    async with fleet(p, d0, d1, settings=WAITS) as (url, router):
        await d0.stop()
        await d1.stop()
        await until_async(lambda: all(worker.down is not None for worker in router.fleet.decode))
        asking = [asyncio.create_task(post(url, {**BODY, "stream": stream})) for _ in range(5)]
        await waiting(router, 5)
        assert not p.asked, "prefill gets no request in vain"
        await restart(d1)
        answers = await asyncio.gather(*asking)
        assert {(one.status, one.headers["x-kvferry-decode"]) for one, _ in answers} == {(200, "d1")}
        assert router.context.admission.num_waiting == 0


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_decode_worker_that_dies_under_a_request_gets_it_again_when_it_is_back(mode: str) -> None:
    """Nothing of the answer was sent, and nothing of the request is left in the process that died."""
    p, d = a_prefill(mode=mode), a_decode("d0", mode=mode)
    info = d.info

    async def dies(request: web.Request, asked: Asked) -> web.StreamResponse:
        d.info = None  # its health check fails from the moment at which its connections break
        return await cutting(request, asked)

    d.script = dies
    async with fleet(p, d, settings=WAITS) as (url, router):
        asking = asyncio.create_task(post(url, BODY))
        await until_async(lambda: bool(d.asked))
        await d.stop()
        await waiting(router)
        d.script, d.info = decode_script, info
        await restart(d)
        response, _raw = await asking
        assert (response.status, len(d.asked)) == (200, 2)
    ids = [asked.body["kv_transfer_params"]["transfer_id"] for asked in p.asked]
    assert len(set(ids)) == 2, "a new dispatch has a new transfer id"


async def test_a_decode_worker_that_refuses_because_it_drains_may_come_back() -> None:
    """It drains since the last health check: the router learns that from the refusal, asks, and waits."""
    d = a_decode("d0")

    async def drains(request: web.Request, asked: Asked) -> web.StreamResponse:
        assert d.info is not None
        d.info["state"] = "draining"
        return await refusing(503, "this worker is draining")(request, asked)

    d.script = drains
    async with fleet(a_prefill(), d, settings=replace(WAITS, health_every_s=0.1)) as (url, router):
        asking = asyncio.create_task(post(url, BODY))
        await until_async(lambda: bool(d.asked))
        await waiting(router)
        await d.stop()
        d.script = decode_script
        await restart(d)
        assert (await asking)[0].status == 200


async def test_workers_that_registered_leave_before_they_restart() -> None:
    """A registered worker leaves the fleet by itself, so the fleet forgets that it was there."""
    d = a_decode("d0")
    async with fleet(a_prefill(), d, settings=WAITS) as (url, router):
        router.fleet.remove(router.fleet.decode[0], "it says so")
        asking = asyncio.create_task(post(url, BODY))
        await waiting(router)
        router.fleet.add(d.url, Role.DECODE, Source.REGISTERED)
        assert (await asking)[0].status == 200


async def test_the_wait_is_bounded_and_says_when_to_try_again() -> None:
    d = a_decode("d0")
    async with fleet(a_prefill(), d, settings=SOON) as (url, router):
        await d.stop()
        await until_async(lambda: router.fleet.decode[0].down is not None)
        lost_s = router.fleet.decode[0].lost_s
        response, raw = await post(url, BODY)
        assert time.monotonic() - lost_s >= 0.2
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert f"d0 ({d.url}) is down" in json.loads(raw)["error"]["message"]
        # The time counts from when the worker left: later requests wait no longer.
        began_s = time.monotonic()
        assert (await post(url, BODY))[0].status == 503
        assert time.monotonic() - began_s < 0.15


async def test_no_request_waits_for_a_worker_that_is_there_and_fails() -> None:
    for script in (cutting, refusing(500), refusing(503)):
        async with fleet(a_prefill(), d := a_decode("d0", script), settings=WAITS) as (url, _):
            response, _raw = await post(url, BODY)
            assert response.status in (502, 503)
            assert response.headers["Retry-After"] == "1"
            assert len(d.asked) == 1


async def test_at_most_max_waiting_requests_wait() -> None:
    d = a_decode("d0")
    async with fleet(a_prefill(), d, settings=replace(WAITS, max_waiting=1)) as (url, router):
        await d.stop()
        await until_async(lambda: router.fleet.decode[0].down is not None)
        asking = asyncio.create_task(post(url, BODY))
        await waiting(router)
        response, raw = await post(url, BODY)
        assert response.status == 503
        assert "1 requests wait for one already" in json.loads(raw)["error"]["message"]
        await restart(d)
        assert (await asking)[0].status == 200


# ---- every error has a cause


async def test_a_failed_prefill_is_the_cause_if_decode_has_left_since_then() -> None:
    """This was once an error whose text began with a full stop."""
    d = a_decode("d0")

    async def fails_late(request: web.Request, asked: Asked) -> web.StreamResponse:
        assert d.info is not None
        d.info["state"] = "draining"
        await until_async(lambda: router.fleet.decode[0].unusable_reason is not None)
        return await refusing(500, "out of memory")(request, asked)

    p = a_prefill("p0", fails_late)
    async with fleet(p, d, settings=replace(WAITS, restart_wait_s=0)) as (url, router):
        response, raw = await post(url, BODY)
    message = json.loads(raw)["error"]["message"]
    assert response.status == 503
    assert "draining" in message
    assert "out of memory" in message


def silent(status: int, body: bytes) -> Script:
    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        return web.Response(status=status, body=body)

    return script


@pytest.mark.parametrize(
    "body",
    [b"", b"  ", b"{}", b'{"error":{}}', b'{"error":{"message":""}}', b'{"error":{"message":" "}}', b"oops", b"\xff"],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_error_without_a_text_also_has_a_cause(role: str, body: bytes) -> None:
    script = silent(500, body)
    p, d = a_prefill(script=script if role == "prefill" else prefill_script), a_decode("d0")
    if role == "decode":
        d.script = script
    async with fleet(p, d, settings=SOON) as (url, _):
        response, raw = await post(url, BODY)
    if role == "prefill":
        reason = response.headers["x-kvferry-why"]
    else:
        assert response.status == 502
        reason = json.loads(raw)["error"]["message"]
    _, _, cause = reason.partition("answered 500: ")
    assert cause.strip(" ."), reason
    assert cause.startswith(("it gave no reason", "'")), reason


@pytest.mark.parametrize("reason", ["", " "])
def test_a_failure_always_has_a_reason(reason: str) -> None:
    worker = RouterWorker("http://h:1", Role.DECODE)
    assert str(WorkerFailed(worker, reason, Outcome.SERVER_ERROR)).endswith("has failed and gave no reason")


async def test_a_connection_that_fails_without_a_text_is_named_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_: object, **__: Any) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuses)
    with pytest.raises(Unreachable, match=r"^cannot connect: ConnectionRefusedError$"):
        await Pool().acquire("http://127.0.0.1:9", 1.0)
