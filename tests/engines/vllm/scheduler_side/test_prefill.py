"""The scheduler half in vLLM's terms, as a prefill engine: what is offered, when, and which blocks are kept for it."""

from typing import Any

import pytest

from kvferry.engines.vllm.describe.engine_facts import backoff_tokens
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import TransferMode
from tests.harness.vllm_scheduler_side import FULL, STATE, Engine, Request, released, waiting


def prefilling(engine: Engine, **more: Any) -> Request:
    request = Request("r", {"do_remote_decode": True, "transfer_id": "t1", **more})
    engine.half.on_new_request(request)
    assert engine.half.get_num_new_matched_tokens(request, 0) == (0, False)
    blocks = engine.manager.allocate("r", *(1 if form is STATE else 3 for form in engine.half._forms))
    engine.half.update_state_after_alloc(request, blocks, 0)
    return request


def test_a_remote_decode_from_arrival_to_release() -> None:  # R15 R25
    engine = Engine()
    request = prefilling(engine)
    request.num_computed_tokens = 40
    blocks = engine.manager.held["r"][0]
    keep, returned = engine.half.request_finished(request, ([1, 2, 3],), well=True)
    assert not keep, "a request that vLLM holds for us has it step all the time"
    engine.manager.free("r")
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert returned is not None
    assert returned["do_remote_prefill"] is True
    assert returned["transfer_mode"] == "pull"
    assert (returned["remote_engine_id"], returned["remote_request_id"], returned["remote_num_tokens"]) == (
        "me",
        "r",
        40,
    )
    assert (returned["remote_block_ids"], returned["tp_size"], returned["pp_size"]) == ([[1, 2, 3]], 1, 1)
    had_orders = engine.half.has_orders
    (offer,) = engine.orders()[0].offer
    assert had_orders
    assert offer.final
    assert not engine.half.has_orders, "the engine may sleep"
    assert engine.half.has_pending_work()
    assert engine.half.update([released()]).sent == frozenset(), "vLLM has forgotten it"
    assert [block.ref_cnt for block in blocks] == [0, 0, 0]
    assert not engine.half.has_pending_work()


def test_blocks_that_were_offered_chunk_by_chunk_come_back_once() -> None:  # R28
    engine = Engine(forms=(FULL, STATE))
    request = prefilling(engine)
    blocks = [block for group in engine.manager.held["r"] for block in group]
    request.num_computed_tokens = 16
    engine.orders()
    request.num_computed_tokens = 40
    engine.half.request_finished(request, ([1, 2, 3], [11]), well=True)
    engine.manager.free("r")
    assert [block.ref_cnt for block in blocks] == [1, 1, 1, 1]
    engine.half.update([released()])
    assert [block.ref_cnt for block in blocks] == [0, 0, 0, 0]


def test_only_stored_tokens_of_a_chunk_are_offered() -> None:
    engine = Engine()
    request = prefilling(engine)
    request.num_computed_tokens, request.num_in_flight_tokens = 32, 16  # the second chunk is being computed
    (offer,) = engine.orders()[0].offer
    assert (offer.ready, offer.final) == (TokenRange(0, 16), False)
    assert not engine.orders()[0].offer, "nothing new"


def test_a_prefix_hit_is_offered_only_after_a_step_of_its_own_request() -> None:  # R28
    """Another request's step may still be writing the blocks of the hit: vLLM schedules asynchronously."""
    engine = Engine()
    request = prefilling(engine)
    assert engine.half.get_num_new_matched_tokens(request, 16) == (0, False)
    request.num_computed_tokens = 16
    assert not engine.orders()[0].offer
    request.num_computed_tokens, request.num_in_flight_tokens = 32, 16
    assert not engine.orders()[0].offer
    request.num_in_flight_tokens = 0
    (offer,) = engine.orders()[0].offer
    assert (offer.ready, offer.final) == (TokenRange(0, 32), False)


def test_after_a_preemption_offered_blocks_are_not_reused_until_the_peer_is_done() -> None:  # R28
    engine = Engine()
    request = prefilling(engine)
    request.num_computed_tokens = 16
    engine.orders()
    blocks = engine.manager.held["r"][0]
    engine.manager.free("r")  # vLLM frees before it informs us
    request.num_computed_tokens = 0
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    orders, _ = engine.orders("r")
    assert orders.withdraw
    engine.half.update([released()])
    assert [block.ref_cnt for block in blocks] == [0, 0, 0]


def test_a_prefill_that_ends_for_another_reason_is_withdrawn() -> None:
    engine = Engine()
    request = prefilling(engine)
    request.num_computed_tokens = 16
    engine.orders()
    blocks = engine.manager.held["r"][0]
    keep, returned = engine.half.request_finished(request, ([1, 2, 3],), well=False)
    assert (keep, returned) == (False, None)
    engine.manager.free("r")
    assert engine.orders()[0].withdraw
    assert [block.ref_cnt for block in blocks] == [1, 1, 1], "a peer may be reading them"
    engine.half.update([released()])
    assert [block.ref_cnt for block in blocks] == [0, 0, 0]


def test_the_end_of_the_prompt_is_left_to_decode_once() -> None:  # R32 R33
    engine = Engine(forms=(FULL, STATE), backoff=1)
    request = Request("r", {"do_remote_decode": True, "transfer_id": "t1"})
    engine.half.on_new_request(request)
    assert (request.num_prompt_tokens, request.num_tokens, request.max_tokens) == (39, 39, 1)
    engine.half.get_num_new_matched_tokens(request, 0)
    engine.manager.allocate("r", 3, 1)
    request.num_computed_tokens = 39
    engine.half.request_finished(request, ([1, 2, 3], [11]), well=True)
    (offer,) = engine.orders()[0].offer
    assert offer.tables[1] == BlockTable(1, 39, (11,))
    assert offer.ready == TokenRange(0, 39)


def test_decode_requests_what_prefill_computes_and_no_more() -> None:  # R32
    engine = Engine(TransferMode.PUSH, forms=(FULL, STATE), backoff=1)
    waiting(engine)
    (want,) = engine.orders()[0].fetch
    assert want.wanted == TokenRange(0, 39)
    assert want.tables[1].first_token == 39


@pytest.mark.parametrize(
    ("lookahead", "states", "windows", "wanted"),
    [(0, False, False, 0), (1, False, False, 0), (3, False, False, 2), (0, True, False, 1), (0, False, True, 1),
     (3, True, True, 2)],
)  # fmt: skip
def test_the_back_off(lookahead: int, states: bool, windows: bool, wanted: int) -> None:  # R32
    assert backoff_tokens(lookahead, states=states, windows=windows) == wanted
