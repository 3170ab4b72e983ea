"""A worker's answer reaches the official client unchanged, byte for byte; and the account in usage, if asked for."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import openai
import pytest
from aiohttp import web

from tests.harness.scripted_vllm import VllmServer
from tests.harness.scripted_worker import (
    Asked,
    Script,
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

CHUNK: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
SPENT = {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"in": '}}


def delta(more: dict[str, Any], finish: str | None = None) -> str:
    choice = {"index": 0, "delta": more, "logprobs": None, "finish_reason": finish}
    return "data: " + json.dumps({**CHUNK, "choices": [choice]}) + "\n\n"


TOOLS = (
    delta({"role": "assistant", "content": None}) + ": a comment\n\n"
    + delta({"tool_calls": [CALL]})
    + delta({"tool_calls": [{"index": 0, "function": {"arguments": '"K\u00f6ln"}'}}]})
    + delta({}, "tool_calls")
    + "data: " + json.dumps({**CHUNK, "choices": [], "usage": SPENT})
    + "\n\ndata: [DONE]\n\n"
).encode()  # fmt: skip
WHOLE = json.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny", "odd": 1.0,
    "choices": [{"index": 0, "finish_reason": "tool_calls", "logprobs": None, "message": {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]}}],
    "usage": SPENT,
}, indent=1).encode()  # fmt: skip
ASKS: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
}


def writing(body: bytes, every: int = 17) -> Script:
    """Returns the bytes in pieces that ignore all boundaries; as a stream if it is one."""

    async def script(request: web.Request, asked: Asked) -> web.StreamResponse:
        if not asked.body.get("stream"):
            return web.Response(body=body, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for start in range(0, len(body), every):
            await response.write(body[start : start + every])
        await response.write_eof()
        return response

    return script


@asynccontextmanager
async def client_of(*workers: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, str]]:
    async with (
        fleet(*workers) as (url, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="no key is needed", max_retries=0) as client,
    ):
        yield client, url


async def test_tool_calls_of_a_stream() -> None:
    d = a_decode(script=writing(TOOLS))
    async with client_of(a_prefill(), d) as (client, url):
        stream = await client.chat.completions.create(**ASKS, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        _, raw = await post(url, {**ASKS, "stream": True}, "/v1/chat/completions")
    assert raw == TOOLS
    calls = [c.choices[0].delta.tool_calls for c in chunks if c.choices and c.choices[0].delta.tool_calls]
    assert "".join(one[0].function.arguments or "" for one in calls if one[0].function) == '{"in": "K\u00f6ln"}'
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 16
    for asked in (d.asked[0], *d.asked):
        assert asked.body["tools"] == ASKS["tools"]


async def test_tool_calls_of_a_whole_answer() -> None:
    async with client_of(a_prefill(), a_decode(script=writing(WHOLE))) as (client, url):
        answer = await client.chat.completions.create(**ASKS)
        _, raw = await post(url, ASKS, "/v1/chat/completions")
    assert raw == WHOLE
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"


ERROR = (
    b'{"error": {"message": "top_p=7 is above 1",  "type": "invalid_request_error", "param": "top_p", "code": null}}'
)


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_a_worker(who: str, stream: bool) -> None:
    async def wrong(request: web.Request, asked: Asked) -> web.StreamResponse:
        return web.Response(status=400, body=ERROR, content_type="application/json")

    p = a_prefill(script=wrong if who == "prefill" else prefill_script)
    d = a_decode(script=wrong)
    async with client_of(p, d) as (client, url):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="x", stream=stream)
        response, raw = await post(url, {**BODY, "stream": stream})
    assert (response.status, raw) == (400, ERROR)
    assert caught.value.param == "top_p"


async def test_errors_of_the_router_are_understood_by_the_client() -> None:
    async with client_of(a_prefill(), a_decode(script=refusing(503))) as (client, _):
        with pytest.raises(openai.InternalServerError, match="no room") as caught:
            await client.completions.create(model="tiny", prompt="x")
    assert caught.value.status_code == 503


async def test_the_client_sends_a_request_again_after_the_time_that_a_503_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def wait(delay_s: float) -> None:
        waits.append(delay_s)
        d.script = decode_script

    monkeypatch.setattr(anyio, "sleep", wait)  # how the client waits
    d = a_decode(script=refusing(503))
    async with client_of(a_prefill(), d) as (client, url):
        response, _ = await post(url, BODY)
        answer = await client.with_options(max_retries=1).completions.create(model="tiny", prompt="x")
    assert answer.choices[0].text == "ab"
    assert waits == [float(response.headers["Retry-After"])]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_wait_any_longer_ends_its_request_everywhere(stream: bool) -> None:
    p, d = a_prefill(script=hanging), a_decode()
    async with client_of(p, d) as (client, _):
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(
                model="tiny", prompt="x", stream=stream, timeout=openai.Timeout(None, read=0.2)
            )
        await until_async(lambda: all(asked.cancelled for asked in p.asked), "prefill's request has ended")
    assert not d.asked


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 3},
        {"echo": True, "logprobs": 0},
        {"prompt": [[1, 2], [3]]},
        {"max_tokens": 0},
        {"use_beam_search": True, "n": 2},
    ],
    ids=str,
)
async def test_a_request_that_one_worker_must_answer_goes_to_one(more: dict[str, Any]) -> None:
    """It is answered as by a single server: the prompt is computed where its log probabilities are needed."""
    p, d = VllmServer("p", "prefill"), VllmServer("d", "decode")
    async with fleet(p, d) as (url, router):
        response, _ = await post(url, {**BODY, **more})
        assert not router.context.alarm.rings(0.0)
    assert response.headers["x-kvferry-route"] == "local"
    assert p.asked == []
    [asked] = d.asked
    assert {name: asked.body[name] for name in more} == more
    assert "kv_transfer_params" not in asked.body


@pytest.mark.parametrize("more", [{"logprobs": 3}, {"echo": True}, {"stop": ["x"]}, {"n": 3}, {"echo": False}], ids=str)
async def test_every_other_request_is_divided(more: dict[str, Any]) -> None:
    p, d = a_prefill(), a_decode()
    async with fleet(p, d) as (url, _):
        response, _ = await post(url, {**BODY, **more})
    assert response.headers["x-kvferry-route"] == "pull"
    assert {name: d.asked[0].body[name] for name in more} == more


# ---- the account in usage ----

USAGE = {"X-KVFerry-Usage": "1"}


async def test_usage_has_the_account_if_asked() -> None:
    p, d = a_prefill(), a_decode(script=writing(TOOLS))
    async with fleet(p, d) as (url, _):
        _, raw = await post(url, {**ASKS, "stream": True}, "/v1/chat/completions", headers=USAGE)
        events = [json.loads(one[6:]) for one in raw.decode().split("\n\n") if one.startswith("data: {")]
        assert events[-1]["usage"] == {
            "prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16,
            "kvferry": {"route": "pull", "prefill": "p0", "decode": "d0"},
        }  # fmt: skip
        assert raw.endswith(b"data: [DONE]\n\n")
        assert raw.count(b"\n\n") == TOOLS.count(b"\n\n")
        assert b": a comment\n\n" in raw
        d.script = writing(WHOLE)
        _, raw = await post(url, ASKS, "/v1/chat/completions", headers=USAGE)
    assert json.loads(raw)["usage"]["kvferry"]["route"] == "pull"
    assert json.loads(raw)["choices"] == json.loads(WHOLE)["choices"]


async def test_usage_has_the_workers_own_counts() -> None:
    body = {"choices": [], "usage": {"prompt_tokens": 9}, "kvferry": {"handed_over": 8, "cached": 0, "recomputed": 1}}
    async with fleet(a_prefill(), a_decode(script=writing(json.dumps(body).encode()))) as (url, _):
        _, raw = await post(url, BODY, headers=USAGE)
        account = json.loads(raw)["usage"]["kvferry"]
        assert (account["handed_over"], account["cached"], account["recomputed"]) == (8, 0, 1)

    async with fleet(a_decode(script=writing(json.dumps({"choices": [], "usage": {}}).encode()))) as (url, _):
        _, raw = await post(url, BODY, headers=USAGE)
    account = json.loads(raw)["usage"]["kvferry"]
    assert account["route"] == "alone"
    assert account["why"] == "no prefill worker is configured"


@pytest.mark.parametrize("raw", [b"no json", b"[]", b'{"usage": null}'])
async def test_a_body_without_usage_is_unchanged(raw: bytes) -> None:
    async with fleet(a_prefill(), a_decode(script=writing(raw))) as (url, _):
        _, received = await post(url, BODY, headers=USAGE)
    assert received == raw
