"""The client's stream begins with prefill's first token; decode's first event, which repeats it, is dropped."""

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvferry.router.answer.first_event import FirstEvent, early_event
from kvferry.router.client_body import ClientBody
from kvferry.router.settings import FirstToken, RouterSettings
from kvferry.web.body_fields import fields_of
from tests.harness.scripted_worker import (  # fmt: skip
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

PARAMS = {"transfer_mode": "pull", "remote_engine_id": "p0", "first_token": 7}
STREAM = {**BODY, "stream": True}


def an_answer(text: str = "a", chat: bool = False, **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    kind = "chat.completion" if chat else "text_completion"
    return {
        "id": "cmpl-1", "object": kind, "created": 1, "model": "tiny",
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1}, "kvferry": {"recomputed": 5},
        "kv_transfer_params": PARAMS, **more,
    }  # fmt: skip


def prefilling(text: str = "a", chat: bool = False) -> Script:
    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        return web.json_response(an_answer(text, chat))

    return script


def event(text: str, chat: bool = False, finish: str | None = None) -> bytes:
    said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    return b"data: " + msgspec.json.encode({"choices": [{"index": 0, **said, "finish_reason": finish}]}) + b"\n\n"


def decoding(*parts: bytes, go_on: asyncio.Event | None = None) -> Script:
    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        if go_on is not None:
            await go_on.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        await response.write_eof()
        return response

    return script


def workers(prefill: Script, decode: Script, mode: str = "pull") -> tuple[Worker, Worker]:
    p, d = a_prefill(script=prefill, mode=mode), a_decode(script=decode, mode=mode)
    assert d.info is not None
    d.info["abilities"] = ["first-token"]
    return p, d


REST = event("b") + event("c", finish="length") + b"data: [DONE]\n\n"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_the_first_token_comes_before_decode_has_begun(mode: str, chat: bool) -> None:
    go_on = asyncio.Event()
    rest = REST.replace(b'"text"', b'"text"')
    p, d = workers(
        prefilling("a", chat), decoding(event("a", chat)[:9], event("a", chat)[9:] + rest, go_on=go_on), mode
    )
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with (
        fleet(p, d) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(url + path, json={**STREAM, "temperature": 0}) as response,
    ):
        first = await response.content.readuntil(b"\n\n")
        chunk = json.loads(first.removeprefix(b"data: "))
        [choice] = chunk["choices"]
        assert (choice["delta"]["content"] if chat else choice["text"]) == "a"
        assert (choice["finish_reason"], chunk["id"], "kvferry" in chunk) == (None, "cmpl-1", False)
        assert chunk["object"] == ("chat.completion.chunk" if chat else "text_completion")
        assert response.headers["x-kvferry-first-token"] == "prefill"
        assert response.headers["x-kvferry-route"] == mode
        go_on.set()
        assert await response.content.read() == rest
    sent_to_d = d.asked[0].headers.get("x-kvferry-first-token")
    assert sent_to_d == ("sent" if mode == "pull" else None)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"stop": ["x"]}, "a"),
        ({"n": 2}, "a"),
        ({}, ""),
        ({}, "\ufffd"),
    ],
    ids=["a stop string may begin here", "several choices", "no text yet", "half a character"],
)
async def test_an_incomplete_first_token_waits_for_decode(more: dict[str, Any], text: str) -> None:
    whole = event("a") + REST
    p, d = workers(prefilling(text), decoding(whole))
    async with fleet(p, d) as (url, _):
        response, raw = await post(url, {**STREAM, **more})
    assert raw == whole
    assert "x-kvferry-first-token" not in response.headers


@pytest.mark.parametrize("how", ["it does not know how", "switched off", "push that draws"])
async def test_a_first_token_that_decode_may_replace_waits_for_decode(how: str) -> None:
    whole = event("a") + REST
    p, d = workers(prefilling(), decoding(whole), "push" if how == "push that draws" else "pull")
    settings = FAST
    if how == "it does not know how":
        assert d.info is not None
        del d.info["abilities"]
    elif how == "switched off":
        settings = RouterSettings(health_every_s=0.05, first_token=FirstToken.DECODE)
    async with fleet(p, d, settings=settings) as (url, _):
        response, raw = await post(url, {**STREAM, "temperature": 0.7})
    assert raw == whole
    assert "x-kvferry-first-token" not in response.headers


