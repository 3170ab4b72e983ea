"""The scheduler half: which request is part of which hand-off."""

import pytest

from kvferry.connector.base import Match
from kvferry.connector.by_mode import PullScheduler, PushScheduler
from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.connector.scheduler import HandoffScheduler
from kvferry.handoff.orders import Failed, StepReport
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.settings import FailurePolicy, TransferMode
from kvferry.wire.first_token import FirstToken, decode_first_token
from kvferry.wire.params import HandoffParams
from tests.harness.scripted_half import TABLES, Board, R, Request, T, decode_request, landed, make, started


def test_a_class_that_does_not_state_its_mode_cannot_be_defined() -> None:  # R14
    with pytest.raises(TypeError, match="Silent does not state its transfer mode"):
        type("Silent", (HandoffScheduler,), {})
    assert PullScheduler.mode is TransferMode.PULL
    assert PushScheduler.mode is TransferMode.PUSH


def test_prefill_returns_the_parameters_that_routers_read() -> None:  # R15
    half = make(tp_size=2)
    request = Request(handoff=HandoffParams(do_remote_decode=True))
    half.computed(request, TABLES, 16)
    transfer, params = half.request_finished(
        request, TABLES, 32, first_token=FirstToken(token=9, logprob=-0.5), aborted=False
    )
    assert transfer is not None
    assert params is not None
    assert params.to_dict() == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_mode": "pull",
        "transfer_id": transfer,
        "remote_engine_id": "me",
        "remote_incarnation": "1",
        "remote_request_id": "r-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "remote_block_ids": [[4, 5]],
        "remote_block_first_tokens": [0],
        "remote_num_tokens": 32,
        "remote_prompt_tokens": 32,
        "remote_prompt_digest": request.prompt.digest.hex(),
        "tp_size": 2,
        "pp_size": 1,
        "first_token": 9,
        "first_logprob": -0.5,
        "first_top_logprobs": [],
    }
    (offer,) = half.build_orders().offer
    assert (offer.final, offer.ready, offer.transfer) == (True, TokenRange(0, 32), transfer)
    assert decode_first_token(offer.note).token == 9


def test_prefill_blocks_come_back_when_every_rank_has_released_them() -> None:  # R25
    half = make(tp_size=2)
    request = Request(handoff=HandoffParams(do_remote_decode=True, transfer_id=T))
    half.request_finished(request, TABLES, 32, first_token=None, aborted=False)
    release = StepReport(released=frozenset({T}))
    assert half.update([release, StepReport()]).released == ()
    assert half.has_pending_work()
    assert half.update([StepReport(), release]).released == (T,)
    assert not half.has_pending_work()


def test_an_aborted_prefill_keeps_its_blocks_only_if_it_was_offered() -> None:
    half = make()
    request = Request(handoff=HandoffParams(do_remote_decode=True, transfer_id=T))
    assert half.request_finished(request, TABLES, 8, first_token=None, aborted=True) == (None, None)
    # In push, decode may have been waiting for it before.
    assert [w.transfer for w in half.build_orders().withdraw] == [T]
    assert not half.has_pending_work()
    unnamed = Request(handoff=HandoffParams(do_remote_decode=True))
    assert half.request_finished(unnamed, TABLES, 8, first_token=None, aborted=True) == (None, None)
    assert not half.build_orders()
    half.computed(request, TABLES, 16)
    assert half.request_finished(request, TABLES, 16, first_token=None, aborted=True) == (T, None)
    assert [w.transfer for w in half.build_orders().withdraw] == [T]


def test_a_preempted_prefill_keeps_its_blocks_under_the_old_grant_and_offers_again() -> None:  # R28
    half = make()
    request = Request(handoff=HandoffParams(do_remote_decode=True))
    assert half.preempted(request) is None
    half.computed(request, TABLES, 16)
    first = half.preempted(request)
    assert first is not None
    orders = half.build_orders()
    assert (orders.offer, [w.transfer for w in orders.withdraw]) == ((), [first])
    second, _ = half.request_finished(request, TABLES, 32, first_token=None, aborted=False)
    assert second not in (None, first)
    assert half.update([StepReport(released=frozenset({first}))]).released == (first,)
    assert half.update([StepReport(released=frozenset({TransferId(str(second))}))]).released == (second,)


def test_a_preempted_prefill_does_not_offer_again_under_the_router_s_id() -> None:  # R17: one dispatch, one id
    half = make()
    request = Request(handoff=HandoffParams(do_remote_decode=True, transfer_id=T))
    half.computed(request, TABLES, 16)
    assert half.preempted(request) == T
    half.computed(request, TABLES, 16)
    transfer, params = half.request_finished(request, TABLES, 32, first_token=None, aborted=False)
    assert transfer not in (None, T)
    assert params is not None
    assert params.transfer_id == transfer
    assert half.update([StepReport(released=frozenset({T}))]).released == (T,)


