"""Turns of one conversation: they stay with their decode worker, and need no hand-off for what it has cached."""

import json
from typing import Any

import pytest
from aiohttp import web

from kvferry.router.settings import PolicyName, RouterSettings
from tests.harness.scripted_worker import FAST, Asked, Worker, a_decode, a_prefill, fleet
from tests.router.test_dispatch import BODY, post

PROMPT_TOKENS, ANSWER_TOKENS = 150, 266
ANSWER = "word" * ANSWER_TOKENS
"""Four bytes per token, as the router assumes at first."""
FIRST = [{"role": "user", "content": "Tell me more. " * 36}]
SECOND = [*FIRST, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Why?"}]


async def ask(url: str, messages: list[dict[str, str]], **more: Any) -> Any:
    return await post(url, {"messages": messages, "max_tokens": 300, **more}, "/v1/chat/completions")


async def long_answer(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Answers with one event per token, or with a usage."""
    counts = {"x-kvferry-handed-over": "150", "x-kvferry-cached": "0", "x-kvferry-recomputed": "0"}
    if not asked.body.get("stream"):
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": ANSWER_TOKENS}
        return web.json_response({"choices": [{"message": {"content": ANSWER}}], "usage": usage}, headers=counts)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **counts})
    await response.prepare(request)
    for _ in range(ANSWER_TOKENS):
        await response.write(b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n')
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def counting_prefill(request: web.Request, asked: Asked) -> web.StreamResponse:
    body = {"choices": [{"finish_reason": "length", "message": {"content": "word"}}],
            "usage": {"prompt_tokens": PROMPT_TOKENS}, "kv_transfer_params": {"remote_engine_id": "p0"}}  # fmt: skip
    return web.json_response(body)


def local_below(tokens: str) -> RouterSettings:
    return RouterSettings(health_every_s=0.05, restart_wait_s=0, local_below=tokens)


@pytest.mark.parametrize("stream", [True, False])
async def test_decodes_own_answer_counts_as_cached(stream: bool) -> None:
    """Turn 2 has 434 tokens, of which decode has 416: prefill has nothing to do."""
    p, d = a_prefill(script=counting_prefill), a_decode(script=long_answer)
    async with fleet(p, d, settings=local_below("64")) as (url, _):
        first, _ = await ask(url, FIRST, stream=stream)
        second, _ = await ask(url, SECOND, stream=stream)
    assert [one.headers["x-kvferry-route"] for one in (first, second)] == ["pull", "local"]
    assert len(p.asked) == 1


async def test_what_decode_computed_itself_counts_as_cached_too() -> None:
    """Turn 1 was short, so prefill has never reported its length or its blocks."""
    d = a_decode(script=long_answer)
    async with fleet(a_prefill(script=counting_prefill), d, settings=local_below("160")) as (url, _):
        routes = [(await ask(url, messages))[0].headers["x-kvferry-route"] for messages in (FIRST, SECOND)]
    assert routes == ["local", "local"]


async def test_another_conversation_of_that_length_goes_to_prefill() -> None:
    p, d = a_prefill(script=counting_prefill), a_decode(script=long_answer)
    async with fleet(p, d, settings=local_below("64")) as (url, _):
        await ask(url, FIRST)
        response, _ = await ask(url, [{"role": "user", "content": "Other " * 300}])
    assert response.headers["x-kvferry-route"] == "pull"


@pytest.mark.parametrize("policy", [PolicyName.LEAST_LOADED, PolicyName.POWER_OF_TWO])
async def test_turns_of_a_conversation_stay_with_their_workers_while_loads_are_equal(policy: PolicyName) -> None:
    workers: list[Worker] = [a_prefill("p0"), a_prefill("p1"), a_decode("d0"), a_decode("d1")]
    settings = RouterSettings(health_every_s=0.05, prefill_policy=policy, decode_policy=policy)
    async with fleet(*workers, settings=settings) as (url, _):
        served: dict[str, set[tuple[str, str]]] = {}
        for turn in range(4):
            for who in ("Ann", "Bob"):
                messages = [{"role": "user", "content": f"I am {who}, line {line}"} for line in range(2 * turn + 1)]
                response, _ = await ask(url, messages)
                pair = (response.headers["x-kvferry-prefill"], response.headers["x-kvferry-decode"])
                served.setdefault(who, set()).add(pair)
    assert all(len(pairs) == 1 for pairs in served.values())
    if policy is PolicyName.LEAST_LOADED:
        assert served["Ann"] != served["Bob"]  # a new conversation goes to the next worker


async def test_both_workers_get_one_time_for_created() -> None:
    p, d = a_prefill(), a_decode()
    async with fleet(p, d, settings=FAST) as (url, _):
        await post(url, {**BODY, "stream": True})
    sent = {worker.asked[0].headers["x-kvferry-created"] for worker in (p, d)}
    assert len(sent) == 1
    assert json.loads(sent.pop()) > 1_700_000_000
