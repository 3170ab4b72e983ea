"""The scheduler half in vLLM's terms, as a decode engine: hand-offs from arrival to landing, failures, R51."""

from dataclasses import replace
from typing import Any

import pytest

from kvferry.connector.base import StepReport
from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.ids import Incarnation
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import FailurePolicy
from kvferry.wire.prompt_digest import Agreement, Prompt
from tests.harness.vllm_scheduler_side import (
    FULL,
    STATE,
    Engine,
    Request,
    failed,
    from_prefill,
    landed,
    released,
    waiting,
)


def test_a_remote_prefill_from_arrival_to_landing() -> None:
    engine = Engine()
    waiting(engine)
    orders, failing = engine.orders()
    (want,) = orders.fetch
    assert (want.wanted, want.tables) == (TokenRange(0, 40), (BlockTable(0, 0, (1, 2, 3)),))
    assert not failing
    ended = engine.half.update([landed()])
    assert ended.received == {"r"}
    assert not ended.sent
    assert not engine.half.has_pending_work()


def test_what_is_cached_here_is_not_requested() -> None:  # R30
    engine = Engine()
    waiting(engine, cached=16)
    assert engine.orders()[0].fetch[0].wanted == TokenRange(16, 40)


def test_prefill_is_informed_if_all_is_cached_here() -> None:  # R25
    engine = Engine()
    request = Request("r", from_prefill())
    engine.half.on_new_request(request)
    assert engine.half.get_num_new_matched_tokens(request, 40) == (0, False)
    engine.half.update_state_after_alloc(request, engine.manager.allocate("r", 3), 0)
    assert engine.orders()[0].fetch[0].wanted == TokenRange(40, 40)
    assert engine.half.update([released()]).received == frozenset()


def test_the_second_call_after_the_load_changes_nothing() -> None:
    engine = Engine()
    request = waiting(engine)
    engine.orders()
    engine.half.update([landed()])
    engine.half.update_state_after_alloc(request, engine.manager.get_blocks("r"), 0)
    assert engine.half.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not engine.orders()[0]


def test_it_asks_again_while_the_handshake_runs() -> None:
    engine = Engine()
    engine.board.answer = PeerView(PeerStatus.ASKING)
    request = Request("r", from_prefill())
    engine.half.on_new_request(request)
    assert engine.half.get_num_new_matched_tokens(request, 0) == (None, False)
    engine.board.answer = PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("i"))
    assert engine.half.get_num_new_matched_tokens(request, 0) == (40, True)


def test_prompt_logprobs_do_not_wait_for_a_handshake() -> None:
    """vLLM continues with such a request, whatever we answer."""
    engine = Engine()
    engine.board.answer = PeerView(PeerStatus.ASKING)
    request = Request("r", from_prefill())
    engine.half.on_new_request(request)
    engine.half.get_num_new_matched_tokens(request, 0)
    engine.half.update_state_after_alloc(request, engine.manager.allocate("r", 3), 0)
    assert not engine.orders()[0].fetch
    assert engine.half.request_finished(request, ([1, 2, 3],), well=True) == (False, None)


def test_an_abort_in_flight_keeps_the_blocks_until_no_peer_can_write() -> None:  # R28
    engine = Engine()
    request = waiting(engine)
    engine.orders()
    assert engine.half.request_finished(request, ([1, 2, 3],), well=False) == (True, None)
    assert engine.orders()[0].cancel
    assert engine.half.update([failed()]).received == frozenset()
    assert engine.half.update([released()]).sent == {"r"}
    assert not engine.half.has_pending_work()


def test_an_abort_in_the_queue_frees_prefill_and_keeps_nothing() -> None:
    engine = Engine()
    request = Request("r", from_prefill())
    engine.half.on_new_request(request)
    engine.half.get_num_new_matched_tokens(request, 0)
    assert engine.half.request_finished(request, ([],), well=False) == (False, None)
    assert engine.orders()[0].cancel
    assert not engine.half.has_pending_work()


# Failures


def test_recompute_starts_again_at_once_and_the_old_blocks_are_not_reused() -> None:  # R28 R29
    engine = Engine()
    request = waiting(engine)
    engine.orders()
    old = [block for group in engine.manager.held["r"] for block in group]
    ended = engine.half.update([failed()])
    assert ended.received == {"r"}
    assert request.num_computed_tokens == 0
    assert engine.manager.get_blocks("r").blocks == ([],)
    assert {block.ref_cnt for block in old} == {1}, "a peer may still write into them"
    assert engine.half.has_pending_work()
    assert engine.half.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.half.update([released()])
    assert {block.ref_cnt for block in old} == {0}
    assert not engine.half.has_pending_work()


