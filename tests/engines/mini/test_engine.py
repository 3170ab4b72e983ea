"""The step loop with a tiny model: tokens are the same however requests are cut, batched, cached, preempted."""

from dataclasses import replace
from typing import Any

import pytest

from kvferry.engines.mini.api import FinishReason
from kvferry.engines.mini.engine import Engine
from kvferry.errors import RequestError, RequestTooLong
from kvferry.ids import RequestId
from kvferry.wire.prompt_digest import pack_tokens
from tests.engines.mini.conftest import MakeEngine, ask, finish, prompt_of, text_of, tokens_of

pytestmark = pytest.mark.engine

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 70, 100)


@pytest.fixture
def alone(make_engine: MakeEngine) -> dict[int, list[int]]:
    """Returns the answer to each prompt alone, with the whole prompt in one step and nothing cached."""
    engine = make_engine(max_batch_tokens=256, prefix_caching=False)
    answers = {}
    for length in LENGTHS:
        engine.add(ask("r", prompt_of(length, seed=length)))
        answers[length] = tokens_of(finish(engine)["r"])
        assert len(answers[length]) == 8
    return answers


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("block_tokens", [1, 8, 16])
def test_chunks_batches_and_block_sizes_change_no_token(
    make_engine: MakeEngine, alone: dict[int, list[int]], chunk: int, block_tokens: int
) -> None:
    engine = make_engine(max_batch_tokens=chunk, block_tokens=block_tokens, num_blocks=1 + 640 // block_tokens)
    for length in LENGTHS:
        engine.add(ask(str(length), prompt_of(length, seed=length)))
    outputs = finish(engine)
    assert {length: tokens_of(outputs[str(length)]) for length in LENGTHS} == alone


def test_a_full_cache_preempts_the_newest_and_changes_no_token(
    make_engine: MakeEngine, alone: dict[int, list[int]]
) -> None:
    # There is room for the prompts of several requests, but not for all their answers.
    engine = make_engine(num_blocks=1 + 27, block_tokens=4, prefix_caching=False)
    for length in LENGTHS:
        engine.add(ask(str(length), prompt_of(length, seed=length)))
    outputs = finish(engine)
    assert engine.stats().preemptions > 0
    assert {length: tokens_of(outputs[str(length)]) for length in LENGTHS} == alone


def test_the_oldest_request_is_never_preempted(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=1 + 12, block_tokens=4)
    for name in ("old", "middle", "new"):
        engine.add(ask(name, prompt_of(12, seed=len(name)), max_tokens=20))
    oldest = engine.scheduler.waiting[0]
    outputs = finish(engine)
    assert oldest.num_preemptions == 0
    assert engine.stats().preemptions > 0
    assert [len(tokens_of(outputs[name])) for name in ("old", "middle", "new")] == [20, 20, 20]


def test_decoding_continues_during_a_long_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=16)
    engine.add(ask("short", prompt_of(4), max_tokens=30))
    engine.step()
    engine.add(ask("long", prompt_of(300)))
    for _ in range(10):
        names = {output.request_id for output in engine.step() if output.token_ids}
        assert names == {"short"}, "each step of the long prompt brings the short one a token"


def test_a_cached_prefix_is_not_computed_again(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_caching=True)
    prompt = prompt_of(70)
    engine.add(ask("first", prompt))
    first = finish(engine)["first"]
    assert first[-1].account is not None
    assert (first[-1].account.cached, first[-1].account.recomputed) == (0, 70)
    engine.add(ask("again", prompt))
    again = finish(engine)["again"]
    assert again[-1].account is not None
    assert (again[-1].account.cached, again[-1].account.recomputed) == (64, 6)
    assert tokens_of(again) == tokens_of(first)
    engine.add(ask("other", [*prompt[:33], *prompt_of(20, seed=9)]))
    other = finish(engine)["other"]
    assert other[-1].account is not None
    assert other[-1].account.cached == 32


