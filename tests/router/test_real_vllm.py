"""A router in front of real vLLM servers: their built-in NIXL connectors, and ours; pull and push. Takes minutes."""

import asyncio
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.router.app import Router
from kvferry.router.settings import RouterSettings
from tests.engines.vllm.servers import Lab, Pair
from tests.harness.scripted_worker import routing
from tests.harness.until import until_async
from tests.router.test_dispatch import post

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.environ.get("VLLM_TESTS") != "all", reason="starts eight vLLM servers: make test-vllm-all"),
]

KINDS = [(connector, mode) for connector in ("builtin", "kvferry") for mode in ("pull", "push")]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, str]]:
    connector, mode = request.param
    with Lab(connector) as lab:
        yield lab.pair(mode, {}, {}), mode


def a_body(dice: random.Random, **more: Any) -> dict[str, Any]:
    prompt = dice.choices(range(3, 500), k=300)
    return {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}


def external_tokens(pair: Pair) -> float:
    """Returns the number of prompt tokens that came to decode through its connector."""
    return pair.decode.metric("vllm:external_prefix_cache_hits_total")


async def test_hand_offs_land_and_have_the_right_text(pair: tuple[Pair, str]) -> None:
    servers, mode = pair
    dice = random.Random(3)
    router = Router([servers.prefill.url], [servers.decode.url], RouterSettings(connect_timeout_s=10.0))
    routes = []
    async with routing(router) as url:
        await until_async(lambda: all(w.unusable_reason is None for w in router.fleet.workers), within_s=60.0)
        for number in range(6):
            body = a_body(dice, stream=number % 2 == 1)
            before = external_tokens(servers)
            response, raw = await asyncio.wait_for(post(url, body), 90.0)
            assert response.status == 200, raw
            routes.append(response.headers["x-kvferry-route"])
            taken = await asyncio.to_thread(external_tokens, servers)
            assert taken - before >= 290, (taken, before, number)
            _, alone = await asyncio.wait_for(post(servers.prefill.url, {**body, "stream": False}), 90.0)
            assert text_of(raw) == text_of(alone)
        chat = {"model": "m", "messages": [{"role": "user", "content": "Hello there, how are you?"}], "max_tokens": 4}
        assert (await post(url, {"model": "m", "prompt": [5] * 20, "n": 2, "max_tokens": 2}))[0].status == 200
        assert (await post(url, a_body(dice, prompt_logprobs=1)))[0].headers["x-kvferry-route"] == "local"
        response, raw = await post(url, chat, "/v1/chat/completions")
        assert response.status in (200, 400), raw  # a model made by a script may have no chat template
        response, raw = await post(url, {**a_body(dice), "temperature": -1})
        assert response.status == 400
        assert "temperature" in json.loads(raw)["error"]["message"]
    assert routes == (["pull"] * 6 if mode == "pull" else ["pull"] + ["push"] * 5)  # R16: learned first, then at once


def text_of(raw: bytes) -> str:
    if not raw.startswith(b"data: "):
        return str(json.loads(raw)["choices"][0]["text"])
    events = [line[6:] for line in raw.decode().split("\n\n") if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