@pytest.mark.parametrize("failing", [refusing(500), cutting], ids=["500", "cut"])
async def test_another_decode_continues_from_it_with_the_same_hand_off(failing: Script) -> None:
    p, d = workers(prefilling(), failing)
    other = a_decode("d1", script=decoding(event("a") + REST))
    assert other.info is not None
    other.info["abilities"] = ["first-token"]
    async with fleet(p, d, other) as (url, _):
        _, raw = await post(url, STREAM)
        if not d.asked:
            _, raw = await post(url, STREAM)
    assert raw.endswith(REST)
    assert raw.count(b'"text":"a"') == 1
    assert len(p.asked) == len(other.asked)  # nothing was prefilled twice
    assert other.asked[-1].body["kv_transfer_params"] == d.asked[-1].body["kv_transfer_params"]


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("failing", [refusing(500), refusing(422)], ids=["500", "a client's error"])
async def test_the_stream_reports_it_if_decode_fails_after_it(mode: str, failing: Script) -> None:
    begun = asyncio.Event()

    async def later(request: web.Request, asked: Asked) -> web.StreamResponse:
        await begun.wait()  # prefill's token has reached the client
        return await failing(request, asked)

    p, d = workers(prefilling(), later, mode)
    async with (
        fleet(p, d) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json={**STREAM, "temperature": 0}) as response,
    ):
        first = await response.content.readuntil(b"\n\n")
        begun.set()
        raw = first + await response.read()
    assert response.status == 200
    events = raw.decode().strip().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "a"
    assert "no room" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in raw.decode()
    assert len(p.asked) == 1


async def test_another_first_token_of_decode_ends_the_stream_with_an_error() -> None:
    p, d = workers(prefilling("a"), decoding(event("b") + REST))
    async with fleet(p, d) as (url, _):
        _, raw = await post(url, STREAM)
    last = json.loads(raw.decode().strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "first_token_differs"
    assert "'b' after 'a'" in last["error"]["message"]
    assert b"[DONE]" not in raw


async def test_a_client_that_hangs_up_after_it_aborts_decode() -> None:
    p, d = workers(prefilling("a"), hanging)
    async with fleet(p, d) as (url, router):
        async with aiohttp.ClientSession() as session:
            response = await session.post(f"{url}/v1/completions", json=STREAM)
            await response.content.readuntil(b"\n\n")
            await until_async(lambda: bool(d.asked))
            response.close()
        await until_async(lambda: d.asked[0].cancelled)
        await until_async(lambda: all(worker.num_open == 0 for worker in router.fleet.workers))
    assert [one["transfer_id"] for one in p.released] == [p.asked[0].body["kv_transfer_params"]["transfer_id"]]


async def test_an_event_with_more_than_the_first_token_keeps_the_rest() -> None:
    p, d = workers(prefilling("a"), decoding(event("ab", finish="length") + b"data: [DONE]\n\n"))
    async with fleet(p, d) as (url, _):
        _, raw = await post(url, STREAM)
    events = [json.loads(one.removeprefix("data: ")) for one in raw.decode().strip().split("\n\n")[:-1]]
    assert [one["choices"][0]["text"] for one in events] == ["a", "b"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("chat", [False, True])
def test_tokens_of_the_first_event_are_not_repeated_with_the_rest(chat: bool) -> None:
    def an_event(*texts: str) -> bytes:
        logprobs: dict[str, Any] = {
            "tokens": list(texts), "token_logprobs": [-1.0] * len(texts), "top_logprobs": None,
            "text_offset": list(range(len(texts))),
        }  # fmt: skip
        choice = {"text": "".join(texts), "logprobs": logprobs, "token_ids": list(range(len(texts)))}
        if chat:
            choice |= {"delta": {"content": choice.pop("text")}, "logprobs": {"content": [{"token": t} for t in texts]}}
        return b"data: " + json.dumps({"choices": [choice]}).encode()

    rest = FirstEvent(an_event("a")).feed(an_event("a", "b") + b"\n\n")
    choice = json.loads(rest.removeprefix(b"data: "))["choices"][0]
    assert choice["token_ids"] == [1]
    if chat:
        assert (choice["delta"], choice["logprobs"]) == ({"content": "b"}, {"content": [{"token": "b"}]})
    else:
        logprobs = {"tokens": ["b"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [1]}
        assert (choice["text"], choice["logprobs"]) == ("b", logprobs)


def test_the_first_event_is_whole_before_it_is_judged() -> None:
    early = event("a")
    for cut in range(1, len(early)):
        first = FirstEvent(early)
        assert first.feed(event("a")[:cut]) == b""
        assert first.feed(event("a")[cut:] + b"rest") == b"rest"
        assert first.passed


def test_the_usage_is_null_in_the_first_event_if_it_comes_at_the_end() -> None:
    body = ClientBody(fields_of(json.dumps({**STREAM, "stream_options": {"include_usage": True}}).encode()))
    raw = early_event(body, json.dumps(an_answer()).encode())
    assert raw is not None
    assert json.loads(raw.removeprefix(b"data: "))["usage"] is None
    assert early_event(ClientBody(fields_of(json.dumps(BODY).encode())), json.dumps(an_answer()).encode()) is None


async def test_without_a_first_token_in_its_parameters_prefills_text_is_not_used() -> None:
    p, d = workers(prefill_script, decoding(event("a") + REST))
    async with fleet(p, d) as (url, _):
        _, raw = await post(url, STREAM)
    assert raw == event("a") + REST