def test_a_failure_that_is_safe_already_frees_the_blocks_in_the_same_step() -> None:
    engine = Engine()
    waiting(engine)
    engine.orders()
    old = engine.manager.held["r"][0]
    engine.half.update([failed(released=True)])
    assert {block.ref_cnt for block in old} == {0}


def test_the_policy_fail_ends_the_request_and_every_worker_reports_it() -> None:  # R29
    engine = Engine(policy=FailurePolicy.FAIL)
    request = waiting(engine)
    engine.orders()
    assert engine.half.update([failed(released=True)]).received == frozenset()
    assert engine.orders()[1] == {"r"}
    assert engine.orders()[1] == frozenset(), "once"
    assert engine.half.request_finished(request, ([],), well=False) == (False, None)


@pytest.mark.parametrize(
    "raw", [from_prefill(transfer_mode="push"), {"do_remote_prefill": True}, {"do_remote_prefill": 3}]
)
def test_what_cannot_come_fails_by_policy_after_blocks_were_given(raw: dict[str, Any]) -> None:
    """vLLM ends a request with an error only while it waits for a load."""
    engine = Engine(policy=FailurePolicy.FAIL)
    request = Request("r", raw)
    engine.half.on_new_request(request)
    assert engine.half.get_num_new_matched_tokens(request, 16) == (24, True)
    engine.half.update_state_after_alloc(request, engine.manager.allocate("r", 3), 24)
    assert engine.orders()[1] == {"r"}


@pytest.mark.parametrize(
    "raw", [from_prefill(transfer_mode="push"), {"do_remote_prefill": True}, {"do_remote_prefill": 3}]
)
def test_what_cannot_come_is_computed_here_by_policy(raw: dict[str, Any]) -> None:
    engine = Engine()
    request = Request("r", raw)
    engine.half.on_new_request(request)
    assert engine.half.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.half.update_state_after_alloc(request, engine.manager.allocate("r", 3), 0)
    assert engine.half.request_finished(request, ([1, 2, 3],), well=True) == (False, None)
    assert not engine.half.has_pending_work()


def test_a_refused_peer_costs_the_next_request_nothing() -> None:  # R24
    engine = Engine()
    engine.board.answer = PeerView(PeerStatus.REFUSED, "kv.dtype differs")
    one = Request("r", from_prefill())
    engine.half.on_new_request(one)
    assert engine.half.get_num_new_matched_tokens(one, 0) == (0, False)
    engine.board.answer = PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("i"))
    other = Request("r2", from_prefill("t2"))
    engine.half.on_new_request(other)
    assert engine.half.get_num_new_matched_tokens(other, 0) == (40, True)


def test_a_shorter_hand_off_goes_on_after_what_arrived() -> None:  # R51
    """Prefill's prompt was another one: vLLM computes the rest, and caches nothing of what was matched beyond."""
    engine = Engine()
    request = waiting(engine)
    engine.orders()
    short = replace(landed().landed[0], arrived=TokenRange(0, 17), difference="another prompt")
    assert engine.half.update([StepReport(landed=(short,))]).received == {"r"}
    assert request.num_computed_tokens == 17
    assert engine.manager.get_blocks("r").get_block_ids() != ([],)


def test_a_shorter_hand_off_of_windows_or_states_starts_from_nothing() -> None:  # R51
    engine = Engine(forms=(FULL, STATE))
    request = waiting(engine)
    engine.orders()
    short = replace(landed().landed[0], arrived=TokenRange(0, 17))
    assert engine.half.update([StepReport(landed=(short,))]).received == {"r"}
    assert request.num_computed_tokens == 0
    assert engine.manager.get_blocks("r").get_block_ids() == ([],)  # vLLM allocates them again


def test_offers_and_fetches_know_the_prompt_to_its_last_token_and_its_salt() -> None:  # R51
    engine = Engine(backoff=1)
    request = Request("r", {"do_remote_decode": True, "transfer_id": "t1"}, cache_salt="tenant")
    whole = Prompt.of(list(request.prompt_token_ids), "[('cache_salt', 'tenant')]")
    engine.half.on_new_request(request)
    assert request.num_prompt_tokens == 39  # the back-off is not computed here, and still part of the prompt
    engine.manager.allocate("r", 3)
    request.num_computed_tokens = 39
    engine.half.request_finished(request, ([1, 2, 3],), well=True)
    (offer,) = engine.orders()[0].offer
    assert offer.prompt == whole
    decode = Engine(backoff=1)
    asked = Request("r", from_prefill(), cache_salt="other")
    decode.half.on_new_request(asked)
    tokens, _ = decode.half.get_num_new_matched_tokens(asked, 0)
    assert tokens == 39
    decode.half.update_state_after_alloc(asked, decode.manager.allocate("r", 3), tokens)
    (fetch,) = decode.orders()[0].fetch
    assert whole.agreement(fetch.prompt) == Agreement(0, whole=False)
