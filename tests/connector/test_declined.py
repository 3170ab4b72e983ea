"""The scheduler half: what becomes of a hand-off whose request the engine has refused."""

import pytest

from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.ids import Incarnation
from kvferry.settings import TransferMode
from tests.harness.scripted_half import Board, T, decode_request, make, started


@pytest.mark.parametrize("mode", list(TransferMode))
def test_prefill_learns_of_a_request_that_decode_has_refused(mode: TransferMode) -> None:  # R25
    """Its blocks are free at once, and not when the lease ends."""
    half = make(mode=mode)
    params = decode_request(transfer_mode=str(mode)).handoff
    assert params is not None
    half.decline(params, "too long")
    assert half.has_pending_work(), "the engine must step once more"
    (cancel,) = half.build_orders().cancel
    assert (cancel.transfer, cancel.engine, cancel.incarnation, cancel.reason) == (T, "p0", "first-start", "too long")
    assert not half.has_pending_work()
    assert not half.build_orders()


def test_a_declined_hand_off_waits_for_the_handshake_and_no_longer() -> None:
    board = Board(PeerView(PeerStatus.ASKING))
    half = make(board)
    params = decode_request().handoff
    assert params is not None
    half.decline(params, "too long")
    assert not half.build_orders()
    assert half.has_pending_work()
    board.answer = PeerView(PeerStatus.REFUSED, "it does not answer")
    assert not half.build_orders()
    assert not half.has_pending_work(), "the lease of that engine ends it"


@pytest.mark.parametrize("lacking", ["transfer_id", "remote_engine_id", "remote_host", "remote_port"])
def test_what_names_no_hand_off_cannot_be_declined(lacking: str) -> None:
    half = make()
    params = decode_request(**{lacking: None}).handoff
    assert params is not None
    half.decline(params, "too long")
    assert not half.has_pending_work()


def test_a_declined_request_does_not_end_the_hand_off_of_another_one() -> None:
    half = make()
    request = decode_request()
    started(half, request)
    assert request.handoff is not None
    half.decline(request.handoff, "its id is in use")
    assert not half.build_orders().cancel


def test_the_number_of_declined_hand_offs_that_wait_is_bounded() -> None:
    half = make(Board(PeerView(PeerStatus.ASKING)))
    for i in range(1100):
        params = decode_request(transfer_id=f"t-{i}").handoff
        assert params is not None
        half.decline(params, "too long")
    assert len(half._declined) == 1024


def test_a_grant_is_kept_alive_although_the_engine_does_not_look_at_its_request() -> None:  # R25
    """Older requests without room may keep it from being matched for long."""
    board = Board(PeerView(PeerStatus.ASKING))
    half = make(board)
    half.on_new_request(decode_request())
    assert not half.build_orders()
    board.answer = PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("first-start"))
    assert [one.transfer for one in half.build_orders().keep_alive] == [T]
    num_asked = len(board.asked)
    assert not half.build_orders()
    assert len(board.asked) == num_asked, "it is known now"
