"""Which names a fleet serves, which workers get a request for one, and what an unknown name gets."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from kvferry.router.fleet.worker import Source
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role
from tests.harness.scripted_vllm import VllmServer
from tests.harness.scripted_worker import Worker, a_decode, a_prefill, fleet
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post


def named(worker: Worker, *names: str, **card: Any) -> Worker:
    assert worker.info is not None
    worker.info |= {"model": names[0], "models": [{"id": name, **card} for name in names]}
    return worker


async def get(url: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.json()


async def test_the_list_has_each_name_of_a_decode_worker_with_the_longest_request_of_any() -> None:
    first = named(a_decode("d0"), "b", "org/a", created=7, root="/models/a", max_model_len=300)
    second = named(a_decode("d1"), "org/a", max_model_len=900)
    assert first.info is not None
    first.info |= {"limits": {"tokens": 200}}
    async with fleet(named(a_prefill(), "only-prefill"), first, second) as (url, _):
        status, models = await get(f"{url}/v1/models")
        assert (status, models["object"]) == (200, "list")
        assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("b", 200), ("org/a", 900)]
        assert models["data"][1] == {
            "id": "org/a", "object": "model", "created": 7, "owned_by": "kvferry", "root": "/models/a", "parent": None,
            "max_model_len": 900,
        }  # fmt: skip
        assert await get(f"{url}/v1/models/org/a") == (200, models["data"][1])


async def test_the_card_of_an_unknown_name_is_404_and_names_the_known_ones() -> None:
    async with fleet(a_prefill(), named(a_decode(), "a", "b")) as (url, _):
        status, body = await get(f"{url}/v1/models/c")
    assert status == 404
    assert (body["error"]["code"], body["error"]["param"]) == ("model_not_found", "model")
    assert body["error"]["message"] == "model='c' is not served here: send 'a' or 'b'"


@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_a_name_that_no_worker_serves_is_404_and_no_worker_is_asked(max_tokens: int) -> None:
    p, d = named(a_prefill(), "a"), named(a_decode(), "a", "b")
    async with fleet(p, d) as (url, _):
        response, raw = await post(url, {**BODY, "model": "c", "max_tokens": max_tokens})
    assert response.status == 404
    assert json.loads(raw)["error"]["message"] == "model='c' is not served here: send 'a' or 'b'"
    assert (p.asked, d.asked) == ([], [])


async def test_a_request_goes_only_to_workers_that_serve_its_name() -> None:
    p, d, other = named(a_prefill(), "a"), named(a_decode("d0"), "a", "b"), named(a_decode("d1"), "a")
    async with fleet(p, d, other) as (url, _):
        for _ in range(4):
            response, _raw = await post(url, {**BODY, "model": "b"})
            assert response.headers["x-kvferry-route"] == "alone"
            assert "p0 does not serve the model 'b'" in response.headers["x-kvferry-why"]
    assert (len(p.asked), len(d.asked), len(other.asked)) == (0, 4, 0)


async def test_an_open_breaker_of_the_only_worker_of_a_name_sends_nothing_elsewhere() -> None:
    """Workers of other models that are well are no better choice than the one whose breaker is open."""
    d, other = named(a_decode("d0"), "a"), named(a_decode("d1"), "b")
    async with fleet(d, other) as (url, router):
        for _ in range(5):
            router.fleet.decode[0].breaker.failed(0.0, "test")
        response, _ = await post(url, {**BODY, "model": "a"})
    assert response.status == 200
    assert (len(d.asked), len(other.asked)) == (1, 0)


async def test_while_a_worker_has_never_answered_a_name_is_not_known_to_be_unknown() -> None:
    silent = a_decode("d1")
    silent.port = 1
    async with fleet(a_prefill(), named(a_decode(), "a"), silent) as (url, _):
        response, raw = await post(url, {**BODY, "model": "b"})
    assert response.status == 503
    assert json.loads(raw)["error"]["code"] == "no_decode_worker"


async def test_a_worker_that_does_not_state_its_names_gets_every_request() -> None:
    d = a_decode()
    assert d.info is not None
    del d.info["model"]
    async with fleet(d) as (url, _):
        response, _ = await post(url, {**BODY, "model": "any"})
    assert response.status == 200


async def test_an_adapter_that_a_vllm_server_has_loaded_meanwhile_is_found() -> None:
    d = VllmServer("engine-d", "decode")
    async with fleet(d, settings=RouterSettings(health_every_s=0.05, restart_wait_s=0)) as (url, router):
        await until_async(lambda: router.fleet.decode[0].info is not None)
        d.models = ("tiny", "adapter")
        response, _ = await post(url, {**BODY, "model": "adapter"})
        assert response.status == 200
        _, models = await get(f"{url}/v1/models")
    assert [card["id"] for card in models["data"]] == ["adapter", "tiny"]


async def test_vllm_servers_are_asked_again_for_unknown_names_at_most_once_per_health_check() -> None:
    d = VllmServer("engine-d", "decode")
    async with fleet(d, settings=RouterSettings(health_every_s=60.0, restart_wait_s=0)) as (url, _):
        before = d.num_models_asked
        for _ in range(5):
            response, _raw = await post(url, {**BODY, "model": "typo"})
            assert response.status == 404
    assert d.num_models_asked - before == 1


async def test_names_of_a_worker_that_has_just_left_are_waited_for() -> None:
    """A registered worker leaves when it restarts: 404 would end its clients for good."""
    a, b = named(a_decode("d0"), "a"), named(a_decode("d1"), "b")
    async with fleet(a, b, settings=RouterSettings(health_every_s=0.05, restart_wait_s=60.0)) as (url, router):
        router.fleet.remove(router.fleet.decode[1], "test")
        asking = asyncio.create_task(post(url, {**BODY, "model": "b"}))
        await until_async(lambda: router.context.admission.num_waiting == 1)
        typo, _ = await post(url, {**BODY, "model": "c"})
        assert typo.status == 404
        router.fleet.add(b.url, Role.DECODE, Source.REGISTERED)
        response, _ = await asking
    assert (response.status, response.headers["x-kvferry-decode"]) == (200, "d1")
