"""The server over the real engine with a tiny model, through the official client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest

from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.server.app import WorkerServer
from kvferry.engines.mini.server.request_fields import Done, fields_of
from kvferry.engines.mini.settings import ServerSettings
from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.ids import TransferId
from kvferry.web.listen import Listener
from tests.engines.mini.conftest import MakeEngine, ask, finish, prompt_of, text_of
from tests.harness.request_values import BASES, KINDS, at_bounds
from tests.harness.until import until_async

pytestmark = pytest.mark.engine


@dataclass
class PlainWorker:
    """A worker without a connector."""

    engine: Engine
    drained: bool = True

    def drain(self) -> None:
        pass

    def release(self, transfer: TransferId, reason: str) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        return {"engine": "plain", "incarnation": "1", "role": "both", "mode": "pull"}


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[tuple[str, openai.AsyncOpenAI]]:
    settings = ServerSettings(
        model_name="tiny", max_model_len=engine.max_model_len, vocab_size=engine.model.config.vocab_size
    )
    listener = Listener(WorkerServer(PlainWorker(engine), engine.tokenizer, settings).app, "127.0.0.1", 0, shutdown_s=1)
    await listener.start()
    try:
        async with openai.AsyncOpenAI(base_url=f"{listener.url}/v1", api_key="x", max_retries=0) as client:
            yield listener.url, client
    finally:
        await listener.stop()


PROMPT = prompt_of(40)
GREEDY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "extra_body": {"ignore_eos": True}}


async def test_the_text_is_that_of_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(ask("direct", PROMPT, max_tokens=20))
    expected = text_of(finish(engine)["direct"])
    async with serving(engine) as (_, client):
        whole = await client.completions.create(max_tokens=20, **GREEDY)
        stream = await client.completions.create(max_tokens=20, stream=True, **GREEDY)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
        several = await client.completions.create(max_tokens=20, n=3, **GREEDY)
    assert whole.choices[0].text == streamed == expected
    assert {choice.text for choice in several.choices} == {expected}
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 32  # two whole blocks of the previous request


async def test_seeds_stops_and_logprobs(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as (_, client):
        sampled: dict[str, Any] = {**GREEDY, "temperature": 1.0, "max_tokens": 20}
        first = await client.completions.create(seed=7, n=2, **sampled)
        again = await client.completions.create(seed=7, n=2, **sampled)
        assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
        assert first.choices[0].text != first.choices[1].text

        whole = (await client.completions.create(max_tokens=20, **GREEDY)).choices[0].text
        stop = whole[5:8]
        stopped = (await client.completions.create(max_tokens=20, stop=[stop], **GREEDY)).choices[0]
        assert stopped.finish_reason == "stop"
        assert stopped.text == whole[: whole.index(stop)]

        detailed = await client.completions.create(max_tokens=5, logprobs=3, **GREEDY)
        logprobs = detailed.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.token_logprobs is not None
        assert [len(top) >= 1 for top in logprobs.top_logprobs] == [True] * 5
        assert all(value <= 0 for value in logprobs.token_logprobs)


@pytest.mark.parametrize("speculation", [None, SpeculationSettings(method="ngram", num_speculative_tokens=3)])
@pytest.mark.parametrize("endpoint", sorted(KINDS))
async def test_the_engine_computes_every_value_that_the_table_lets_through(
    make_engine: MakeEngine, endpoint: str, speculation: SpeculationSettings | None
) -> None:
    engine = make_engine(speculation=speculation, num_blocks=600)
    bodies = [
        {**BASES[endpoint], "max_tokens": 4, "temperature": 1, **fields, **more}
        for name, (entry, _) in fields_of(KINDS[endpoint]).items()
        if entry.does is Done.YES
        for fields in at_bounds(name, entry)
        for more in ({}, {"repetition_penalty": 1e-9, "top_k": 1, "temperature": 1e-5, "min_p": 1.0})
    ]
    assert len(bodies) > 40
    async with serving(engine) as (url, _), aiohttp.ClientSession() as session:

        async def post(body: dict[str, Any]) -> tuple[int, str]:
            async with session.post(f"{url}/v1/{endpoint}", json=body) as response:
                return response.status, await response.text()

        answers = await asyncio.gather(*(post(body) for body in bodies))
    for body, (status, text) in zip(bodies, answers, strict=True):
        assert status == 200 or (status == 400 and "context_length_exceeded" in text), (body, text)


async def test_chat_uses_the_models_template(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with serving(engine) as (_, client):
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, temperature=0
        )
    rendered = engine.tokenizer.render_chat([{"role": "user", "content": "Hello"}])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode(rendered, add_special_tokens=False))


async def test_a_prompt_that_the_cache_cannot_hold_is_400(make_engine: MakeEngine) -> None:
    async with serving(make_engine(num_blocks=4)) as (_, client):
        with pytest.raises(openai.BadRequestError, match="cache of 48 tokens") as refused:
            await client.completions.create(model="tiny", prompt=prompt_of(100), max_tokens=4)
    assert refused.value.code == "context_length_exceeded"


async def test_a_client_that_hangs_up_frees_its_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=128)
    free: Callable[[], bool] = lambda: engine.blocks.num_free == engine.blocks.num_usable  # noqa: E731
    async with serving(engine) as (url, client), aiohttp.ClientSession() as session:
        stream = await client.completions.create(max_tokens=1500, n=2, stream=True, **GREEDY)
        async for _ in stream:
            break
        await stream.close()
        await until_async(lambda: not engine.has_work() and free())
        metrics = await (await session.get(f"{url}/metrics")).text()
    assert "kvferry_open_sequences 0.0" in metrics
    assert "kvferry_engine_running 0.0" in metrics


async def test_many_clients_at_once_get_the_right_answers(make_engine: MakeEngine) -> None:
    prompts = [prompt_of(5 + 7 * i, seed=i) for i in range(8)]
    engine = make_engine()
    for i, prompt in enumerate(prompts):
        engine.add(ask(str(i), prompt, max_tokens=10))
    expected = {name: text_of(outputs) for name, outputs in finish(engine).items()}
    async with serving(engine) as (_, client):
        answers = await asyncio.gather(
            *(client.completions.create(**{**GREEDY, "prompt": prompt}, max_tokens=10) for prompt in prompts)
        )
    assert {str(i): answer.choices[0].text for i, answer in enumerate(answers)} == expected
