"""Workers that are down, fail, refuse, or come back: what the client gets, and that nothing is sent twice."""

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.errors import ConfigError
from kvferry.router.app import Router
from kvferry.router.settings import RouterSettings
from kvferry.web.listen import Listener
from tests.harness.scripted_worker import (
    FAST,
    STREAM,
    Asked,
    Script,
    a_decode,
    a_prefill,
    cutting,
    decode_script,
    fleet,
    hanging,
    refusing,
)
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post


async def test_without_a_reachable_prefill_decode_serves_alone_and_says_so() -> None:
    p, d = a_prefill(port=1), a_decode()
    async with fleet(p, d) as (url, _), aiohttp.ClientSession() as session:
        response, _raw = await post(url, BODY)
        assert response.status == 200
        assert response.headers["x-kvferry-route"] == "alone"
        assert "http://127.0.0.1:1" in response.headers["x-kvferry-why"]
        assert d.asked[0].headers["x-kvferry-why"] == response.headers["x-kvferry-why"]
        assert "kv_transfer_params" not in d.asked[0].body
        health = await (await session.get(f"{url}/health")).json()
        assert health["status"] == "degraded"
        metrics = await (await session.get(f"{url}/metrics")).text()
        assert "kvferry_router_decode_only_total 1.0" in metrics


@pytest.mark.parametrize("script", [cutting, refusing(500), refusing(503), refusing(429)])
async def test_a_prefill_that_fails_is_replaced_by_another(script: Script) -> None:
    bad, good, d = a_prefill("p0", script=script), a_prefill("p1"), a_decode()
    async with fleet(bad, good, d) as (url, _):
        for _ in range(2):
            response, _raw = await post(url, BODY)
            assert response.status == 200
            assert response.headers["x-kvferry-prefill"] == "p1"
    ids = [asked.body["kv_transfer_params"]["transfer_id"] for asked in [*bad.asked, *good.asked]]
    assert len(set(ids)) == len(ids) >= 3  # one transfer id per dispatch


@pytest.mark.parametrize("script", [cutting, refusing(500, "out of memory")])
async def test_when_every_prefill_fails_decode_serves_alone_with_the_reason(script: Script) -> None:
    p, d = a_prefill(script=script), a_decode()
    async with fleet(p, d) as (url, _):
        response, _raw = await post(url, BODY)
    assert response.status == 200
    assert response.headers["x-kvferry-route"] == "alone"
    assert "p0" in response.headers["x-kvferry-why"]
    assert len(p.asked) == 1


async def test_a_prefill_that_does_not_answer_in_time_is_given_up() -> None:
    p, d = a_prefill(script=hanging), a_decode()
    async with fleet(p, d, settings=RouterSettings(prefill_timeout_s=0.05)) as (url, _):
        response, _raw = await post(url, BODY)
        assert response.headers["x-kvferry-route"] == "alone"
        assert "has not begun to answer in 0.05 s" in response.headers["x-kvferry-why"]
        await until_async(lambda: p.asked[0].cancelled)


DEEP = b'{"x":' + b"[" * 100_000


@pytest.mark.parametrize("raw", [b"{", b"{}", b'{"choices": 3}', DEEP], ids=["cut", "empty", "number", "deep"])
async def test_a_prefill_answer_that_cannot_be_read_is_a_failure(raw: bytes) -> None:
    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        return web.Response(body=raw, content_type="application/json")

    async with fleet(a_prefill(script=script), a_decode()) as (url, _):
        response, _raw = await post(url, BODY)
    assert response.headers["x-kvferry-route"] == "alone"
    assert "cannot be read" in response.headers["x-kvferry-why"]


async def test_a_prefill_that_returns_no_parameters_is_reported() -> None:
    async with fleet(a_prefill(script=decode_script), a_decode()) as (url, _):
        response, _raw = await post(url, BODY)
    assert response.headers["x-kvferry-route"] == "alone"
    assert "no kv_transfer_params" in response.headers["x-kvferry-why"]


async def test_an_error_of_the_client_is_answered_by_prefill_and_not_retried() -> None:
    p0, p1, d = a_prefill("p0", refusing(400, "prompt too long")), a_prefill("p1", refusing(400)), a_decode()
    async with fleet(p0, p1, d) as (url, router):
        response, raw = await post(url, BODY)
        assert router.fleet.prefill[0].num_failures == 0
    assert response.status == 400
    assert json.loads(raw)["error"]["message"] == "prompt too long"
    assert (len(p0.asked) + len(p1.asked), d.asked) == (1, [])


