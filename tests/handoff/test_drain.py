"""A prefill machine that drains. The driver's part is in test_driver_faults."""

from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.ids import TransferId
from kvferry.settings import TransferMode
from tests.harness.handoff_pair import RENEW_S, TTL_S, Pair

SOON_S = 2 * RENEW_S + 0.5


def drained(pair: Pair) -> set[TransferId]:
    return set(pair.prefill[0].collect().released)


def test_an_unclaimed_grant_ends_soon_and_a_held_one_does_not() -> None:
    """R25, R28: a decode rank that waits in its queue keeps its grant through a drain."""
    pair = Pair(TransferMode.PULL)
    pair.offer("held")
    pair.offer("orphan", blocks=(11, 12, 13, 14))
    pair.hold("held")
    pair.deliver()
    pair.prefill[0].core.prefill.drain(pair.now_s)
    pair.step(SOON_S)
    assert drained(pair) == {"orphan"}
    pair.step(2 * TTL_S)
    assert drained(pair) == {"orphan"}
    pair.want("held")
    pair.finish_all()
    assert drained(pair) == {"orphan", "held"}
    assert pair.prefill[0].report.taken == {"held"}
    assert pair.prefill[0].core.idle


def test_a_claim_within_the_time_is_served() -> None:
    pair = Pair(TransferMode.PULL)
    pair.offer("t1")
    pair.prefill[0].core.prefill.drain(pair.now_s)
    pair.step(RENEW_S)
    pair.want("t1")
    pair.deliver()
    pair.step(2 * TTL_S)  # the read takes long
    assert drained(pair) == set()
    pair.finish_all()
    assert pair.prefill[0].report.taken == {"t1"}


def test_what_is_offered_during_a_drain_also_ends_soon() -> None:
    """A request that was in progress when the drain began."""
    pair = Pair(TransferMode.PUSH)
    pair.offer("t1", stop=2, final=False)
    pair.prefill[0].core.prefill.drain(pair.now_s)
    pair.step(2 * TTL_S)
    assert drained(pair) == set(), "it is still computed"
    pair.offer("t1")
    pair.step(SOON_S)
    assert drained(pair) == {"t1"}


def test_without_a_drain_it_is_kept_for_its_lease() -> None:
    pair = Pair(TransferMode.PULL)
    pair.offer("t1")
    pair.step(TTL_S - 0.5)
    assert drained(pair) == set()
    pair.step(1.0)
    assert drained(pair) == {"t1"}


def expects(core: RankProtocol) -> bool:
    """Returns whether a rank expects a reply. It is a call, so that mypy does not narrow the first answer."""
    return core.reply_expected


def test_a_reply_is_expected_only_once_a_prompt_is_complete() -> None:
    """Before that the driver looks for messages less often, because each look costs the thread that computes time."""
    pair = Pair(TransferMode.PULL)
    prefill, decode = pair.prefill[0].core, pair.decode[0].core
    assert not expects(prefill)
    pair.offer("t1", stop=2, final=False)
    assert not expects(prefill)
    pair.want("t1")
    assert expects(decode)
    pair.offer("t1")
    assert expects(prefill)
    pair.deliver()
    pair.finish_all()
    assert not expects(prefill)
    assert not expects(decode)