def test_a_prompt_of_whole_blocks_is_computed_from_its_last_block(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = prompt_of(64)
    engine.add(ask("first", prompt))
    first = tokens_of(finish(engine)["first"])
    engine.add(ask("again", prompt))
    again = finish(engine)["again"]
    assert again[-1].account is not None
    assert again[-1].account.cached == 48, "the last token must be computed, and with it its block"
    assert tokens_of(again) == first


def test_answers_are_a_prefix_too(make_engine: MakeEngine) -> None:
    engine = make_engine(block_tokens=4)
    prompt = prompt_of(10)
    engine.add(ask("turn 1", prompt, max_tokens=9))
    answer = tokens_of(finish(engine)["turn 1"])
    engine.add(ask("turn 2", [*prompt, *answer, *prompt_of(5, seed=3)]))
    account = finish(engine)["turn 2"][-1].account
    assert account is not None
    assert account.cached == 16, "18 tokens of the first turn were computed"


def test_requests_under_different_salts_share_no_block(make_engine: MakeEngine) -> None:  # R38
    engine = make_engine()
    answers, cached = [], []
    for salt in ("", "a", "b", "a", ""):
        engine.add(replace(ask("r", prompt_of(64)), salt=salt))
        outputs = finish(engine)["r"]
        answers.append(tokens_of(outputs))
        cached.append(outputs[-1].account and outputs[-1].account.cached)
    assert cached == [0, 0, 0, 48, 48]
    assert all(answer == answers[0] for answer in answers)


def test_prefix_caching_can_be_off(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_caching=False)
    for name in ("a", "b"):
        engine.add(ask(name, prompt_of(70)))
        account = finish(engine)[name][-1].account
        assert account is not None
        assert account.recomputed == 70


def test_the_account_adds_up_after_preemption_too(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=1 + 12, block_tokens=4)
    for name in ("a", "b", "c"):
        engine.add(ask(name, prompt_of(13, seed=ord(name)), max_tokens=20))
    outputs = finish(engine)
    assert engine.stats().preemptions > 0
    for name in ("a", "b", "c"):
        account = outputs[name][-1].account
        assert account is not None
        assert account.handed_over + account.cached + account.recomputed == 13
        assert account.recomputed >= 1


@pytest.mark.parametrize("steps", range(6))
def test_abort_at_any_moment_frees_everything(make_engine: MakeEngine, steps: int) -> None:
    engine = make_engine(max_batch_tokens=16, prefix_caching=False)
    engine.add(ask("gone", prompt_of(40)))
    engine.add(ask("stays", prompt_of(20, seed=1)))
    for _ in range(steps):
        engine.step()
    engine.abort(RequestId("gone"))
    engine.check()
    outputs = finish(engine)
    assert outputs["gone"][-1].finish_reason is FinishReason.ABORT
    assert outputs["stays"][-1].finish_reason is FinishReason.LENGTH
    assert engine.blocks.num_free == engine.blocks.num_usable


def test_abort_of_an_unknown_or_ended_request_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.abort(RequestId("never seen"))
    engine.add(ask("r", prompt_of(5)))
    finish(engine)
    engine.abort(RequestId("r"))
    assert not engine.has_work()
    assert engine.step() == []


def test_each_request_ends_exactly_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=3)
    for i in range(9):
        engine.add(ask(str(i), prompt_of(5 + i, seed=i), max_tokens=1 + i))
    outputs = finish(engine)
    assert [sum(output.finish_reason is not None for output in outputs[str(i)]) for i in range(9)] == [1] * 9
    assert all(outputs[str(i)][-1].finish_reason for i in range(9))


def test_at_most_max_running_requests_run(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=2)
    for i in range(5):
        engine.add(ask(str(i), prompt_of(5, seed=i)))
    while engine.has_work():
        engine.step()
        assert len(engine.scheduler.running) <= 2


# Requests that cannot be served


def test_prompt_and_answer_beyond_the_context_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=100)
    with pytest.raises(RequestTooLong, match=r"^95 prompt tokens and max_tokens=6 .* context of 100\. .* at most 5 "):
        engine.add(ask("r", prompt_of(95), max_tokens=6))
    engine.add(ask("r", prompt_of(95), max_tokens=5))
    assert len(tokens_of(finish(engine)["r"])) == 5


