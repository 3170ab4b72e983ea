"""The server through the official OpenAI client, over a scripted engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

from kvferry.web.listen import Listener
from tests.harness.scripted_engine import ANSWER, CharTokenizer, ScriptedWorker, a_server, listening
from tests.harness.until import until_async


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with listening() as address:
        yield address


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


CHAT: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT_LEN = len("user: Hello\nassistant: ")


async def test_completion(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="Hello", max_tokens=5)
    assert answer.choices[0].text == ANSWER[:5]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 5, 10)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_completion_default_is_16_tokens(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="Hello")
    assert answer.choices[0].text == ANSWER[:16]


async def test_several_prompts_in_every_form(client: openai.AsyncOpenAI) -> None:
    for prompt in (["ab", "abc"], [[97, 98], [97, 98, 99]]):
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=3, echo=True, n=2)
        assert [choice.text for choice in answer.choices] == ["abThe", "abThe", "abcThe", "abcThe"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    answer = await client.completions.create(model="tiny", prompt=[97, 98], max_tokens=3, echo=True)
    assert answer.choices[0].text == "abThe"


async def test_completion_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="Hello", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["T", "h", "e"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs == [{c: -0.5, "z": -1.5} for c in "The"]


async def test_a_streamed_completion_gives_the_same_text(client: openai.AsyncOpenAI) -> None:
    texts, offsets, ends = {0: "", 1: ""}, [], []
    stream = await client.completions.create(
        model="tiny", prompt="Hi", max_tokens=4, n=2, stream=True, logprobs=1, seed=3
    )
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        ends.append(choice.finish_reason)
        if choice.index == 0:
            assert choice.logprobs is not None
            offsets += choice.logprobs.text_offset or []
    assert texts == {0: ANSWER[:4], 1: ANSWER[:4]}
    assert offsets == [0, 1, 2, 3]
    assert ends.count("length") == 2
    assert chunk.kvferry["recomputed"] == 1  # type: ignore[attr-defined]  # rides on the last chunk


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=9, stop=["c"])
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == ANSWER[: ANSWER.index("c")]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == "c"  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == CHAT_LEN


async def test_chat_without_a_limit_fills_the_context(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=CHAT)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 500


async def test_chat_text_parts_and_logprobs(client: openai.AsyncOpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    answer = await client.chat.completions.create(
        model="tiny", messages=parts, max_tokens=2, logprobs=True, top_logprobs=2
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == CHAT_LEN
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(one.token, one.logprob, one.bytes) for one in logprobs.content] == [("T", -0.5, [84]), ("h", -0.5, [104])]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["T", "z"]


async def test_streamed_chat_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == list("The")
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant", None, None]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert chunks[-1].kvferry["prefill"] == "scripted"  # type: ignore[attr-defined]


async def test_seeded_choices_differ_by_their_number() -> None:
    worker = ScriptedWorker()
    async with listening(worker) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        await client.completions.create(model="tiny", prompt="Hi", max_tokens=2, n=3, seed=10)
    assert [request.sampling.seed for request in worker.engine.added] == [10, 11, 12]


async def test_a_request_may_choose_what_a_failed_hand_off_does() -> None:  # R29
    worker = ScriptedWorker()
    async with listening(worker) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for wanted in ("fail", "recompute"):
            extra = {"kv_on_failure": wanted}
            await client.completions.create(model="tiny", prompt="Hi", max_tokens=2, extra_body=extra)
        await client.completions.create(model="tiny", prompt="Hi", max_tokens=2)
    assert [request.on_failure for request in worker.engine.added] == ["fail", "recompute", None]


async def test_other_choices_start_when_the_first_has_a_token() -> None:
    worker = ScriptedWorker()
    worker.engine.steps_left = 0
    handoff = {"do_remote_prefill": True, "transfer_id": "t1", "remote_engine_id": "p0"}
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2, "n": 3, "kv_transfer_params": handoff}
    async with listening(worker) as url, aiohttp.ClientSession() as session:
        pending = asyncio.create_task(session.post(f"{url}/v1/completions", json=body))
        await until_async(lambda: len(worker.engine.added) == 1)
        await (await session.get(f"{url}/v1/kvferry")).read()  # the engine thread has run one iteration
        assert len(worker.engine.added) == 1
        worker.engine.steps_left = 10
        response = await pending
        served = (await response.json())["kvferry"]
    assert [request.handoff is not None for request in worker.engine.added] == [True, False, False]  # R30
    assert (served["handed_over"], served["prefill"], served["decode"]) == (1, "p0", "scripted")


async def test_prefill_returns_its_parameters(url: str) -> None:  # R15
    body = {
        "model": "tiny",
        "prompt": "Hello",
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "t1", "unknown": 1},
    }
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        params = answer["kv_transfer_params"]
        assert (params["transfer_mode"], params["transfer_id"], params["remote_num_tokens"]) == ("pull", "t1", 5)
        assert answer["kvferry"]["decode"] is None
        body["stream"] = True
        async with session.post(f"{url}/v1/completions", json=body) as streamed:
            assert '"kv_transfer_params"' in await streamed.text()


async def test_decode_reports_how_the_prompt_was_served(url: str) -> None:  # R36: the account is the proof
    handoff = {"do_remote_prefill": True, "transfer_id": "t1", "remote_engine_id": "p0", "transfer_mode": "pull"}
    body: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 2, "kv_transfer_params": handoff}
    expected = {
        "handed_over": 4, "fetched": 0, "source": "", "cached": 0, "computed": 1, "recomputed": 1,
        "computed_again": 0, "why": "",
        "bytes": 1000, "transfer_ms": 2.0, "wait_ms": 3.0,
        "grant_ms": 0.0, "runs": 2, "verified": 0, "mode": "pull", "prefill": "p0", "decode": "scripted",
    }  # fmt: skip
    async with aiohttp.ClientSession() as session:
        for stream in (False, True):
            async with session.post(f"{url}/v1/completions", json={**body, "stream": stream}) as response:
                text = await response.text()
                assert response.headers["x-kvferry-handed-over"] == "4"
                assert response.headers["x-kvferry-mode"] == "pull"
                last = text if not stream else text.split("data: ")[-2]
                assert json.loads(last)["kvferry"] == expected


async def test_why_given_by_the_router_is_in_the_account(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        headers = {"x-kvferry-why": "prefill p0 is down"}
        body = {"prompt": "Hello", "max_tokens": 1}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            assert (await response.json())["kvferry"]["why"] == "prefill p0 is down"
            assert response.headers["x-kvferry-why"] == "prefill p0 is down"


async def test_token_ids_on_request(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].token_ids == [ord(c) for c in "The"]  # type: ignore[attr-defined]


@asynccontextmanager
async def client_of_template(*fields_read: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """Yields a client of a server whose chat template reads these fields."""
    listener = Listener(a_server(tokenizer=CharTokenizer(*fields_read)).app, "127.0.0.1", 0)
    await listener.start()
    async with openai.AsyncOpenAI(base_url=f"{listener.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    await listener.stop()


async def test_tools_reach_a_template_that_supports_them() -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    async with client_of_template() as client:
        with pytest.raises(openai.BadRequestError, match="knows no tools"):
            await client.chat.completions.create(model="tiny", messages=CHAT, tools=tools)
    async with client_of_template("tools") as client:
        answer = await client.chat.completions.create(model="tiny", messages=CHAT, tools=tools, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > CHAT_LEN


CALLS: Any = [
    {"role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": [], "tool_calls": [
        {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "call-1", "content": "7"},
]  # fmt: skip


async def test_a_messages_field_that_the_template_does_not_read_is_refused() -> None:
    """As an answer is sent back by the client's model_dump: null and empty fields ask for nothing."""
    named: Any = [{"role": "user", "content": "Hi", "name": "Ada"}]
    async with client_of_template("name") as client:
        await client.chat.completions.create(model="tiny", messages=named, max_tokens=2)
        with pytest.raises(openai.BadRequestError, match=r"tool_calls=.*does not read it") as refused:
            await client.chat.completions.create(model="tiny", messages=CALLS, max_tokens=2)
        assert (refused.value.param, refused.value.code) == ("messages[0]", "unsupported")
    async with client_of_template("tool_calls") as client:
        await client.chat.completions.create(model="tiny", messages=CALLS, max_tokens=2)
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].name='Ada'"):
            await client.chat.completions.create(model="tiny", messages=named, max_tokens=2)


