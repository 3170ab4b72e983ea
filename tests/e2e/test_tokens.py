"""R36: a real model, prefilled in one process and decoded in another over real NIXL, gives the tokens of one engine.

SmolLM2 in fp32, 20 prompts from 5 to 2,000 tokens; pull and push; one by one and 8 at once; chunks of 64 and of 512.
The engine alone is a third process, which knows no peer; it is compared with transformers elsewhere (tests/engines).
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from kvferry.engines.mini.models.loading import load_model
from kvferry.engines.mini.settings import EngineSettings
from tests.harness.client import Answer, complete
from tests.harness.fleet import Fleet

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (5, 6, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 129, 200, 257, 400, 512, 1000, 2000)
SHORT_TOKENS = 200
ANSWER_TOKENS = 6
FLAGS = ("--dtype", "float32", "--cache-gb", "0.5", "--no-prefix-caching", "--threads", "1",
         "--transfer-deadline", "600")  # fmt: skip
"""In push the deadline runs while prefill computes; eight prompts of up to 2,000 tokens take over a minute on a busy
machine."""
SENTENCES = (
    "The ferry leaves the harbour at seven in the morning, and most of the passengers are still asleep.",
    "A lighthouse keeper writes down the wind, the height of the waves, and the name of every ship.",
    "In winter the river freezes, so the children walk to school across the ice.",
    "Water boils at a lower temperature on a mountain because the air is thinner there.",
    "She opened the old map, found the island, and asked the captain how long the crossing would take.",
    "Bread needs flour, water, salt, yeast, and somebody who is willing to wait.",
    "The engineer measured the bridge twice and decided that it would hold.",
    "Every spring the birds come back to the same three trees behind the station.",
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Returns 20 texts of 5 to 2,000 tokens, each with its sentences in a different order."""
    tokenizer = load_model(EngineSettings(model="smollm2", dtype="float32")).tokenizer
    texts = [" ".join(random.Random(length).choices(SENTENCES, k=200)) for length in LENGTHS]
    return [tokenizer.encode(text)[:length] for text, length in zip(texts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Future[list[int]]]]:
    """Returns the answer of one engine to each prompt, one after the other; it begins now, during the first test."""

    def ask(url: str, prompt: list[int]) -> list[int]:
        answer = complete(url, prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, timeout_s=500)
        assert answer.whole, answer
        assert answer.kvferry["mode"] is None, answer
        return answer.token_ids

    with Fleet(tmp_path_factory.mktemp("alone"), *FLAGS, model="smollm2") as fleet, ThreadPoolExecutor(1) as pool:
        worker = fleet.worker("alone", role="both").wait_ready()
        yield [pool.submit(ask, worker.url, prompt) for prompt in prompts]


@pytest.fixture(scope="module", params=["pull", "push"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Yields prefill with chunks of 64 and of 512, decode, and a router per prefill. Pull verifies every byte."""
    verify = "all" if request.param == "pull" else "sample"
    with Fleet(tmp_path_factory.mktemp(request.param), *FLAGS, "--verify", verify, model="smollm2",
               mode=request.param) as fleet:  # fmt: skip
        decode = fleet.worker("d", role="decode")
        prefills = [fleet.worker(f"p{n}", "--max-batch-tokens", str(n), role="prefill") for n in (64, 512)]
        for worker in (decode, *prefills):
            worker.wait_ready()
        for prefill in prefills:
            fleet.route(prefill=[prefill], decode=[decode], name=f"route-{prefill.name}")
        yield fleet


@dataclass(frozen=True)
class Case:
    """How the prompts are sent."""

    chunk: int
    at_once: int
    longest: int


CASES = {
    "pull": (Case(512, 1, 2000), Case(64, 8, SHORT_TOKENS)),
    "push": (Case(64, 8, 2000), Case(512, 1, SHORT_TOKENS)),
}


@pytest.mark.parametrize("number", [0, 1])
def test_prefill_and_decode_give_the_tokens_of_one_engine(  # R36, R12
    fleet: Fleet, alone: list[Future[list[int]]], prompts: list[list[int]], number: int
) -> None:
    case = CASES[fleet.mode][number]
    chosen = [prompt for prompt in prompts if len(prompt) <= case.longest]
    answers = _ask_all(fleet.routers[f"route-p{case.chunk}"].url, chosen, case.at_once)
    for prompt, answer, expected in zip(chosen, answers, alone, strict=False):
        account = answer.kvferry
        where = (
            f"{fleet.mode}, {len(prompt)} tokens, {case}: {account} {answer.error or answer.broken}\n{fleet.tails()}"
        )
        assert answer.whole, where
        assert answer.token_ids == expected.result(), where
        # R36: nothing that was handed over is computed again, and that is all of the prompt.
        assert (account["handed_over"], account["cached"], account["recomputed"], account["why"]) == (
            len(prompt),
            0,
            0,
            "",
        ), where
        assert (account["mode"], account["prefill"], account["decode"]) == (fleet.mode, f"p{case.chunk}", "d"), where
        assert account["bytes"] == -(-len(prompt) // 16) * 16 * 30 * 2 * 3 * 64 * 4, where  # whole blocks
        assert account["verified"] > 0, where
        if fleet.mode == "pull":
            assert account["verified"] >= 30 * 2, where  # K and V of every layer
    fleet.wait_blocks_free()


def _ask_all(url: str, prompts: Sequence[list[int]], at_once: int) -> list[Answer]:
    def ask(prompt: list[int]) -> Answer:
        return complete(url, prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, timeout_s=500)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, prompts))


def test_a_first_token_that_ends_the_answer_never_reaches_decode(fleet: Fleet) -> None:
    prompt = [504, 2365, 5]
    first = complete(fleet.url, prompt, max_tokens=1)
    before = fleet.workers["d"].describe()["load"]
    ended = complete(fleet.url, prompt, max_tokens=8, stop_token_ids=first.token_ids)
    assert ended.whole, ended
    assert ended.finish_reason == "stop", ended
    assert ended.token_ids == first.token_ids
    if fleet.mode == "pull":
        assert ended.kvferry["decode"] is None, ended.kvferry
        assert before == {"open_requests": 0}
    fleet.wait_blocks_free()
