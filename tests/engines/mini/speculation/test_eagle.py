"""The EAGLE-3 head that kvferry ships, with SmolLM2: alone, and across the hand-off over NIXL."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvferry.engines.mini.models.catalog import model_directory
from kvferry.engines.mini.models.tokenizer import Tokenizer
from kvferry.engines.mini.settings import EngineSettings
from tests.engines.mini.speculation.conftest import SOURCE, accepted, ask, engine, tokens
from tests.harness.serving import Alone, Pair

pytestmark = [pytest.mark.engine, pytest.mark.process, pytest.mark.timeout(600)]

NEW, DEPTH = 32, 3


def settings(speculative: bool = True) -> EngineSettings:
    """Returns settings in float32: the same tokens in every batch."""
    size: dict[str, Any] = {"num_blocks": 120, "block_tokens": 16}
    return (
        engine("smollm2", "eagle3", DEPTH, spec_model="eagle3-smollm2", **size)
        if speculative
        else engine("smollm2", **size)
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Returns pieces of source code that the head was not trained on."""
    ids = Tokenizer.from_directory(model_directory("smollm2")).encode(SOURCE.decode())
    return [ids[at : at + length] for at, length in ((900, 33), (2600, 48), (5200, 57), (9000, 64))]


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> Iterator[Alone]:
    """One engine with drafts, which has answered all prompts."""
    torch.set_num_threads(1)
    one = Alone(settings())
    one.answers = tokens(one.serve(ask(prompts, NEW)))  # type: ignore[attr-defined]
    yield one
    one.close()


def test_tokens_are_the_same_and_drafts_are_accepted(alone: Alone, prompts: list[list[int]]) -> None:
    plain = Alone(settings(speculative=False))
    try:
        assert tokens(plain.serve(ask(prompts, NEW))) == alone.answers  # type: ignore[attr-defined]
        assert alone.engine.stats().steps < 0.9 * plain.engine.stats().steps
    finally:
        plain.close()
    got = accepted(alone)
    assert got.by_position[0] > 0.2  # a random guess among 2,560 tokens is accepted once in a thousand times
    assert all(earlier + 0.15 > later for earlier, later in pairwise(got.by_position))
    assert got.length > 1.3


@pytest.mark.parametrize("first_token", [True, False])
def test_across_the_hand_off(alone: Alone, prompts: list[list[int]], first_token: bool) -> None:
    """R32: the whole prompt is handed over, with the head's KV. Without prefill's first token decode has the hidden
    states of one engine alone, and exactly the same drafts are accepted; with it, the first step of an answer has no
    drafts."""
    pair = Pair(settings(), settings(), transport="nixl", first_token=first_token)
    try:
        served = pair.serve(ask(prompts, NEW))
        assert tokens(served) == alone.answers  # type: ignore[attr-defined]
        for one in served:
            assert one.last is not None
            assert one.last.account is not None
            assert one.last.account.recomputed == (0 if first_token else 1)
        if first_token:
            assert abs(accepted(pair).length - accepted(alone).length) < 0.3
        else:
            assert accepted(pair) == accepted(alone)
    finally:
        pair.close()