async def test_an_unreachable_decode_is_503_with_its_name() -> None:
    async with fleet(a_prefill(), a_decode(port=1)) as (url, _), aiohttp.ClientSession() as session:
        response, raw = await post(url, BODY)
        error = json.loads(raw)["error"]
        assert (response.status, error["code"], response.headers["Retry-After"]) == (503, "no_decode_worker", "1")
        assert "http://127.0.0.1:1" in error["message"]
        assert (await session.get(f"{url}/health")).status == 503


async def test_a_decode_that_went_away_since_it_was_asked_is_502_with_its_name() -> None:
    p, d = a_prefill(), a_decode()
    async with fleet(p, d, settings=RouterSettings(health_every_s=1000, restart_wait_s=0)) as (url, _):
        await d.stop()
        response, raw = await post(url, BODY)
        assert response.status == 502
        assert f"decode d0 ({d.url}) cannot connect" in json.loads(raw)["error"]["message"]
        response, raw = await post(url, BODY)  # known to be down now
        assert response.status == 503


async def test_another_decode_that_was_never_reached_keeps_the_hand_off() -> None:
    p, d0, d1 = a_prefill(), a_decode("d0"), a_decode("d1")
    async with fleet(p, d0, d1, settings=RouterSettings(health_every_s=1000)) as (url, _):
        await d0.stop()
        response, _raw = await post(url, BODY)
    assert response.status == 200
    assert response.headers["x-kvferry-decode"] == "d1"
    assert len(p.asked) == 1


@pytest.mark.parametrize("script", [cutting, refusing(500)])
async def test_another_decode_after_one_that_was_reached_gets_a_new_hand_off(script: Script) -> None:
    p, d0, d1 = a_prefill(), a_decode("d0", script=script), a_decode("d1")
    async with fleet(p, d0, d1) as (url, _):
        response, _raw = await post(url, BODY)
    assert response.status == 200
    assert response.headers["x-kvferry-decode"] == "d1"
    ids = {asked.body["kv_transfer_params"]["transfer_id"] for asked in p.asked}
    assert len(ids) == 2


async def test_when_every_decode_is_full_the_client_is_asked_to_wait() -> None:
    async with fleet(a_prefill(), a_decode("d0", refusing(503)), a_decode("d1", refusing(429))) as (url, _):
        response, raw = await post(url, BODY)
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    message = json.loads(raw)["error"]["message"]
    assert "d0" in message
    assert "d1" in message
    assert "no room" in message


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_nothing_is_sent_twice_after_bytes_went_to_the_client(mode: str) -> None:
    async def breaking(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STREAM[:34])
        transport = request.transport
        assert transport is not None
        await until_async(lambda: not transport.get_write_buffer_size())
        return await cutting(request, asked)

    d0, d1 = a_decode("d0", breaking, mode=mode), a_decode("d1", breaking, mode=mode)
    async with fleet(a_prefill(mode=mode), d0, d1) as (url, _):
        response, raw = await post(url, {**BODY, "stream": True})
    assert response.status == 200
    assert raw.startswith(STREAM[:34])
    last = json.loads(raw[34:].decode().strip().removeprefix("data: "))
    assert "d0" in last["error"]["message"]
    assert b"[DONE]" not in raw
    assert len(d0.asked) + len(d1.asked) == 1


