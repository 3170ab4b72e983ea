"""A failure is reported once, after every survivor has ended (R26): in pull a read, in push a prefill rank that writes.

The wait for survivors is bounded, and nothing waits for a prefill rank that cannot answer.
"""

import pytest

from kvferry.handoff.orders import StepOrders, Withdraw
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.ids import TransferId
from kvferry.settings import TransferMode
from kvferry.testing.simulator import mutants
from kvferry.wire.handoff_messages import Message, Revoke, Stopped
from tests.harness.handoff_pair import DEADLINE_S, RENEW_S, TTL_S, Pair, Rank

PULL, PUSH = TransferMode.PULL, TransferMode.PUSH
BROKEN = "the wire broke"


def two_sources(mode: TransferMode, mutated: bool = False) -> tuple[Pair, Rank]:
    """Two prefill ranks that hand over to one decode rank; bytes of both are in flight."""

    def prepare(core: RankProtocol) -> None:
        if mutated:
            mutants.reported_before_survivors(core)

    pair = Pair(mode, prefill_ranks=2, prepare=prepare)
    pair.want("t")
    pair.deliver()
    pair.offer("t")
    pair.deliver()
    return pair, pair.decode[0]


def reasons(decode: Rank) -> list[str]:
    """The reasons of all failures that decode has reported."""
    return [failed.reason for failed in decode.report.failed]


def fail_one(pair: Pair, error: str | None) -> None:
    """Ends the transfer with the first prefill rank with this error, on whichever side moves the bytes."""
    pair.finish(pair.decode[0] if pair.mode is PULL else pair.prefill[0], error=error)
    pair.deliver()


def end_other(pair: Pair, error: str | None) -> None:
    """Ends the transfer with the second prefill rank."""
    pair.finish(pair.decode[0] if pair.mode is PULL else pair.prefill[1], error=error)
    pair.deliver()


@pytest.mark.parametrize("error", [None, "it broke, too"])
@pytest.mark.parametrize("mode", [PULL, PUSH])
def test_a_failure_is_reported_once_and_after_the_survivor_has_ended(mode: TransferMode, error: str | None) -> None:
    pair, decode = two_sources(mode)
    fail_one(pair, BROKEN)
    pair.step(RENEW_S / 4)
    assert not reasons(decode), "the survivor still moves bytes"
    end_other(pair, error)
    assert len(reasons(decode)) == 1
    assert BROKEN in reasons(decode)[0]
    assert decode.report.released == {"t"}
    assert not decode.report.landed


@pytest.mark.parametrize("mode", [PULL, PUSH])
def test_the_mutant_reports_it_before(mode: TransferMode) -> None:
    """The guard of the test above, switched off."""
    pair, decode = two_sources(mode, mutated=True)
    fail_one(pair, BROKEN)
    assert len(reasons(decode)) == 1


def test_what_a_surviving_writer_still_brings_counts_as_arrived() -> None:
    """Push: parts that come between the failure and its report are whole, and are a prefix that can be used."""
    pair = Pair(PUSH, prefill_ranks=2)
    prompt = range(100, 104)
    pair.want("t", prompt=prompt)
    pair.deliver()
    pair.offer("t", 2, final=False, prompt=prompt)
    pair.offer("t", 4, prompt=prompt)
    (first, second), (decode,) = pair.prefill, pair.decode
    pair.finish(first)
    pair.finish(first, error=BROKEN)
    pair.deliver()
    assert not reasons(decode)
    pair.finish(second)
    pair.finish(second, error=BROKEN)
    pair.deliver()
    assert [failed.arrived.stop for failed in decode.report.failed] == [2]


def test_a_writer_without_a_write_in_flight_answers_at_once() -> None:
    """Push: it costs one round trip to know that it writes no more."""
    pair = Pair(PUSH, prefill_ranks=2)
    pair.want("t")
    pair.deliver()
    pair.prefill[0].core.orders(StepOrders(withdraw=(Withdraw(TransferId("t"), "aborted"),)), pair.now_s)
    pair.act()
    sender, peer, message = pair.wires.pop()
    pair.hand(sender, peer, message)
    (decode,) = pair.decode
    assert not reasons(decode), "the other one holds our grant, and may write"
    pair.deliver()
    assert reasons(decode) == ["prefill withdrew it: aborted"]


def test_the_wait_for_a_writer_that_does_not_answer_is_bounded() -> None:
    """Push: it may be suspended. The request goes on after a second; its blocks wait (R28)."""
    pair, decode = two_sources(PUSH)
    fail_one(pair, BROKEN)
    pair.step(0.75)
    assert not reasons(decode)
    pair.step(0.5)
    assert len(reasons(decode)) == 1
    assert not decode.report.released
    end_other(pair, None)
    assert decode.report.released == {"t"}


def test_a_lost_revoke_is_sent_again() -> None:
    """Push: the blocks come back without waiting for the lease, also after the failure was reported."""
    pair, decode = two_sources(PUSH)

    def lose(message: Message) -> bool:
        return not isinstance(message, Revoke | Stopped)

    pair.finish(pair.prefill[0], error=BROKEN)
    pair.deliver(only=lose)
    pair.step(RENEW_S / 2 + 0.25, only=lose)
    assert len(reasons(decode)) == 1
    pair.finish(pair.prefill[1])
    pair.deliver(only=lose)
    pair.step(RENEW_S)
    assert decode.report.released == {"t"}


def test_a_lost_writer_is_not_waited_for() -> None:
    """Push: no answer can come from it, so the request goes on at once."""
    pair, decode = two_sources(PUSH)
    decode.core.peer_lost(pair.prefill[1].name, "the connection broke", pair.now_s)
    pair.act()
    assert not reasons(decode), "the other one still writes"
    decode.core.peer_lost(pair.prefill[0].name, "the connection broke", pair.now_s)
    pair.act()
    assert reasons(decode) == ["prefill rank 1 is gone: the connection broke"]
    assert not decode.report.released


def test_a_writer_that_gave_no_sign_of_life_is_not_waited_for() -> None:
    """Push: it had a whole lease to answer. Its sibling, which lives, is waited for."""
    pair, decode = two_sources(PUSH)
    silent, alive = pair.prefill
    failed_s = pair.now_s + TTL_S
    while pair.now_s <= failed_s:
        pair.step(0.25, deliver=False)
        while pair.wires:
            sender, peer, message = pair.wires.pop(0)
            if silent.name not in (sender, peer.name):
                pair.hand(sender, peer, message)
    assert decode.core.take_silent(), "it was noticed"
    assert not reasons(decode)
    pair.finish(alive)
    pair.deliver()
    assert reasons(decode) == [f"prefill rank 0 gave no sign of life for {TTL_S:g} s"]
    assert not decode.report.released


def test_at_the_deadline_nothing_is_waited_for() -> None:
    """Both modes: a request has waited for long enough (R29)."""
    for mode in (PULL, PUSH):
        pair, decode = two_sources(mode)
        pair.step(DEADLINE_S + 0.5)
        assert reasons(decode) == ["it has not ended 60 s after it began"]