def test_a_request_that_never_fits_the_cache_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=1 + 4, block_tokens=16)
    with pytest.raises(RequestTooLong, match=r"cache of 64 tokens.*larger cache_bytes"):
        engine.add(ask("r", prompt_of(60), max_tokens=6))
    engine.add(ask("r", prompt_of(60), max_tokens=5))  # the last token needs no slot
    assert len(tokens_of(finish(engine)["r"])) == 5


def test_bad_prompts_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="no tokens"):
        engine.add(ask("r", []))
    with pytest.raises(RequestError, match="token id 320; this model has ids 0 to 319"):
        engine.add(ask("r", [5, 320]))
    with pytest.raises(RequestError, match="token id 320; this model has ids 0 to 319"):
        engine.add(replace(ask("r", [5, 320]), packed=pack_tokens([5, 320])))
    with pytest.raises(RequestError, match="token id -1"):
        engine.add(ask("r", [-1]))
    engine.add(ask("r", [5]))
    with pytest.raises(RequestError, match="request_id='r' is in use"):
        engine.add(ask("r", [6]))


# Ends and choices, through the whole engine


def _answer(engine: Engine, **sampling: Any) -> list[int]:
    engine.add(ask("r", prompt_of(20), **sampling))
    return tokens_of(finish(engine)["r"])


def test_stop_token_and_min_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    plain = _answer(engine)
    engine.add(ask("r", prompt_of(20), stop_token_ids=(plain[2],)))
    outputs = finish(engine)["r"]
    end = plain.index(plain[2]) + 1
    assert tokens_of(outputs) == plain[:end]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, plain[2])
    longer = _answer(engine, stop_token_ids=(plain[2],), min_tokens=6)
    assert len(longer) >= 6
    assert plain[2] not in longer[:6], "a stop token cannot come before min_tokens"


def test_a_stop_string_ends_the_text_before_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(ask("r", prompt_of(20), max_tokens=12))
    text = text_of(finish(engine)["r"])
    stop = text[4:6]
    engine.add(ask("r", prompt_of(20), max_tokens=12, stop=(stop,)))
    outputs = finish(engine)["r"]
    assert text_of(outputs) == text[: text.index(stop)]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)


def test_eos_ends_unless_ignored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    bias = {0: 100.0}  # makes the end token the most likely one
    engine.add(ask("r", prompt_of(20), ignore_eos=False, logit_bias=bias))
    outputs = finish(engine)["r"]
    assert tokens_of(outputs) == [0]
    assert text_of(outputs) == ""
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, None)
    assert _answer(engine, logit_bias=bias) == [0] * 8


def test_seeded_draws_survive_batching_and_preemption(make_engine: MakeEngine) -> None:
    alone = {}
    for i in range(4):
        engine = make_engine()
        engine.add(ask(str(i), prompt_of(12, seed=i), temperature=1.0, seed=i, max_tokens=16))
        alone[i] = tokens_of(finish(engine)[str(i)])
    engine = make_engine(num_blocks=1 + 14, block_tokens=4)
    for i in range(4):
        engine.add(ask(str(i), prompt_of(12, seed=i), temperature=1.0, seed=i, max_tokens=16))
    outputs = finish(engine)
    assert engine.stats().preemptions > 0
    assert {i: tokens_of(outputs[str(i)]) for i in range(4)} == alone
    assert len({tuple(answer) for answer in alone.values()}) == 4


def test_unseeded_requests_differ(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for i in range(3):
        engine.add(ask(str(i), prompt_of(12), temperature=1.5, max_tokens=12))
    outputs = finish(engine)
    assert len({tuple(tokens_of(outputs[str(i)])) for i in range(3)}) == 3


def test_blocks_of_a_prompt_are_contiguous(make_engine: MakeEngine) -> None:
    engine = make_engine(block_tokens=4, num_blocks=128, prefix_caching=False)
    for i in range(20):
        engine.add(ask(str(i), prompt_of(20 + 7 * (i % 4), seed=i), max_tokens=5 + i))
        engine.step()
    finish(engine)
    assert engine.stats().blocks_per_run > 4, "of 5 to 11 blocks a prompt"