@pytest.mark.parametrize("whole", [False, True])
async def test_a_stream_that_breaks_before_its_first_byte_goes_elsewhere(whole: bool) -> None:
    async def headers_only(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response if whole else await cutting(request, asked)

    async with fleet(a_prefill(), a_decode("d0", headers_only), a_decode("d1")) as (url, _):
        response, raw = await post(url, {**BODY, "stream": True})
    assert (response.status, raw, response.headers["x-kvferry-decode"]) == (200, STREAM, "d1")


async def test_a_decode_that_does_not_begin_in_time_is_504_with_its_name() -> None:
    d = a_decode(script=hanging)
    async with fleet(a_prefill(), d, settings=RouterSettings(first_byte_timeout_s=0.05)) as (url, _):
        response, raw = await post(url, BODY)
        assert response.status == 504
        assert "decode d0" in json.loads(raw)["error"]["message"]
        assert "has not begun to answer in 0.05 s" in json.loads(raw)["error"]["message"]
        await until_async(lambda: d.asked[0].cancelled)


async def test_a_decode_that_pauses_for_too_long_ends_the_stream_with_an_error() -> None:
    async def pausing(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STREAM[:34])
        return await hanging(request, asked)

    d = a_decode(script=pausing)
    async with fleet(a_prefill(), d, settings=RouterSettings(between_bytes_timeout_s=0.05)) as (url, _):
        response, raw = await post(url, {**BODY, "stream": True})
        assert response.status == 200
        assert "paused for 0.05 s" in json.loads(raw[34:].decode().strip().removeprefix("data: "))["error"]["message"]
        await until_async(lambda: d.asked[0].cancelled)


async def test_several_choices_go_to_decode_although_the_first_has_ended() -> None:
    async def stopped(request: web.Request, asked: Asked) -> web.StreamResponse:
        return web.json_response({"choices": [{"finish_reason": "stop", "text": ""}]})

    d = a_decode()
    async with fleet(a_prefill(script=stopped), d) as (url, _):
        response, _raw = await post(url, {**BODY, "n": 2})
    assert response.headers["x-kvferry-route"] == "alone"
    assert "first token ended the first choice" in d.asked[0].headers["x-kvferry-why"]


async def test_at_most_the_allowed_number_of_workers_is_tried() -> None:
    prefill = [a_prefill(f"p{i}", refusing(500)) for i in range(4)]
    decode = [a_decode(f"d{i}", refusing(500)) for i in range(4)]
    async with fleet(*prefill, *decode, settings=RouterSettings(max_attempts=2)) as (url, _):
        response, _raw = await post(url, BODY)
    assert response.status == 502
    assert sum(len(worker.asked) for worker in prefill) == 2
    assert sum(len(worker.asked) for worker in decode) == 2


async def test_push_does_not_leave_decode_waiting_for_a_prefill_that_failed() -> None:
    async def waits_for_kv(request: web.Request, asked: Asked) -> web.StreamResponse:
        handed = asked.body.get("kv_transfer_params")
        return await (hanging if handed else decode_script)(request, asked)

    p, d = a_prefill(script=refusing(500), mode="push"), a_decode(script=waits_for_kv, mode="push")
    async with fleet(p, d) as (url, _):
        response, _raw = await post(url, BODY)
        assert response.headers["x-kvferry-route"] == "alone"
        assert "p0" in response.headers["x-kvferry-why"]
        assert [asked.cancelled for asked in d.asked] == [True, False]


async def test_a_worker_that_comes_back_is_used_again() -> None:
    p, d = a_prefill(), a_decode()
    async with fleet(p, d) as (url, router):
        await d.stop()
        await until_async(lambda: router.fleet.decode[0].down is not None)
        assert (await post(url, BODY))[0].status == 503
        assert d.info is not None
        d.info["incarnation"] = "i2"
        await d.start()
        await until_async(lambda: router.fleet.decode[0].down is None)
        assert (await post(url, BODY))[0].status == 200


async def test_a_draining_worker_gets_nothing_new() -> None:
    p, d0, d1 = a_prefill(), a_decode("d0"), a_decode("d1")
    async with fleet(p, d0, d1) as (url, router):
        assert d0.info is not None
        d0.info["state"] = "draining"
        await until_async(lambda: router.fleet.decode[0].unusable_reason is not None)
        for _ in range(3):
            await post(url, BODY)
        assert (len(d0.asked), len(d1.asked)) == (0, 3)


async def test_push_and_pull_workers_are_never_paired() -> None:  # R13
    p_pull, p_push, d = a_prefill("p0"), a_prefill("p1", mode="push"), a_decode(mode="push")
    async with fleet(p_pull, p_push, d) as (url, _), aiohttp.ClientSession() as session:
        for _ in range(2):
            assert (await post(url, BODY))[0].status == 200
        view = await (await session.get(f"{url}/v1/kvferry")).json()
    assert (len(p_pull.asked), len(p_push.asked)) == (0, 2)
    assert [pair["why_not"] is None for pair in view["pairs"]] == [False, True]
    assert "--transfer-mode" in view["pairs"][0]["why_not"]


async def test_a_pair_whose_facts_differ_is_not_used() -> None:  # R1
    p, d = a_prefill(), a_decode()
    assert p.info is not None
    assert d.info is not None
    p.info["facts"] = {"model.dtype": {"value": "bfloat16", "class": "must match"}}
    d.info["facts"] = {"model.dtype": {"value": "float32", "class": "must match"}}
    async with fleet(p, d) as (url, _):
        response, _raw = await post(url, BODY)
    assert p.asked == []
    assert "model.dtype" in response.headers["x-kvferry-why"]


async def test_a_worker_with_the_wrong_role_is_not_used() -> None:
    p, d = a_prefill(), a_decode()
    assert p.info is not None
    p.info["role"] = "decode"
    async with fleet(p, d) as (url, _):
        response, _raw = await post(url, BODY)
    assert p.asked == []
    assert "give it as --decode" in response.headers["x-kvferry-why"]


async def test_a_server_that_is_no_kvferry_worker_is_reported() -> None:
    p, d = a_prefill(), a_decode()
    p.info = None
    async with fleet(p, d) as (url, _):
        response, _raw = await post(url, BODY)
    assert "GET /version 404, so it is neither a kvferry worker nor a vLLM server" in response.headers["x-kvferry-why"]


async def test_a_worker_with_an_invalid_description_is_asked_again() -> None:
    raw = DEEP

    async def describe(_: web.Request) -> web.Response:
        return web.Response(body=raw)

    app = web.Application()
    app.router.add_get("/v1/kvferry", describe)
    listener = Listener(app, "127.0.0.1", 0, shutdown_s=0.1)
    await listener.start()
    router = Router([], [listener.url], FAST)
    await router._on_startup(router.app)
    try:
        [worker] = router.fleet.decode
        assert "cannot be read: RecursionError" in str(worker.down)
        raw = b"{"
        await until_async(lambda: "did not return what a worker" in str(worker.down))
    finally:
        await router._on_cleanup(router.app)
        await listener.stop()


@pytest.mark.parametrize(
    ("raw", "param", "part"),
    [
        (b"{", None, "not valid JSON"),
        (b"[]", None, "send one JSON object"),
        (b'{"n": "x"}', "n", "n='x': expected `int | null`"),
        (b'{"n": 0}', "n", "n=0: send 1 or more"),
    ],
)
async def test_bad_bodies_end_at_the_router(raw: bytes, param: str | None, part: str) -> None:
    p, d = a_prefill(), a_decode()
    async with (
        fleet(p, d) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", data=raw) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param)
    assert part in error["message"]
    assert (p.asked, d.asked) == ([], [])


async def test_a_body_over_the_limit_is_413() -> None:
    async with fleet(a_prefill(), a_decode(), settings=RouterSettings(max_body_bytes=1000)) as (url, _):
        response, raw = await post(url, {**BODY, "prompt": "x" * 2000})
    assert response.status == 413
    assert "1000 are accepted" in json.loads(raw)["error"]["message"]


async def test_models_and_fleet_view() -> None:
    async with fleet(a_prefill(), a_decode()) as (url, _), aiohttp.ClientSession() as session:
        models = await (await session.get(f"{url}/v1/models")).json()
        view: dict[str, Any] = await (await session.get(f"{url}/v1/kvferry")).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert [(w["engine"], w["role"], w["usable"]) for w in view["workers"]] == [
        ("p0", "prefill", True),
        ("d0", "decode", True),
    ]
    [pair] = view["pairs"]
    assert (pair["prefill"], pair["decode"], pair["why_not"], pair["breaker"]) == ("p0", "d0", None, "closed")
    assert (view["status"], view["policies"]["decode"]) == ("ok", "least_loaded")


def test_invalid_addresses_and_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'localhost:1' must begin with http"):
        Router([], ["localhost:1"])
    for host in ("x..y", "x" * 64 + ".example"):
        with pytest.raises(ConfigError, match="idna"):
            Router([], [f"http://{host}:1"])
    with pytest.raises(ConfigError, match="add --decode URL"):
        Router(["http://p"], [])
    with pytest.raises(ConfigError, match=r"router.health_every_s=0"):
        RouterSettings(health_every_s=0)
    with pytest.raises(ConfigError, match=r"router.hung_after_s=-1"):
        RouterSettings(hung_after_s=-1)
    assert RouterSettings(hung_after_s=0).hung_after_s == 0
    assert FAST.health_every_s < 1


async def test_a_message_names_each_worker_once() -> None:
    """Not "d0 is down: d0 cannot connect", and not "d0 is left alone: ... the last: d0 answered 500"."""
    bad, d = a_prefill("p0", refusing(500)), a_decode()
    settings = RouterSettings(health_every_s=0.05, restart_wait_s=0, breaker_failures=1, breaker_open_s=60.0)
    async with fleet(bad, d, settings=settings) as (url, router):
        why = [(await post(url, BODY))[0].headers["x-kvferry-why"] for _ in range(2)]
        assert "is left alone: 1 failures in a row" in why[1]
        assert [text.count(bad.url) for text in why] == [1, 1]
        await d.stop()
        await until_async(lambda: router.fleet.decode[0].down is not None)
        response, raw = await post(url, BODY)
        assert response.status == 503
        message = json.loads(raw)["error"]["message"]
        assert f"d0 ({d.url}) is down: cannot connect" in message
        assert message.count(d.url) == message.count("d0") == 1
