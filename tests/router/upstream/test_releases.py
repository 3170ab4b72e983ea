"""R25: a hand-off that no peer will take is given up at once, not when its lease ends."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.router.app import Router
from kvferry.router.settings import RouterSettings
from tests.harness.scripted_worker import (
    FAST,
    Asked,
    Script,
    Worker,
    a_decode,
    a_prefill,
    cutting,
    fleet,
    hanging,
    prefill_script,
    refusing,
)
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post


def ids_of(worker: Worker) -> list[str]:
    """Returns the transfers that it was asked to compute."""
    return [asked.body["kv_transfer_params"]["transfer_id"] for asked in worker.asked]


def given_up(worker: Worker) -> list[str]:
    return [one["transfer_id"] for one in worker.released]


async def settled(router: Router) -> None:
    """Waits until no message of the router is in flight."""
    await until_async(lambda: not router._releases._tasks)


async def hang_up(url: str, when: Worker) -> None:
    """Sends a request, and closes the connection when that worker works on it."""
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(f"{url}/v1/completions", json=BODY))
        await until_async(lambda: bool(when.asked))
        asking.cancel()


async def test_an_answered_request_gives_nothing_up() -> None:
    p, d = a_prefill(), a_decode()
    async with fleet(p, d) as (url, router):
        assert (await post(url, BODY))[0].status == 200
        assert (await post(url, {**BODY, "stream": True}))[0].status == 200
        await settled(router)
    assert len(p.asked) == 2
    assert not p.released


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_client_that_hangs_up_before_decode_has_begun(mode: str) -> None:
    p, d = a_prefill(mode=mode), a_decode(script=hanging, mode=mode)
    async with fleet(p, d) as (url, _):
        await hang_up(url, d)
        await until_async(lambda: bool(p.released))
    assert given_up(p) == ids_of(p)


async def test_a_client_that_hangs_up_while_prefill_computes() -> None:
    """Its answer may be in flight: no peer would take the hand-off that it offers."""
    p, d = a_prefill(script=hanging), a_decode()
    async with fleet(p, d) as (url, _):
        await hang_up(url, p)
        await until_async(lambda: bool(p.released))
    assert given_up(p) == ids_of(p)


async def test_no_decode_worker_can_be_reached() -> None:
    d = a_decode()

    async def and_decode_is_gone(request: web.Request, asked: Asked) -> web.StreamResponse:
        await d.stop()
        return await prefill_script(request, asked)

    p = a_prefill(script=and_decode_is_gone)
    async with fleet(p, d, settings=RouterSettings(health_every_s=60, restart_wait_s=0)) as (url, _):
        assert (await post(url, BODY))[0].status == 502
        await until_async(lambda: bool(p.released))
    assert given_up(p) == ids_of(p)


async def test_another_decode_worker_takes_the_same_hand_off() -> None:
    both = [a_decode("d0"), a_decode("d1")]

    async def and_the_next_one_is_gone(request: web.Request, asked: Asked) -> web.StreamResponse:
        picked = next(worker for worker in router.fleet.decode if worker.num_open or worker.name == "d0")
        await both[int(picked.name[1])].stop()
        return await prefill_script(request, asked)

    p = a_prefill(script=and_the_next_one_is_gone)
    async with fleet(p, *both, settings=RouterSettings(health_every_s=60)) as (url, router):
        assert (await post(url, BODY))[0].status == 200
        await settled(router)
    assert len(p.asked) == 1
    assert not p.released


async def test_a_new_dispatch_gives_the_old_one_up() -> None:
    p, bad, good = a_prefill(), a_decode("d0", script=cutting), a_decode("d1")
    async with fleet(p, bad, good) as (url, router):
        for _ in range(2):
            assert (await post(url, BODY))[0].status == 200
        await settled(router)
    assert bad.asked, "the worker that breaks was never chosen: this proves nothing"
    broken = [asked.body["kv_transfer_params"] for asked in bad.asked]
    assert len(given_up(p)) == len(broken)
    assert len(ids_of(p)) == len(broken) + 2
    taken = set(ids_of(p)) - set(given_up(p))
    assert len(taken) == 2


async def test_a_hand_off_that_decode_recomputed_is_given_up() -> None:
    async def recomputing(request: web.Request, asked: Asked) -> web.StreamResponse:
        headers = {"x-kvferry-handed-over": "0", "x-kvferry-why": "p0 does not fit"}
        return web.json_response({"choices": [{"finish_reason": "length", "text": "ab"}]}, headers=headers)

    p, d = a_prefill(), a_decode(script=recomputing)
    async with fleet(p, d) as (url, _):
        assert (await post(url, BODY))[0].status == 200
        await until_async(lambda: bool(p.released))
    assert given_up(p) == ids_of(p)


@pytest.mark.parametrize(
    ("script", "expected"),
    [(refusing(503), 0), (refusing(400), 0), (cutting, 1), (hanging, 1)],
    ids=["says 503", "says 400", "is cut off", "is silent"],
)
async def test_a_prefill_that_fails(script: Script, expected: int) -> None:
    """A prefill that reports its failure has nothing left of it; a silent one may have."""
    p, d = a_prefill(script=script), a_decode()
    async with fleet(p, d, settings=RouterSettings(prefill_timeout_s=0.1)) as (url, router):
        await post(url, BODY)
        await until_async(lambda: len(p.released) == expected)
        await settled(router)
    assert len(p.released) == expected


async def test_a_prefill_worker_that_does_not_answer_delays_no_client() -> None:
    started, ended = 0, 0

    class Deaf(Worker):
        async def _release(self, request: web.Request) -> web.Response:
            nonlocal started, ended
            started += 1
            try:
                await asyncio.Event().wait()
            finally:
                ended += 1
            raise AssertionError("never woken")

    p, d = Deaf("p0", prefill_script, "prefill"), a_decode(script=refusing(400))
    async with fleet(p, d, settings=RouterSettings(**{**_fields(FAST), "release_timeout_s": 0.2})) as (url, router):
        assert (await post(url, BODY))[0].status == 400
        await until_async(lambda: started == 1)
        await settled(router)
        await until_async(lambda: ended == 1)


def _fields(settings: RouterSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}
