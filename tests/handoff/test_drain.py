"""Issue 5, item 6: a prefill machine that drains. The driver's part is in test_driver_faults."""

from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.ids import TransferId
from kvferry.settings import TransferMode
from tests.harness.handoff_pair import RENEW_S, TTL_S, Pair

SOON_S = 2 * RENEW_S + 0.5


def drained(pair: Pair) -> set[TransferId]:
    return set(pair.prefill[0].collect().released)


def test_what_nobody_claims_ends_soon_and_what_is_held_does_not() -> None:
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


def test_what_is_offered_during_a_drain_ends_soon_too() -> None:
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
    """Says whether a rank waits for a reply. A call, so that mypy does not take the first answer for the last."""
    return core.reply_expected


def test_nobody_waits_while_a_prompt_is_computed_and_somebody_does_once_it_is_whole() -> None:
    """The driver looks for messages less often then: each look costs the thread that computes it."""
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
