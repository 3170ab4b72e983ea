"""A writer that does not answer: is it dead, or only suspended with a write in progress that nothing can stop? R28.

Found by tests/e2e/test_chaos.py: a prefill stopped (SIGSTOP) in the middle of a copy over shared memory, and woken
after lease and quarantine, wrote on into blocks that decode had given to another request: HTTP 200 with wrong tokens.
"""

import pytest

from kvferry.ids import EngineId, Incarnation
from kvferry.settings import TransferMode
from tests.harness.handoff_pair import QUARANTINE_S, STANDSTILL_S, TTL_S, Pair, Rank


@pytest.fixture
def silent() -> tuple[Pair, Rank]:
    """Decode registered, and prefill holds the lease and has begun to write; then it is silent."""
    pair = Pair(TransferMode.PUSH)
    pair.want("t")
    pair.deliver()
    pair.offer("t")
    (prefill,), (decode,) = pair.prefill, pair.decode
    assert len(prefill.posts) == 1
    return pair, decode


def test_the_blocks_of_a_writer_that_may_be_suspended_are_kept_for_long(silent: tuple[Pair, Rank]) -> None:
    pair, decode = silent
    pair.step(TTL_S + 0.5, deliver=False)
    assert len(decode.report.failed) == 1, "the request goes on without it"
    pair.step(QUARANTINE_S + STANDSTILL_S / 2, deliver=False)
    assert not decode.report.released
    pair.step(STANDSTILL_S, deliver=False)
    assert decode.report.released == {"t"}, "a stated time, whatever fails (I3)"
    assert decode.core.idle


def test_the_blocks_of_a_writer_that_the_transport_found_dead_are_kept_for_the_quarantine_only(
    silent: tuple[Pair, Rank],
) -> None:
    pair, decode = silent
    decode.core.peer_lost(pair.prefill[0].name, "no process is there", pair.now_s, dead=True)
    pair.act()
    pair.step(TTL_S + 0.5, deliver=False)
    assert not decode.report.released, "what it had on the wire"
    pair.step(QUARANTINE_S, deliver=False)
    assert decode.report.released == {"t"}


def test_a_lost_connection_alone_is_not_a_death(silent: tuple[Pair, Rank]) -> None:
    pair, decode = silent
    decode.core.peer_lost(pair.prefill[0].name, "the connection broke", pair.now_s)
    pair.act()
    pair.step(TTL_S + 2 * QUARANTINE_S + 1, deliver=False)
    assert not decode.report.released


def test_a_writer_whose_engine_has_restarted_is_dead(silent: tuple[Pair, Rank]) -> None:
    pair, decode = silent
    pair.step(TTL_S + 0.5, deliver=False)
    decode.core.peer_accepted(EngineId("p"), Incarnation("p2"), 1, pair.now_s)
    pair.act()
    pair.step(QUARANTINE_S + 0.5, deliver=False)
    assert decode.report.released == {"t"}


def test_a_writer_that_resumes_and_answers_ends_the_wait_at_once(silent: tuple[Pair, Rank]) -> None:
    pair, decode = silent
    pair.step(TTL_S + QUARANTINE_S + 1, deliver=False)
    assert not decode.report.released
    pair.finish(pair.prefill[0])
    pair.deliver()
    assert decode.report.released == {"t"}