async def test_models_health_metrics_and_description(url: str, client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await client.models.retrieve("tiny")).to_dict()["max_model_len"] == 500
    with pytest.raises(openai.NotFoundError, match="model='other' is not served here: send 'tiny'"):
        await client.models.retrieve("other")
    await client.completions.create(model="tiny", prompt="Hello", max_tokens=5)
    async with aiohttp.ClientSession() as session:
        health = await session.get(f"{url}/health")
        assert (health.status, await health.json()) == (200, {"status": "ok", "reason": "ready", "refused_peers": {}})
        text = await (await session.get(f"{url}/metrics")).text()
        assert 'kvferry_prompt_tokens_total{source="recomputed"} 4.0' in text
        assert 'kvferry_requests_total{endpoint="/v1/completions",status="200"} 1.0' in text
        assert "kvferry_engine_cached 7.0" in text
        description = await (await session.get(f"{url}/v1/kvferry")).json()
        assert description["engine"] == "scripted"
        assert description["state"] == "ready"


async def test_every_name_is_served_and_an_answer_has_the_name_that_was_asked_for() -> None:
    async with listening(more_names=("org/alias",)) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in (await client.models.list()).data] == ["tiny", "org/alias"]
            assert (await client.models.retrieve("org/alias")).id == "org/alias"
            for name in ("tiny", "org/alias"):
                assert (await client.completions.create(model=name, prompt="Hello", max_tokens=1)).model == name
            with pytest.raises(openai.NotFoundError, match="send 'tiny' or 'org/alias'"):
                await client.completions.create(model="other", prompt="Hello")
        async with aiohttp.ClientSession() as session:
            response = await session.post(f"{url}/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
            assert (await response.json())["model"] == "tiny"
            description = await (await session.get(f"{url}/v1/kvferry")).json()
    assert [card["id"] for card in description["models"]] == ["tiny", "org/alias"]


@pytest.mark.parametrize(("sent", "taken"), [("1234567890", True), ("soon", False), ("-1", False), ("9" * 13, False)])
async def test_created_is_the_routers_if_it_sends_one(url: str, sent: str, taken: bool) -> None:
    async with aiohttp.ClientSession() as session:
        response = await session.post(
            f"{url}/v1/completions", json={"prompt": "Hello", "max_tokens": 3, "stream": True},
            headers={"x-kvferry-created": sent},
        )  # fmt: skip
        text = await response.text()
    created = {json.loads(line[6:])["created"] for line in text.splitlines() if line.startswith("data: {")}
    assert len(created) == 1
    assert (created == {1234567890}) is taken


async def test_request_id_is_taken_and_echoed(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "Hello", "max_tokens": 1}
        async with session.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as response:
            assert response.headers["X-Request-Id"] == "mine"
            assert (await response.json())["id"] == "cmpl-mine"
        async with session.post(f"{url}/v1/completions", data=b"{", headers={"X-Request-Id": "bad"}) as response:
            assert response.headers["X-Request-Id"] == "bad"
        routers = "x" * 500  # vllm-router names both workers in its ids, with their host names
        async with session.get(f"{url}/v1/models", headers={"X-Request-Id": routers}) as response:
            assert response.headers["X-Request-Id"] == routers
        async with session.get(f"{url}/v1/models", headers={"X-Request-Id": "x" * 600}) as response:
            assert 0 < len(response.headers["X-Request-Id"]) < 100


async def test_prefill_computes_the_prompt_once_for_all_choices(url: str) -> None:
    """Routers for stock vLLM send the client's `n` to prefill, too. Decode makes the choices."""
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "Hello", "max_tokens": 1, "n": 3, "kv_transfer_params": {"do_remote_decode": True}}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200
            assert len(answer["choices"]) == 1
            assert answer["kv_transfer_params"]["do_remote_prefill"] is True
