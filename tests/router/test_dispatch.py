"""Which worker gets which request, and when."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.harness.scripted_worker import (
    PARAMS,
    STREAM,
    Asked,
    a_decode,
    a_prefill,
    decode_script,
    fleet,
    hanging,
    prefill_script,
)
from tests.harness.until import until_async

BODY: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 9, "stream": False, "unknown": {"x": [1]}}


async def post(url: str, body: Any, path: str = "/v1/completions", **more: Any) -> tuple[aiohttp.ClientResponse, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body, **more) as response:
        return response, await response.read()


async def test_pull_asks_prefill_then_decode_with_prefills_own_bytes() -> None:  # R12, R15, R16
    p, d = a_prefill(), a_decode()
    async with fleet(p, d) as (url, _):
        response, raw = await post(url, {**BODY, "min_tokens": 4, "n": 3, "stream_options": None})
    assert response.status == 200
    assert raw == b'{"choices":[{"finish_reason":"length","text":"ab"}], "n":1.0}'
    [to_p], [to_d] = p.asked, d.asked
    outcome = to_p.body["kv_transfer_params"]
    assert (to_p.body["max_tokens"], to_p.body["min_tokens"], to_p.body["n"], to_p.body["stream"]) == (1, 1, 1, False)
    assert (outcome["do_remote_decode"], outcome["do_remote_prefill"]) == (True, False)
    assert outcome["transfer_id"].startswith("xfer-")
    assert "stream_options" not in to_p.body
    assert PARAMS in to_d.raw
    assert (to_d.body["max_tokens"], to_d.body["min_tokens"], to_d.body["n"]) == (9, 4, 3)
    assert to_d.body["unknown"] == to_p.body["unknown"] == {"x": [1]}
    assert to_p.headers["x-request-id"] == to_d.headers["x-request-id"] == response.headers["X-Request-Id"]
    assert "x-kvferry-why" not in to_d.headers


async def test_pull_never_asks_decode_before_prefill_has_answered() -> None:  # R12
    answer = asyncio.Event()

    async def slow(request: web.Request, asked: Asked) -> web.StreamResponse:
        await answer.wait()
        return await prefill_script(request, asked)

    p, d = a_prefill(script=slow), a_decode()
    async with fleet(p, d) as (url, _):
        pending = asyncio.create_task(post(url, BODY))
        await until_async(lambda: len(p.asked) == 1)
        assert d.asked == []
        answer.set()
        await pending
        assert len(d.asked) == 1


async def test_push_asks_both_at_once_with_one_transfer_id() -> None:  # R16, R17
    both_asked = asyncio.Event()

    async def meeting(request: web.Request, asked: Asked) -> web.StreamResponse:
        if p.asked and d.asked:
            both_asked.set()
        await both_asked.wait()  # a sequential router would hang here
        return await (decode_script if 'do_remote_prefill":true' in asked.raw.decode() else prefill_script)(
            request, asked
        )

    p, d = a_prefill(script=meeting, mode="push"), a_decode(script=meeting, mode="push")
    async with fleet(p, d) as (url, _):
        response, _ = await post(url, {**BODY, "stream": True})
    assert response.status == 200
    assert response.headers["x-kvferry-route"] == "push"
    to_p, to_d = p.asked[0].body["kv_transfer_params"], d.asked[0].body["kv_transfer_params"]
    assert to_p["transfer_id"] == to_d["transfer_id"]
    assert to_d == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_mode": "push",
        "transfer_id": to_p["transfer_id"],
        "remote_engine_id": "p0",
        "remote_incarnation": "i1",
        "remote_host": "10.0.0.1",
        "remote_port": 77,
    }


async def test_streams_pass_unchanged_and_headers_say_which_workers_served() -> None:
    p, d = a_prefill(), a_decode()
    async with fleet(p, d) as (url, _):
        response, raw = await post(url, {**BODY, "stream": True}, headers={"X-Request-Id": "r1"})
    assert raw == STREAM
    expected = {
        "x-kvferry-route": "pull",
        "x-kvferry-prefill": "p0",
        "x-kvferry-decode": "d0",
        "x-kvferry-handed-over": "5",
        "X-Request-Id": "r1",
    }
    assert {name: response.headers.get(name) for name in expected} == expected
    assert response.content_type == "text/event-stream"
    assert "x-secret" not in response.headers


async def test_the_first_chunk_reaches_the_client_before_the_last_is_made() -> None:
    go_on = asyncio.Event()

    async def two_parts(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STREAM[:20])
        await go_on.wait()
        await response.write(STREAM[20:])
        return response

    async with (
        fleet(a_prefill(), a_decode(script=two_parts)) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        assert await response.content.read(20) == STREAM[:20]
        go_on.set()
        assert await response.content.read() == STREAM[20:]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_an_answer_that_stops_at_its_first_token_comes_from_prefill(stream: bool, chat: bool) -> None:
    async def stopped(request: web.Request, asked: Asked) -> web.StreamResponse:
        text: dict[str, Any] = {"message": {"role": "assistant", "content": "a"}} if chat else {"text": "a"}
        kind = "chat.completion" if chat else "text_completion"
        answer = {
            "id": "x",
            "object": kind,
            "created": 1,
            "model": "tiny",
            "choices": [{"index": 0, "finish_reason": "stop", **text}],
            "usage": {"completion_tokens": 1},
            "kvferry": {"prefill": "p0"},
            "kv_transfer_params": {"remote_host": "secret"},
        }
        return web.json_response(answer)

    p, d = a_prefill(script=stopped), a_decode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with fleet(p, d) as (url, _):
        body = {**BODY, "stream": stream, "stream_options": {"include_usage": True}}
        response, raw = await post(url, body, path)
    assert d.asked == []
    assert response.headers["x-kvferry-route"] == "prefill"
    assert b"secret" not in raw
    if not stream:
        assert json.loads(raw)["choices"][0]["finish_reason"] == "stop"
        return
    events = raw.decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    first, last = (json.loads(event.removeprefix("data: ")) for event in events[:-1])
    shown = first["choices"][0]["delta"]["content"] if chat else first["choices"][0]["text"]
    assert (shown, first["choices"][0]["finish_reason"]) == ("a", "stop")
    assert first["object"] == ("chat.completion.chunk" if chat else "text_completion")
    assert (last["choices"], last["usage"], last["kvferry"]) == ([], {"completion_tokens": 1}, {"prefill": "p0"})


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_one_token_is_an_ordinary_request_to_prefill(limit: str) -> None:
    p, d = a_prefill(script=decode_script), a_decode()
    async with fleet(p, d) as (url, _):
        path = "/v1/chat/completions" if limit == "max_completion_tokens" else "/v1/completions"
        response, raw = await post(url, {**BODY, "max_tokens": 9, limit: 1, "stream": True}, path)
    assert (raw, d.asked) == (STREAM, [])
    assert "kv_transfer_params" not in p.asked[0].body
    assert p.asked[0].body["stream"] is True
    assert response.headers["x-kvferry-route"] == "prefill"


async def test_several_prompts_go_to_decode_alone_with_the_reason() -> None:
    p, d = a_prefill(), a_decode()
    async with fleet(p, d) as (url, _):
        response, _ = await post(url, {**BODY, "prompt": ["a", "b"]})
    assert p.asked == []
    assert "2 prompts" in d.asked[0].headers["x-kvferry-why"]
    assert response.headers["x-kvferry-why"] == d.asked[0].headers["x-kvferry-why"]


async def test_the_clients_own_parameters_of_a_hand_off_are_dropped() -> None:
    p, d = a_prefill(script=decode_script), a_decode()
    async with fleet(p, d) as (url, _):
        evil = {**BODY, "kv_transfer_params": {"remote_host": "evil"}}
        for body in (evil, {**evil, "max_tokens": 1}, {**evil, "prompt": ["a", "b"]}):
            await post(url, body)
    asked = [*p.asked, *d.asked]
    assert len(asked) == 4
    assert not [one for one in asked if b"evil" in one.raw]


async def test_work_is_shared() -> None:
    workers = [a_prefill("p0"), a_prefill("p1"), a_decode("d0"), a_decode("d1")]
    async with fleet(*workers) as (url, _):
        for _ in range(4):
            await post(url, BODY)
    assert [len(worker.asked) for worker in workers] == [2, 2, 2, 2]


async def test_a_busy_worker_gets_less() -> None:
    d0, d1 = a_decode("d0", script=hanging), a_decode("d1")
    async with fleet(a_prefill(), d0, d1) as (url, _):
        stuck = asyncio.create_task(post(url, BODY))
        await until_async(lambda: len(d0.asked) + len(d1.asked) == 1)
        for _ in range(3):
            await post(url, BODY)
        assert (len(d0.asked), len(d1.asked)) == (1, 3)
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)


async def test_a_client_that_hangs_up_aborts_prefill() -> None:
    p, d = a_prefill(script=hanging), a_decode()
    async with fleet(p, d) as (url, router):
        pending = asyncio.create_task(post(url, BODY))
        await until_async(lambda: len(p.asked) == 1)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await until_async(lambda: p.asked[0].cancelled)
        assert d.asked == []
        await until_async(lambda: all(worker.num_open == 0 for worker in router.fleet.workers))


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_client_that_hangs_up_aborts_decode_and_both_in_push(mode: str) -> None:
    async def endless(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STREAM[:20])
        return await hanging(request, asked)

    p = a_prefill(script=hanging if mode == "push" else prefill_script, mode=mode)
    d = a_decode(script=endless, mode=mode)
    async with fleet(p, d) as (url, router):
        async with aiohttp.ClientSession() as session:
            response = await session.post(f"{url}/v1/completions", json={**BODY, "stream": True})
            await response.content.read(20)
            response.close()
        await until_async(lambda: d.asked[0].cancelled and (mode == "pull" or p.asked[0].cancelled))
        await until_async(lambda: all(worker.num_open == 0 for worker in router.fleet.workers))
