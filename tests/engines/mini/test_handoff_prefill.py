"""What prefill offers, and what becomes of its blocks, as the engine sees it; the connector is a fake."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvferry.engines.mini.api import FinishReason
from kvferry.ids import RequestId
from tests.engines.mini.conftest import MakeEngine, ask, cache_of, finish, prompt_of, tokens_of
from tests.engines.mini.sides import (
    FOR_REMOTE,
    Side,
    finish_one,
    new_side,
)

pytestmark = pytest.mark.engine


@pytest.fixture
def make_side(make_engine: MakeEngine) -> Callable[..., Side]:
    return partial(new_side, make_engine)


def test_prefill_computes_the_prompt_reports_progress_and_keeps_the_blocks(make_side: Callable[..., Side]) -> None:
    engine, connector = make_side(max_batch_tokens=16)
    engine.add(ask("p", prompt_of(40), FOR_REMOTE, max_tokens=100))
    outputs = finish(engine)["p"]
    assert connector.progress[RequestId("p")] == [16, 32, 40]
    assert len(tokens_of(outputs)) == 1
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    first = connector.first_tokens[RequestId("p")]
    assert first is not None
    assert first.token == tokens_of(outputs)[0]
    assert outputs[-1].handoff is not None
    assert outputs[-1].handoff.remote_num_tokens == 40
    # R25: the blocks stay until they are released.
    assert engine.blocks.num_held == 3
    assert engine.blocks.num_free == engine.blocks.num_usable - 3
    connector.release("p")
    finish(engine)
    assert engine.blocks.num_held == 0


def test_held_blocks_are_not_reused(make_side: Callable[..., Side]) -> None:  # R28
    engine, connector = make_side(num_blocks=1 + 8, prefix_caching=False)
    engine.add(ask("p", prompt_of(48), FOR_REMOTE))
    finish(engine)
    held = list(connector.tables[RequestId("p")][0].block_ids)
    before = cache_of(engine).data[held].clone()
    for i in range(3):
        engine.add(ask(str(i), prompt_of(70, seed=i)))
        finish(engine)
    assert torch.equal(cache_of(engine).data[held], before)
    connector.release("p")
    finish(engine)


def test_a_request_waits_for_held_blocks_and_then_runs(make_side: Callable[..., Side]) -> None:
    engine, connector = make_side(num_blocks=1 + 8, prefix_caching=False)
    engine.add(ask("p", prompt_of(64), FOR_REMOTE))
    finish(engine)
    engine.add(ask("next", prompt_of(100)))
    for _ in range(5):
        assert engine.step() == []
    assert engine.stats().waiting == 1
    connector.release("p")
    assert len(tokens_of(finish(engine)["next"])) == 8


def test_a_prefill_that_ends_with_its_first_token_hands_nothing_over(make_side: Callable[..., Side]) -> None:
    engine, connector = make_side()
    engine.add(ask("p", prompt_of(20), FOR_REMOTE, ignore_eos=False, logit_bias={0: 100.0}))
    last = finish(engine)["p"][-1]
    assert last.finish_reason is FinishReason.STOP
    assert last.handoff is None
    assert "finished p aborted" in connector.seen
    connector.release("p")
    finish(engine)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_of_a_prefill_keeps_what_was_offered(make_side: Callable[..., Side], steps: int) -> None:  # R28
    engine, connector = make_side(max_batch_tokens=16)
    engine.add(ask("p", prompt_of(40), FOR_REMOTE))
    for _ in range(steps):
        engine.step()
    engine.abort(RequestId("p"))
    finish(engine)
    assert engine.blocks.num_held == (3 if steps else 0)
    connector.release("p")
    finish(engine)
    assert engine.blocks.num_held == 0


def test_an_offered_prefill_is_not_preempted(make_side: Callable[..., Side]) -> None:  # R28
    # There are two tokens per step: one of the old request's answer, one of the prefill, which takes 34 steps.
    engine, connector = make_side(num_blocks=1 + 12, block_tokens=4, max_batch_tokens=2, prefix_caching=False)
    engine.add(ask("old", prompt_of(8), max_tokens=30))
    for _ in range(4):
        engine.step()
    engine.add(ask("p", prompt_of(34), FOR_REMOTE))
    while engine.stats().preemptions == 0:
        engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["p"], "the old one had to go itself"
    assert finish_one(engine, "p").finish_reason is FinishReason.LENGTH  # the fake asserts it in `preempted`
    connector.release("p")
    assert finish_one(engine, "old").finish_reason is FinishReason.LENGTH
