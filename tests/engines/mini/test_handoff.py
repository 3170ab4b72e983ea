"""Hand-offs that land, on decode as the engine sees them; the connector is a fake, and the KV is real. Those that fail
are in test_handoff_failures.py."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvferry.connector.base import Match, Outcome
from kvferry.engines.mini.api import FinishReason
from kvferry.engines.mini.scheduling.block_manager import BlockHash, chain_hashes
from kvferry.testing.fake_clock import FakeClock
from kvferry.wire.first_token import FirstToken, encode_first_token
from kvferry.wire.params import HandoffParams
from kvferry.wire.prompt_digest import pack_tokens
from tests.engines.mini.conftest import MakeEngine, ask, cache_of, finish, prompt_of, tokens_of
from tests.engines.mini.sides import (
    FOR_REMOTE,
    FROM_REMOTE,
    Side,
    answer_alone,
    bring,
    finish_one,
    new_side,
    prefilled,
    until_waiting,
)
from tests.harness.fake_connector import copy_tokens

pytestmark = pytest.mark.engine


@pytest.fixture
def make_side(make_engine: MakeEngine) -> Callable[..., Side]:
    return partial(new_side, make_engine)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 64])
@pytest.mark.parametrize("blocks", [(16, 16), (16, 8), (4, 16)])
def test_decode_continues_after_the_prompt_and_computes_none_of_it(
    make_engine: MakeEngine, make_side: Callable[..., Side], length: int, blocks: tuple[int, int]
) -> None:  # R36
    prompt = prompt_of(length, seed=length)
    alone = tokens_of(answer_alone(make_engine, prompt))
    p, d = make_side(block_tokens=blocks[0]), make_side(block_tokens=blocks[1])
    params = prefilled(p, prompt)
    engine, connector = d
    engine.add(ask("d", prompt, params))
    until_waiting(engine)
    assert engine.stats().steps == 0
    bring(p, d, "d", length)
    outputs = finish(engine)["d"]
    assert tokens_of(outputs) == alone
    assert engine.stats().steps == 7, "the first token was adopted; seven were computed, a step each"
    account = outputs[0].account
    assert account is not None
    assert (account.handed_over, account.cached, account.recomputed) == (length, 0, 0)
    assert connector.seen.count("match d 0") == 1
    p[1].release("p")
    finish(p[0])


def test_a_prompt_is_packed_once_per_request_and_its_block_hashes_go_along(
    make_side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:  # R51
    """The same packed tokens serve the prefix cache and what a hand-off is bound to."""
    packed: list[int] = []

    def count(token_ids: Sequence[int]) -> bytes:
        packed.append(len(token_ids))
        return pack_tokens(token_ids)

    for module in ("kvferry.wire.prompt_digest", "kvferry.engines.mini.scheduling.block_manager"):
        monkeypatch.setattr(f"{module}.pack_tokens", count)
    prompt = prompt_of(40)
    p, d = make_side(block_tokens=16), make_side(block_tokens=16)
    p[0].add(ask("p", prompt, FOR_REMOTE, max_tokens=1))
    (output,) = finish(p[0])["p"]
    hashes: list[BlockHash] = []
    chain_hashes(hashes, prompt, 16)
    assert output.prompt_hashes == tuple(hashes)
    assert packed == [40, 32], "once by the engine, and once just now"
    d[0].add(ask("d", prompt, FROM_REMOTE))
    until_waiting(d[0])
    assert packed == [40, 32, 40]
    d[0].add(replace(ask("e", prompt), packed=pack_tokens(prompt)))
    d[0].step()
    assert packed == [40, 32, 40], "the server has packed it"
    bring(p, d, "d", 40)
    finish(d[0])
    p[1].release("p")
    finish(p[0])


def test_without_a_first_token_only_the_last_prompt_token_is_computed(
    make_engine: MakeEngine, make_side: Callable[..., Side]
) -> None:
    prompt = prompt_of(40)
    alone = tokens_of(answer_alone(make_engine, prompt))
    p, d = make_side(), make_side()
    prefilled(p, prompt)
    d[0].add(ask("d", prompt, FROM_REMOTE))
    until_waiting(d[0])
    bring(p, d, "d", 40)
    outputs = finish(d[0])["d"]
    assert tokens_of(outputs) == alone
    account = outputs[-1].account
    assert account is not None
    assert (account.handed_over, account.recomputed) == (39, 1)
    assert account.reason == "prefill handed over all but the last 1 prompt tokens"
    p[1].release("p")
    finish(p[0])


def test_a_first_token_that_comes_with_the_last_byte_is_adopted(
    make_engine: MakeEngine, make_side: Callable[..., Side]
) -> None:  # push mode
    prompt = prompt_of(40)
    alone = tokens_of(answer_alone(make_engine, prompt))
    p, d = make_side(), make_side()
    params = prefilled(p, prompt)
    d[0].add(ask("d", prompt, FROM_REMOTE))
    until_waiting(d[0])
    copy_tokens(p[1].cache, p[1].tables["p"], d[1].cache, d[1].tables["d"], 0, 40)  # type: ignore[index]
    assert params.first_token is not None
    d[1].land("d", 40, note=encode_first_token(FirstToken(token=params.first_token)))
    outputs = finish(d[0])["d"]
    assert tokens_of(outputs) == alone
    assert outputs[-1].account is not None
    assert outputs[-1].account.handed_over == 40
    p[1].release("p")
    finish(p[0])


@pytest.mark.parametrize("note", [b"\xc1garbage", encode_first_token(FirstToken(token=10**9))])
def test_a_bad_first_token_is_not_used(make_engine: MakeEngine, make_side: Callable[..., Side], note: bytes) -> None:
    prompt = prompt_of(40)
    p, d = make_side(), make_side()
    prefilled(p, prompt)
    d[0].add(ask("d", prompt, HandoffParams(do_remote_prefill=True, first_token=-3)))
    until_waiting(d[0])
    copy_tokens(p[1].cache, p[1].tables["p"], d[1].cache, d[1].tables["d"], 0, 40)  # type: ignore[index]
    d[1].land("d", 40, note=note)
    outputs = finish(d[0])["d"]
    assert tokens_of(outputs) == tokens_of(answer_alone(make_engine, prompt))
    assert outputs[-1].account is not None
    assert outputs[-1].account.recomputed == 1
    p[1].release("p")
    finish(p[0])


def test_a_shorter_hand_off_is_completed_by_decode(make_engine: MakeEngine, make_side: Callable[..., Side]) -> None:
    prompt = prompt_of(40)
    p, d = make_side(), make_side()
    prefilled(p, prompt)
    d[0].add(ask("d", prompt, HandoffParams(do_remote_prefill=True, remote_num_tokens=37)))
    until_waiting(d[0])
    bring(p, d, "d", 37)
    outputs = finish(d[0])["d"]
    assert tokens_of(outputs) == tokens_of(answer_alone(make_engine, prompt))
    account = outputs[-1].account
    assert account is not None
    assert (account.handed_over, account.cached, account.recomputed) == (37, 0, 3)
    p[1].release("p")
    finish(p[0])


def test_own_prefix_hits_are_not_requested(make_engine: MakeEngine, make_side: Callable[..., Side]) -> None:  # R30
    prompt = prompt_of(40)
    p, d = make_side(), make_side()
    params = prefilled(p, prompt)
    d[0].add(ask("warm", prompt[:20]))
    finish(d[0])
    d[0].add(ask("d", prompt, params))
    until_waiting(d[0])
    assert d[1].cached["d"] == 16  # type: ignore[index]
    bring(p, d, "d", 40)
    outputs = finish(d[0])["d"]
    assert tokens_of(outputs) == tokens_of(answer_alone(make_engine, prompt))
    account = outputs[-1].account
    assert account is not None
    assert (account.handed_over, account.cached, account.recomputed) == (24, 16, 0)
    p[1].release("p")
    finish(p[0])


def test_a_prompt_that_is_all_cached_starts_at_once_and_is_reported(
    make_engine: MakeEngine, make_side: Callable[..., Side]
) -> None:  # R30
    prompt = prompt_of(48)
    p, d = make_side(), make_side()
    params = prefilled(p, prompt)
    d[0].add(ask("warm", prompt))
    finish(d[0])
    steps = d[0].stats().steps
    d[0].add(ask("d", prompt, params))
    outputs = finish(d[0])["d"]
    assert "alloc d" in d[1].seen, "the connector must learn of it, to free prefill's blocks"
    assert tokens_of(outputs) == tokens_of(answer_alone(make_engine, prompt))
    assert d[0].stats().steps == steps + 7
    account = outputs[-1].account
    assert account is not None
    assert (account.handed_over, account.cached, account.recomputed) == (0, 48, 0)
    d[1].release("d")
    finish(d[0])
    p[1].release("p")
    finish(p[0])


def test_blocks_in_transit_serve_no_other_request(
    make_engine: MakeEngine, make_side: Callable[..., Side]
) -> None:  # I2
    prompt = prompt_of(40)
    p, d = make_side(), make_side()
    params = prefilled(p, prompt)
    d[0].add(ask("d", prompt, params))
    until_waiting(d[0])
    d[0].add(ask("same", prompt))
    account = finish_one(d[0], "same").account
    assert account is not None
    assert account.cached == 0
    bring(p, d, "d", 40)
    finish(d[0])
    p[1].release("p")
    finish(p[0])


def test_landed_blocks_serve_others(make_side: Callable[..., Side]) -> None:
    prompt = prompt_of(40)
    p, d = make_side(), make_side()
    params = prefilled(p, prompt)
    d[0].add(ask("d", prompt, params))
    until_waiting(d[0])
    bring(p, d, "d", 40)
    first = tokens_of(finish(d[0])["d"])
    d[0].add(ask("same", prompt))
    outputs = finish(d[0])["same"]
    assert tokens_of(outputs) == first
    assert outputs[-1].account is not None
    assert outputs[-1].account.cached == 32
    p[1].release("p")
    finish(p[0])


def test_a_request_that_waits_for_a_peer_holds_up_no_other(make_side: Callable[..., Side]) -> None:
    engine, connector = make_side()
    connector.answers = [Match(wait=True)] * 20
    engine.add(ask("d", prompt_of(40), FROM_REMOTE))
    engine.add(ask("other", prompt_of(10)))
    assert finish_one(engine, "other").finish_reason is FinishReason.LENGTH
    assert engine.stats().waiting == 1
    connector.answers = [Match(reason="gave up")]
    assert finish_one(engine, "d").finish_reason is FinishReason.LENGTH


def test_logprobs_and_seeds_continue_across_the_hand_off(
    make_engine: MakeEngine, make_side: Callable[..., Side]
) -> None:
    prompt = prompt_of(40)
    sampling = {"temperature": 0.9, "seed": 11, "logprobs": 2, "frequency_penalty": 0.5}
    alone = answer_alone(make_engine, prompt, **sampling)
    p, d = make_side(), make_side()
    params = prefilled(p, prompt, **sampling)
    d[0].add(ask("d", prompt, params, **sampling))
    until_waiting(d[0])
    bring(p, d, "d", 40)
    outputs = finish(d[0])["d"]
    assert tokens_of(outputs) == tokens_of(alone)
    got, want = ([lp for output in side for lp in output.logprobs] for side in (outputs, alone))
    assert [lp.logprob for lp in got] == pytest.approx([lp.logprob for lp in want], abs=1e-4)
    assert [[token for token, _ in lp.top] for lp in got] == [[token for token, _ in lp.top] for lp in want]
    p[1].release("p")
    finish(p[0])


def test_timing_reports_what_the_hand_off_cost(make_side: Callable[..., Side]) -> None:
    clock = FakeClock()
    engine, connector = make_side(clock=clock)
    engine.add(ask("d", prompt_of(40), FROM_REMOTE))
    until_waiting(engine)
    clock.advance(2.0)
    connector.land("d", 40)
    timing = finish(engine)["d"][-1].timing
    assert timing is not None
    assert (timing.num_bytes, timing.num_runs, timing.transfer_s, timing.wait_s, timing.verified_cells) == (
        1000, 3, 0.5, 2.0, 7,
    )  # fmt: skip


def test_blocks_are_cleared_before_they_are_offered_to_a_peer(make_side: Callable[..., Side]) -> None:
    """Otherwise a faulty peer's NaN would outlive its request and reach another one through masked positions."""
    engine, connector = make_side(num_blocks=1 + 8, prefix_caching=False)
    cache_of(engine).data[1:] = float("nan")
    engine.add(ask("d", prompt_of(40), FROM_REMOTE))
    until_waiting(engine)
    blocks = list(connector.tables["d"][0].block_ids)  # type: ignore[index]
    assert not torch.count_nonzero(cache_of(engine).data[blocks])
    connector.fail("d")
    connector.release("d")
    assert tokens_of(finish(engine)["d"])


def test_only_pending_hand_offs_step_without_computing(make_side: Callable[..., Side]) -> None:
    engine, connector = make_side()
    assert not engine.has_work()
    connector.outcomes = [Outcome()] * 3
    while engine.has_work():
        assert engine.step() == []
    assert engine.stats().steps == 0


def test_close_ends_the_connector(make_side: Callable[..., Side]) -> None:
    engine, connector = make_side()
    engine.close()
    assert connector.seen == ["close"]
