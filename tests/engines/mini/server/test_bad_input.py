"""Errors of clients and of the engine get the right status, and an OpenAI error body with value and remedy."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from kvferry.engines.mini.api import FinishReason, GenerateRequest, Output
from tests.harness.scripted_engine import ScriptedEngine, ScriptedWorker, answer_of, listening
from tests.harness.until import until_async

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT = {"prompt": "Hello"}
ONE_OF_EACH: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    # endpoint, body, status, param, part of the message
    ("completions", {}, 400, "prompt", "the body has no 'prompt': send it"),
    ("completions", {"prompt": 3}, 400, "prompt", "prompt=3: expected `str | array`, got `int`"),
    ("completions", {"prompt": []}, 400, "prompt", "send at least one prompt"),
    ("completions", {"prompt": ""}, 400, "prompt", "prompt='' has no tokens"),
    ("completions", {"prompt": [[]]}, 400, "prompt", "send at least one"),
    ("completions", {"prompt": ["a", 1]}, 400, "prompt", "token ids and texts are mixed"),
    ("completions", {"prompt": [-1]}, 400, "prompt", "token id -1"),
    ("completions", {"prompt": [1 << 40]}, 400, "prompt", f"token id {1 << 40}"),
    ("completions", {**TEXT, "max_tokens": "ten"}, 400, "max_tokens", "max_tokens='ten': expected `int | null`"),
    ("completions", {**TEXT, "max_tokens": 0}, 400, "max_tokens", "max_tokens=0"),
    ("completions", {**TEXT, "temperature": -1}, 400, "temperature", "temperature=-1"),
    ("completions", {**TEXT, "top_p": 7}, 400, "top_p", "top_p=7"),
    ("completions", {**TEXT, "n": 0}, 400, "n", "n=0"),
    ("completions", {**TEXT, "n": 1000}, 400, "n", "send 1 to 128"),
    ("completions", {**TEXT, "best_of": 3}, 400, "best_of", "best_of=3 is not supported"),
    ("completions", {**TEXT, "suffix": "x"}, 400, "suffix", "suffix='x' is not supported"),
    ("completions", {**TEXT, "logprobs": 21}, 400, "logprobs", "logprobs=21 is out of range: send 0 to 20"),
    ("completions", {**TEXT, "logprobs": 1, "echo": True}, 400, "logprobs", "prompt log probabilities"),
    ("completions", {**TEXT, "prompt_logprobs": 1}, 400, "prompt_logprobs", "prompt_logprobs=1 is not supported"),
    ("completions", {**TEXT, "logit_bias": {"x": 1}}, 400, "logit_bias", "must be a token id"),
    ("completions", {**TEXT, "stop": [1]}, 400, "stop[0]", "expected `str`"),
    ("completions", {**TEXT, "model": "gpt-9"}, 404, "model", "send 'tiny'"),
    ("completions", {"prompt": "x" * 600}, 400, "prompt", "600 characters"),
    ("completions", {**TEXT, "max_tokens": 600}, 400, "prompt", "at most 500 fit together"),
    ("completions", {**TEXT, "kv_on_failure": "ask"}, 400, "kv_on_failure", "Send 'recompute' or 'fail', or leave"),
    ("completions", {**TEXT, "kv_transfer_params": 3}, 400, "kv_transfer_params", "expected `object | null`"),
    (
        "completions",
        {**TEXT, "kv_transfer_params": {"remote_port": "x"}},
        400,
        "kv_transfer_params",
        "at `$.remote_port`",
    ),
    (
        "completions",
        {**TEXT, "kv_transfer_params": {"transfer_id": "t" * 161}},
        400,
        "kv_transfer_params",
        "at `$.transfer_id`",
    ),
    (
        "completions",
        {"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_prefill": True}},
        400,
        "kv_transfer_params",
        "one request per prompt",
    ),
    ("chat/completions", {"messages": []}, 400, "messages", "send at least one message"),
    ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages[0]", "role=None"),
    ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0]", "content=3"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0]",
        "part of type 'image_url'",
    ),
    ("chat/completions", {**CHAT, "top_logprobs": 3}, 400, "top_logprobs", "needs logprobs=true"),
    (
        "chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 21},
        400,
        "top_logprobs",
        "top_logprobs=21 is out",
    ),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format", "json_object"),
    ("chat/completions", {**CHAT, "tools": [{}], "tool_choice": "required"}, 400, "tool_choice", "'required'"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice", "'required'"),
    ("chat/completions", {**CHAT, "tool_choice": {"type": "function"}}, 400, "tool_choice", "cannot be enforced"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x", "odd": 1}]}, 400, "messages[0]", ".odd=1"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "odd": 1}]}]},
        400,
        "messages[0]",
        "a part with 'odd'",
    ),
    ("completions", {**TEXT, "response_format": {"type": "text", "x": 1}}, 400, "response_format", "'x': 1"),
    ("chat/completions", {**CHAT, "max_tokens": 500}, 400, "messages", "shorten the prompt"),
]


@pytest.mark.parametrize(("endpoint", "body", "status", "param", "part"), ONE_OF_EACH, ids=lambda v: str(v)[:50])
async def test_wrong_bodies_are_refused(
    endpoint: str, body: dict[str, Any], status: int, param: str | None, part: str
) -> None:
    worker = ScriptedWorker()
    async with (
        listening(worker) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/{endpoint}", json=body) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (status, param), error
    assert part in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert worker.engine.added == []


@pytest.mark.parametrize("raw", [b"{", b"", b"\xff\xfe", b'{"prompt": NaN}'])
async def test_bad_json_is_400(raw: bytes) -> None:
    async with (
        listening() as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", data=raw) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "invalid_json")
    assert "not valid JSON" in error["message"]


@pytest.mark.parametrize("raw", [b"[" * 5000, b'{"prompt": "x", "kv_transfer_params": ' + b'{"a":' * 5000])
async def test_a_body_nested_too_deeply_is_400(raw: bytes) -> None:
    async with (
        listening() as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", data=raw) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["message"]) == (400, "the body is nested too deeply: send a flatter one")


async def test_a_body_that_is_no_object_is_400() -> None:
    async with (
        listening() as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", data=b"[1]") as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["message"]) == (400, "the body is [1]: send one JSON object")


async def test_a_body_over_the_limit_is_413() -> None:
    async with (
        listening(max_body_bytes=1000) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json={"prompt": "x" * 2000}) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (413, "body_too_large")
    assert "1000 are accepted" in error["message"]


async def test_the_error_code_for_context_length_is_openais() -> None:
    async with listening() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.completions.create(model="tiny", prompt="x" * 600)
    assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("method", "path", "status"), [("get", "/v2/x", 404), ("get", "/v1/completions", 405)])
async def test_unknown_paths_and_methods_get_openai_bodies(method: str, path: str, status: int) -> None:
    async with (
        listening() as url,
        aiohttp.ClientSession() as session,
        session.request(method, url + path) as response,
    ):
        error = (await response.json())["error"]
    assert response.status == status
    assert path in error["message"]


async def test_overload_is_503_with_retry_after() -> None:
    worker = ScriptedWorker()
    worker.engine.steps_left = 0
    async with listening(worker, max_open_requests=2) as url, aiohttp.ClientSession() as session:
        pending = asyncio.create_task(session.post(f"{url}/v1/completions", json={"prompt": ["a", "b"]}))
        await until_async(lambda: len(worker.engine.added) == 2)
        async with session.post(f"{url}/v1/completions", json=TEXT) as response:
            error = (await response.json())["error"]
        worker.engine.steps_left = 1000
        (await pending).close()
    assert (response.status, response.headers["Retry-After"], error["code"]) == (503, "1", "overloaded")
    assert "--max-open-requests" in error["message"]


async def test_draining_refuses_new_and_finishes_old() -> None:
    worker = ScriptedWorker()
    worker.engine.steps_left = 0
    async with listening(worker) as url, aiohttp.ClientSession() as session:
        pending = asyncio.create_task(session.post(f"{url}/v1/completions", json=TEXT))
        await until_async(lambda: len(worker.engine.added) == 1)
        drained = await (await session.post(f"{url}/v1/kvferry/drain")).json()
        assert drained == {"state": "draining", "open_requests": 1}
        async with session.post(f"{url}/v1/completions", json=TEXT) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
        async with session.get(f"{url}/health") as health:
            assert (health.status, (await health.json())["reason"]) == (503, "draining")
        worker.engine.steps_left = 1000
        assert (await pending).status == 200


async def test_release_of_a_hand_off() -> None:
    worker = ScriptedWorker(offered={"t1": ""})
    async with listening(worker) as url, aiohttp.ClientSession() as session:

        async def release(body: object) -> tuple[int, object]:
            async with session.post(f"{url}/v1/kvferry/release", json=body) as response:
                return response.status, await response.json()

        assert await release({"transfer_id": "t1", "reason": "the client hung up"}) == (200, {"released": True})
        assert await release({"transfer_id": "t1"}) == (200, {"released": False})
        assert await release({"transfer_id": "unknown"}) == (200, {"released": False})
        status, body = await release({"transfer": "t1"})
        assert (status, body["error"]["code"]) == (400, "missing_field")  # type: ignore[index]
        status, body = await release({"transfer_id": 3})
        assert (status, body["error"]["code"]) == (400, "invalid_type")  # type: ignore[index]
    assert worker.offered["t1"] == "the router gave it up: the client hung up"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
async def test_a_client_that_hangs_up_leaves_nothing_in_the_engine(stream: bool, steps: int) -> None:
    worker = ScriptedWorker()
    worker.engine.steps_left = steps
    async with listening(worker) as url:
        async with aiohttp.ClientSession() as session:
            body = {**TEXT, "stream": stream, "n": 2}
            pending = asyncio.create_task(session.post(f"{url}/v1/completions", json=body))
            await until_async(lambda: len(worker.engine.added) == (1 if steps == 0 else 2))
            if stream and steps:
                response = await pending
                await response.content.readline()
                response.close()
            else:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
        await until_async(lambda: {r.request_id for r in worker.engine.added} == set(worker.engine.aborted))
        assert not worker.engine.has_work()
        async with aiohttp.ClientSession() as session:
            text = await (await session.get(f"{url}/metrics")).text()
            assert "kvferry_open_sequences 0.0" in text
            assert 'kvferry_requests_total{endpoint="/v1/completions",status="499"} 1.0' in text


async def test_an_engine_that_crashes_ends_every_request_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    worker = ScriptedWorker()
    worker.engine.steps_left = 0
    async with listening(worker) as url, aiohttp.ClientSession() as session:
        pending = asyncio.create_task(session.post(f"{url}/v1/completions", json=TEXT))
        await until_async(lambda: len(worker.engine.added) == 1)
        worker.engine.crash = RuntimeError("boom")
        response = await pending
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (503, "engine_crashed")
        assert "RuntimeError: boom" in error["message"]
        async with session.get(f"{url}/health") as health:
            assert health.status == 503
            assert "boom" in (await health.json())["reason"]
        async with session.post(f"{url}/v1/completions", json=TEXT) as later:
            assert (later.status, (await later.json())["error"]["code"]) == (503, "engine_dead")
        async with session.get(f"{url}/v1/kvferry") as description:
            assert "boom" in (await description.json())["state"]
    assert "the engine has failed" in caplog.text


def failing(after: int) -> ScriptedEngine:
    def script(request: GenerateRequest) -> list[Output]:
        failed = Output(
            request_id=request.request_id,
            finish_reason=FinishReason.ERROR,
            error="hand-off t1 failed: peer lost; send it again",
        )
        return [*answer_of(request)[:after], failed]

    return ScriptedEngine(script=script)


async def test_a_request_that_fails_before_its_first_token_is_500() -> None:
    async with listening(ScriptedWorker(failing(0))) as url, aiohttp.ClientSession() as session:
        for stream in (False, True):
            async with session.post(f"{url}/v1/completions", json={**TEXT, "stream": stream}) as response:
                error = (await response.json())["error"]
                assert (response.status, error["message"]) == (500, "hand-off t1 failed: peer lost; send it again")


async def test_a_stream_that_fails_reports_it_and_does_not_end_as_done() -> None:
    async with listening(ScriptedWorker(failing(2))) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", json={**TEXT, "stream": True}) as response:
            events = (await response.text()).strip().split("\n\n")
        assert "[DONE]" not in events[-1]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "request_failed"
    async with (
        listening(ScriptedWorker(failing(2))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = await client.completions.create(model="tiny", prompt="Hi", stream=True)
        with pytest.raises(openai.APIError, match="peer lost"):
            async for _ in stream:
                pass
