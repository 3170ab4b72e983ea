"""Hand-offs that fail, are for another prompt, or do not come, on decode as the engine sees them. The connector is a
fake, and the KV is real."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from kvferry.connector.base import Match
from kvferry.engines.mini.api import FinishReason
from kvferry.ids import RequestId
from kvferry.wire.params import HandoffParams
from tests.engines.mini.conftest import MakeEngine, ask, cache_of, finish, prompt_of, tokens_of
from tests.engines.mini.sides import (
    FROM_REMOTE,
    Side,
    answer_alone,
    bring,
    new_side,
    prefilled,
    until_waiting,
)
from tests.harness.fake_connector import copy_tokens

pytestmark = pytest.mark.engine


@pytest.fixture
def make_side(make_engine: MakeEngine) -> Callable[..., Side]:
    return partial(new_side, make_engine)


def test_a_failed_hand_off_is_computed_by_decode_in_other_blocks(
    make_engine: MakeEngine, make_side: Callable[..., Side]
) -> None:  # R28, R29
    prompt = prompt_of(40)
    engine, connector = make_side()
    engine.add(ask("d", prompt, HandoffParams(do_remote_prefill=True, first_token=5)))
    until_waiting(engine)
    suspect = set(connector.tables["d"][0].block_ids)  # type: ignore[index]
    connector.fail("d")
    engine.step()
    engine.check()
    assert engine.blocks.num_held == 3
    request = engine.scheduler.running[0]
    assert not suspect & set(request.block_ids)
    outputs = finish(engine)["d"]
    assert tokens_of(answer_alone(make_engine, prompt))[1:] == tokens_of(outputs)[-7:]
    account = outputs[-1].account
    assert account is not None
    assert (account.recomputed, account.reason) == (40, "the peer is gone")
    assert not suspect & set(engine.blocks.find(request.hashes)), "their content was never valid"
    connector.release("d")
    finish(engine)
    assert engine.blocks.num_held == 0


def test_what_arrived_complete_of_a_failed_hand_off_is_kept(
    make_engine: MakeEngine, make_side: Callable[..., Side]
) -> None:  # R29
    prompt = prompt_of(40)
    p, d = make_side(), make_side()
    params = prefilled(p, prompt)
    d[0].add(ask("d", prompt, params))
    until_waiting(d[0])
    request = next(iter(d[0].scheduler.waiting_for_kv.values()))
    copy_tokens(p[1].cache, next(iter(p[1].tables.values())), d[1].cache, request.tables, 0, 37)
    blocks = list(request.block_ids)
    cache_of(d[0]).data[blocks[-1]] = float("nan")  # what a faulty peer may leave of an incomplete block
    d[1].fail("d", arrived=37, released=True)
    outputs = finish(d[0])["d"]
    assert tokens_of(outputs) == tokens_of(answer_alone(make_engine, prompt))
    account = outputs[-1].account
    assert account is not None
    assert (account.handed_over, account.recomputed, account.reason) == (32, 8, "the peer is gone")
    assert d[0].blocks.num_held == 0
    assert request.block_ids == []
    p[1].release("p")
    finish(p[0])


def test_by_policy_a_failed_hand_off_ends_the_request(make_side: Callable[..., Side]) -> None:  # R29
    engine, connector = make_side()
    engine.add(ask("d", prompt_of(40), FROM_REMOTE))
    until_waiting(engine)
    connector.fail("d", recompute=False)
    last = finish(engine)["d"][-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the peer is gone")
    assert engine.blocks.num_held == 3
    connector.release("d")
    finish(engine)
    assert engine.blocks.num_free == engine.blocks.num_usable


def test_the_connector_may_refuse_before_anything_is_allocated(make_side: Callable[..., Side]) -> None:
    engine, connector = make_side()
    connector.answers = [Match(error="it cannot be: change this")]
    engine.add(ask("d", prompt_of(40), FROM_REMOTE))
    last = finish(engine)["d"][-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "it cannot be: change this")
    assert engine.blocks.num_free == engine.blocks.num_usable


def test_the_connector_may_report_that_nothing_comes(make_engine: MakeEngine, make_side: Callable[..., Side]) -> None:
    prompt = prompt_of(40)
    engine, connector = make_side()
    connector.answers = [Match(reason="the peer was refused")]
    engine.add(ask("d", prompt, FROM_REMOTE))
    outputs = finish(engine)["d"]
    assert tokens_of(outputs) == tokens_of(answer_alone(make_engine, prompt))
    account = outputs[-1].account
    assert account is not None
    assert (account.recomputed, account.reason) == (40, "the peer was refused")
    assert "alloc d" not in connector.seen


def test_an_aborted_waiting_decode_keeps_its_blocks_until_they_are_released(
    make_side: Callable[..., Side],
) -> None:  # R28
    engine, connector = make_side()
    engine.add(ask("d", prompt_of(40), FROM_REMOTE))
    until_waiting(engine)
    engine.abort(RequestId("d"))
    finish(engine)
    assert engine.blocks.num_held == 3
    # Reports about a request that is gone change nothing.
    connector.land("d", 40)
    connector.fail("d")
    finish(engine)
    connector.release("d")
    connector.release("d")
    finish(engine)
    assert engine.blocks.num_free == engine.blocks.num_usable


def test_a_landed_request_may_be_preempted_and_then_computes_itself(
    make_engine: MakeEngine, make_side: Callable[..., Side]
) -> None:
    prompt = prompt_of(24)
    p = make_side(block_tokens=4)
    d = make_side(num_blocks=1 + 14, block_tokens=4, prefix_caching=False)
    params = prefilled(p, prompt)
    engine, connector = d
    engine.add(ask("old", prompt_of(12, seed=5), max_tokens=30))
    engine.step()
    engine.add(ask("d", prompt, params, max_tokens=20))
    engine.step()
    bring(p, d, "d", 24)
    outputs = finish(engine)
    assert engine.stats().preemptions > 0
    assert connector.seen.count("alloc d") == 1, "the hand-off is over: it is not asked for again"
    assert tokens_of(outputs["d"]) == tokens_of(answer_alone(make_engine, prompt, max_tokens=20))
    account = outputs["d"][-1].account
    assert account is not None
    assert (account.handed_over, account.recomputed, account.reason) == (24, 0, ""), "as at its first token"
    assert account.computed_again == 24
    p[1].release("p")
    finish(p[0])


def test_an_engine_without_a_connector_computes_and_gives_the_reason(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(ask("d", prompt_of(40), FROM_REMOTE))
    account = finish(engine)["d"][-1].account
    assert account is not None
    assert (account.recomputed, account.reason) == (40, "this engine has no connector")


@pytest.mark.parametrize("sent", [True, False])
def test_a_first_token_that_the_client_has_is_kept_whatever_happens_to_the_kv(
    make_engine: MakeEngine, make_side: Callable[..., Side], sent: bool
) -> None:
    prompt = prompt_of(40)
    alone = tokens_of(answer_alone(make_engine, prompt))
    engine, connector = make_side()
    other = (alone[0] + 1) % 50 + 3
    given = HandoffParams(do_remote_prefill=True, first_token=other)
    engine.add(replace(ask("d", prompt, given), first_token_sent=sent))
    until_waiting(engine)
    connector.fail("d", released=True)
    tokens = tokens_of(finish(engine)["d"])
    if sent:
        assert tokens[0] == other
        assert tokens[1:] == tokens_of(answer_alone(make_engine, [*prompt, other]))[:7]  # it continues from that token
    else:
        assert tokens == alone


def test_after_another_prompts_hand_off_only_the_common_prefix_is_used(
    make_side: Callable[..., Side], make_engine: MakeEngine
) -> None:
    """R51: decode computes the rest, takes no first token, and says why; its prefix cache has nothing foreign."""
    prefill, decode = make_side(), make_side()
    theirs = prompt_of(80)
    ours = [*theirs[:37], *reversed(theirs[37:])]
    params = prefilled(prefill, theirs)
    assert params.first_token is not None
    engine, _ = decode
    engine.add(ask("d", ours, params))
    until_waiting(engine)
    bring(prefill, decode, "d", 37, "prefill computed another prompt")
    outputs = finish(engine)["d"]
    right = tokens_of(answer_alone(make_engine, ours))
    assert tokens_of(outputs) == right
    account = outputs[-1].account
    assert account is not None
    assert (account.handed_over, account.recomputed) == (37, 43)
    assert account.reason == "prefill computed another prompt"
    for prompt, name in ((ours, "again"), (theirs, "theirs")):
        engine.add(ask(name, prompt))
        assert tokens_of(finish(engine)[name]) == tokens_of(answer_alone(make_engine, prompt))


def test_a_first_token_for_another_prompt_is_not_used(make_side: Callable[..., Side], make_engine: MakeEngine) -> None:
    """R51: all the KV of a prompt that is one token shorter arrives; what prefill chose follows the longer one."""
    prefill, decode = make_side(), make_side()
    theirs = prompt_of(49)
    ours = theirs[:-1]
    params = prefilled(prefill, theirs)
    engine, _ = decode
    engine.add(ask("d", ours, params))
    until_waiting(engine)
    bring(prefill, decode, "d", 48, "prefill computed another prompt")
    outputs = finish(engine)["d"]
    assert tokens_of(outputs) == tokens_of(answer_alone(make_engine, ours))
    account = outputs[-1].account
    assert account is not None
    assert (account.handed_over, account.recomputed) == (47, 1)


@pytest.mark.parametrize("released", [True, False])
def test_kv_of_a_failed_hand_off_never_enters_the_prefix_cache(
    make_side: Callable[..., Side], make_engine: MakeEngine, released: bool
) -> None:
    """R51: whatever bytes have come, and whether the request keeps its blocks or gets others."""
    prefill, decode = make_side(), make_side()
    theirs, ours = prompt_of(64), prompt_of(65)[1:]
    params = prefilled(prefill, theirs)
    engine, connector = decode
    engine.add(ask("d", ours, params))
    until_waiting(engine)
    (_, p) = prefill
    copy_tokens(p.cache, p.tables[RequestId("p")], connector.cache, connector.tables[RequestId("d")], 0, 64)
    connector.fail("d", released=released)
    right = tokens_of(answer_alone(make_engine, ours))
    assert tokens_of(finish(engine)["d"]) == right
    engine.add(ask("again", ours))
    assert tokens_of(finish(engine)["again"]) == right
    if not released:
        connector.release("d")
        engine.step()