def test_a_preempted_push_is_over_because_decode_was_informed() -> None:
    half = make(mode=TransferMode.PUSH)
    request = Request(handoff=HandoffParams(do_remote_decode=True, transfer_id=T))
    half.computed(request, TABLES, 16)
    assert half.preempted(request) == T
    half.build_orders()
    half.computed(request, TABLES, 16)
    assert half.request_finished(request, TABLES, 32, first_token=None, aborted=False) == (None, None)
    assert not half.build_orders()


def test_an_id_that_serves_another_request_is_not_taken_twice() -> None:
    half = make()
    twin = Request(request_id=RequestId("r-2"), handoff=HandoffParams(do_remote_decode=True, transfer_id=T))
    half.computed(Request(handoff=HandoffParams(do_remote_decode=True, transfer_id=T)), TABLES, 16)
    half.computed(twin, TABLES, 16)
    assert len({offer.transfer for offer in half.build_orders().offer}) == 2


def test_decode_asks_only_for_what_it_has_not_cached() -> None:  # R30
    half = make()
    request = decode_request()
    half.on_new_request(request)
    assert half.match(request, 16) == Match(num_tokens=16)
    half.after_alloc(request, TABLES, 16)
    orders = half.build_orders()
    assert [(h.transfer, h.incarnation) for h in orders.keep_alive] == [(T, "first-start")]
    (want,) = orders.fetch
    assert (want.wanted, want.mode, want.tables) == (TokenRange(16, 32), TransferMode.PULL, TABLES)


def test_decode_takes_no_more_than_prefill_computed() -> None:
    half = make()
    request = decode_request(remote_num_tokens=20)
    half.on_new_request(request)
    assert half.match(request, 16).num_tokens == 4
    assert half.match(request, 32).num_tokens == 0


def test_decode_waits_for_the_handshake() -> None:
    board = Board(PeerView(PeerStatus.ASKING))
    half = make(board)
    request = decode_request()
    half.on_new_request(request)
    assert board.asked == [("p0", "127.0.0.1", 5601)], "the handshake starts on arrival, not when there is room"
    assert half.match(request, 0).wait
    assert not half.build_orders().keep_alive


@pytest.mark.parametrize("policy", list(FailurePolicy))
def test_the_policy_decides_what_a_refused_peer_does_to_a_request(policy: FailurePolicy) -> None:  # R10, R29
    half = make(Board(PeerView(PeerStatus.REFUSED, "kv_dtype: ...")), policy=policy)
    request = decode_request()
    half.on_new_request(request)
    match = half.match(request, 0)
    assert "kv_dtype" in (match.error if policy is FailurePolicy.FAIL else match.reason)
    assert match.num_tokens == 0
    assert not half.has_pending_work()


def test_another_mode_is_refused_before_any_peer_is_asked() -> None:  # R13
    board = Board()
    half = make(board)
    request = decode_request(transfer_mode="push")
    half.on_new_request(request)
    assert "--transfer-mode" in half.match(request, 0).reason
    assert board.asked == []


def test_missing_parameters_are_named() -> None:
    half = make()
    request = decode_request(remote_port=None, remote_host=None)
    half.on_new_request(request)
    assert half.match(request, 0).reason == "kv_transfer_params lack remote_host, remote_port"


def test_landed_is_reported_once_when_all_ranks_have_landed() -> None:  # R26
    half = make(tp_size=2)
    started(half, decode_request())
    assert half.update([StepReport(landed=(landed(),)), StepReport()]).landed == ()
    (joined,) = half.update([StepReport(), StepReport(landed=(landed(note=b"n"),))]).landed
    assert (joined.num_bytes, joined.num_runs, joined.verified_cells, joined.note) == (2000, 6, 14, b"n")
    assert not half.has_pending_work()


def test_a_failed_rank_and_a_surviving_one_are_one_failure_reported_after_the_survivor() -> None:  # R26
    half = make(tp_size=2)
    request = decode_request()
    started(half, request)
    bad = Failed(T, request.request_id, "rank 1 lost", TokenRange(16, 16))
    assert half.update([StepReport(), StepReport(failed=(bad,))]).failed == ()
    outcome = half.update([StepReport(landed=(landed(),)), StepReport()])
    assert (outcome.failed, outcome.landed, outcome.fatal) == ((bad,), (), ())
    assert outcome.released == ()
    assert half.match(request, 16).reason == "rank 1 lost"
    assert half.update([StepReport(), StepReport(released=frozenset({T}))]).released == (T,)
    assert not half.has_pending_work()


def test_a_request_that_ends_while_its_failed_blocks_are_in_quarantine_has_no_second_end() -> None:
    half = make()
    request = decode_request()
    started(half, request)
    half.update([StepReport(failed=(Failed(T, request.request_id, "gone", TokenRange(16, 16)),))])
    assert half.request_finished(request, TABLES, 40, first_token=None, aborted=False) == (None, None)
    assert not half.build_orders().cancel
    assert half.update([StepReport(released=frozenset({T}))]).released == (T,)


