"""Decode asks for a transfer that prefill has answered for and does not know: it has ended there, or never was its."""

import pytest

from kvferry.settings import TransferMode
from kvferry.wire.handoff_messages import Claim, Message, Ready, RenewAck
from tests.harness.handoff_pair import DEADLINE_S, Pair

PULL = TransferMode.PULL
AT_ONCE_S = {1: 1.5, 2: 5.5}
"""By number of prefill ranks."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_prefill_has_answered_for_and_does_not_know_fails_at_once(ranks: int) -> None:  # R29
    pair = Pair(PULL, prefill_ranks=ranks)
    pair.want("t", answered=True)
    pair.deliver()
    pair.step(AT_ONCE_S[ranks])
    (failed,) = pair.decode[0].report.failed
    assert "prefill does not know it" in failed.reason
    assert pair.decode[0].report.released == {"t"}, "no peer can touch the blocks"
    pair.step(DEADLINE_S + 1)
    assert all(rank.core.idle for rank in (*pair.prefill, *pair.decode))


def test_what_prefill_has_not_answered_for_is_waited_for() -> None:  # R17
    pair = Pair(PULL)
    pair.want("t")
    pair.deliver()
    pair.step(20.0)
    assert not pair.decode[0].report.failed
    pair.offer("t")
    pair.finish_all()
    assert pair.decode[0].report.landed


def test_an_offer_that_reaches_one_rank_late_is_not_unknown() -> None:  # R17
    """Ranks beside the first may compute another step when prefill answers."""
    pair = Pair(PULL, prefill_ranks=2)
    late = pair.prefill.pop()
    pair.offer("t")
    pair.prefill.append(late)
    pair.want("t", answered=True)
    pair.deliver()
    pair.step(1.5)
    assert not pair.decode[0].report.failed
    first, pair.prefill = pair.prefill[:1], [late]
    pair.offer("t")
    pair.prefill = [*first, late]
    pair.step(2.5)
    pair.finish_all()
    assert pair.decode[0].report.landed


def test_a_known_transfer_is_not_doubted_when_its_grant_is_lost() -> None:
    """The claim is sent again before the sign of life is asked for."""
    pair = Pair(PULL)
    pair.offer("t")
    pair.want("t", answered=True)
    lost: list[Message] = []

    def only(message: Message) -> bool:
        if isinstance(message, Ready) and not lost:
            lost.append(message)
            return False
        return True

    pair.deliver(only=only)
    pair.step(1.5, only=only)
    assert lost
    pair.finish_all()
    assert pair.decode[0].report.landed


def test_a_prefill_that_stood_still_answers_before_it_takes_its_orders() -> None:
    """A driver takes in messages before orders, so one sign of life may leave before the grant."""
    pair = Pair(PULL)
    pair.want("t", answered=True)
    pair.step(1.5, deliver=False)
    waiting, pair.wires = pair.wires, []
    for sender, _, message in waiting:
        pair.prefill[0].core.message(sender, message, pair.now_s)
    pair.offer("t")
    assert [type(message) for _, _, message in pair.wires][:2] == [RenewAck, Ready]
    pair.finish_all()
    assert pair.decode[0].report.landed


def test_a_prefill_that_is_silent_is_waited_for_until_its_lease_says_so() -> None:  # R27
    pair = Pair(PULL)
    pair.want("t", answered=True)
    pair.deliver(only=lambda message: not isinstance(message, Claim))
    pair.step(4.0, deliver=False)
    assert not pair.decode[0].report.failed
