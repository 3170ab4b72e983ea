"""What the end of one hand-off raises in the scheduler half fails that hand-off, and no other."""

from dataclasses import replace

import pytest

from kvferry.connector import entries
from kvferry.connector.entries import DecodeHandoff
from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.handoff.orders import Landed, StepReport
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from tests.harness.scripted_half import TABLES, Board, T, decode_request, landed, make, started

OTHER = TransferId("other")


class RaisingBoard(Board):
    """A board that raises for one engine."""

    raises = False

    def view(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int) -> PeerView:
        if self.raises and engine == "p0":
            raise LookupError("injected")
        return super().view(engine, incarnation, host, port)


def fail_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets joining the ranks' reports raise for one transfer."""

    def join(entry: DecodeHandoff) -> Landed:
        if entry.transfer == T:
            raise LookupError("injected")
        return entries.joined(entry)

    monkeypatch.setattr("kvferry.connector.scheduler.joined", join)


def test_a_report_that_raises_fails_its_own_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    half = make()
    sound = replace(decode_request(transfer_id=OTHER), request_id=RequestId("r-2"))
    started(half, decode_request())
    started(half, sound)
    fail_to_join(monkeypatch)
    other = replace(landed(), transfer=OTHER, request=RequestId("r-2"))
    outcome = half.update([StepReport(landed=(landed(), other))])
    assert [one.transfer for one in outcome.landed] == [OTHER]
    (failed,) = outcome.failed
    assert (failed.transfer, "LookupError: injected" in failed.reason) == (T, True)
    assert outcome.released == (T,), "it has landed on every rank: no peer touches its blocks"
    assert not half.has_pending_work()


def test_blocks_that_a_peer_may_touch_are_released_after_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    half = make(tp_size=2)
    started(half, decode_request())

    def fail(*_: object) -> None:
        raise LookupError("injected")

    advance = half._advance
    half._advance = fail  # type: ignore[method-assign, assignment]
    outcome = half.update([StepReport(landed=(landed(),)), StepReport()])
    half._advance = advance  # type: ignore[method-assign]
    assert len(outcome.failed) == 1
    assert not outcome.released
    assert half.update([StepReport(), StepReport(landed=(landed(),))]).released == (T,)
    assert not half.has_pending_work()


def test_a_peer_that_cannot_be_asked_ends_the_handoffs_with_it() -> None:
    board = RaisingBoard(PeerView(PeerStatus.ASKING))
    half = make(board)
    bad = decode_request()
    sound = replace(decode_request(transfer_id=OTHER, remote_engine_id="p1"), request_id=RequestId("r-2"))
    half.on_new_request(bad)
    half.on_new_request(sound)
    declined = decode_request(transfer_id="declined").handoff
    assert declined is not None
    half.decline(declined, "too long")
    board.raises = True
    board.answer = PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("first-start"))
    orders = half.build_orders()
    assert [one.transfer for one in orders.keep_alive] == [OTHER]
    assert "LookupError: injected" in half.match(bad, 0).reason
    assert half.match(sound, 0).num_tokens == 32
    half.after_alloc(sound, TABLES, 0)
    assert [one.transfer for one in half.build_orders().fetch] == [OTHER]