def test_an_abort_in_flight_keeps_the_blocks_until_they_are_released() -> None:  # R28
    half = make()
    request = decode_request()
    started(half, request)
    assert half.request_finished(request, TABLES, 16, first_token=None, aborted=True) == (T, None)
    assert [c.transfer for c in half.build_orders().cancel] == [T]
    outcome = half.update([StepReport(released=frozenset({T}))])
    assert (outcome.released, outcome.failed) == ((T,), ())


def test_a_hand_off_that_lands_during_its_abort_only_frees_its_blocks() -> None:
    half = make()
    request = decode_request()
    started(half, request)
    half.request_finished(request, TABLES, 16, first_token=None, aborted=True)
    outcome = half.update([StepReport(landed=(landed(),))])
    assert (outcome.landed, outcome.released) == ((), (T,))


def test_an_abort_in_the_queue_lets_the_peer_free_its_blocks() -> None:
    half = make()
    request = decode_request()
    half.on_new_request(request)
    assert half.request_finished(request, (), 0, first_token=None, aborted=True) == (None, None)
    orders = half.build_orders()
    assert ([h.transfer for h in orders.keep_alive], [c.transfer for c in orders.cancel]) == ([T], [T])
    assert not half.has_pending_work()


@pytest.mark.parametrize("policy", FailurePolicy)
def test_one_transfer_id_serves_one_request(policy: FailurePolicy) -> None:
    half = make(policy=policy)
    half.on_new_request(decode_request())
    twin = decode_request()
    twin.request_id = RequestId("r-2")
    half.on_new_request(twin)
    match = half.match(twin, 0)
    assert "one dispatch, one id" in match.reason
    assert not match.error, "no hand-off of the twin has failed: it is computed"


def test_a_full_prefix_hit_is_reported_to_the_peer_at_once_and_nothing_waits() -> None:
    half = make()
    request = decode_request()
    half.on_new_request(request)
    assert half.match(request, 32).num_tokens == 0
    half.after_alloc(request, TABLES, 32)
    (want,) = half.build_orders().fetch
    assert len(want.wanted) == 0
    assert half.request_finished(request, TABLES, 40, first_token=None, aborted=False) == (None, None)
    outcome = half.update([StepReport(landed=(landed(),))])
    assert (outcome.landed, outcome.failed) == ((), ())
    assert not half.has_pending_work()


def offered(half: HandoffScheduler, *, finished: bool = True) -> Request:
    """Starts a prefill request under the transfer id T."""
    request = Request(handoff=HandoffParams(do_remote_decode=True, transfer_id=T))
    half.computed(request, TABLES, 16)
    if finished:
        half.request_finished(request, TABLES, 32, first_token=None, aborted=False)
    half.build_orders()
    return request


def test_a_finished_prefill_that_no_peer_will_take_is_withdrawn_once() -> None:  # R25
    half = make()
    offered(half)
    assert half.withdraw(T, "the client is gone") is True
    assert half.withdraw(T, "again") is False
    [order] = half.build_orders().withdraw
    assert (order.transfer, order.reason) == (T, "the client is gone")
    assert half.update([StepReport(released=frozenset({T}))]).released == (T,)
    assert half.withdraw(T, "late") is False
    assert not half.has_pending_work()


def test_a_prefill_that_still_runs_is_withdrawn_when_it_ends() -> None:  # R28
    """Before that, the engine holds no blocks for the transfer, and would hold them for ever."""
    half = make()
    request = offered(half, finished=False)
    assert half.withdraw(T, "the client is gone") is True
    assert not half.build_orders().withdraw
    transfer, params = half.request_finished(request, TABLES, 32, first_token=None, aborted=False)
    assert (transfer, params) == (T, None)
    orders = half.build_orders()
    assert [order.transfer for order in orders.withdraw] == [T]
    assert not [order for order in orders.offer if order.final]


def test_a_request_without_an_offer_cannot_be_withdrawn() -> None:
    half = make()
    assert half.withdraw(TransferId("unknown"), "x") is False
    started(half, decode_request())
    assert half.withdraw(T, "x") is False
    assert not half.build_orders().cancel


@pytest.mark.parametrize("worker", list(FailurePolicy))
@pytest.mark.parametrize("client", list(FailurePolicy))
def test_the_client_may_choose_what_a_failure_does(worker: FailurePolicy, client: FailurePolicy) -> None:  # R29
    half = make(policy=worker)
    request = decode_request()
    request.on_failure = client
    started(half, request)
    bad = Failed(T, R, "gone", TokenRange(16, 16))
    outcome = half.update([StepReport(failed=(bad,))])
    fails = client is FailurePolicy.FAIL
    assert (outcome.fatal, outcome.failed) == (((bad,), ()) if fails else ((), (bad,)))
    match = half.match(request, 16)
    assert ("gone" in match.error) is fails
    assert (match.reason == "gone") is not fails
