"""Our own faults that the simulator found, each as a small test."""

from kvferry.settings import TransferMode
from tests.harness.handoff_pair import QUARANTINE_S, STANDSTILL_S, TTL_S, Pair


def test_the_quarantine_counts_from_when_decode_could_act() -> None:
    """Both sides were suspended beyond lease and quarantine, with a write in flight: resuming is not the end of it."""
    pair = Pair(TransferMode.PUSH)
    pair.want("t")
    pair.deliver()
    pair.offer("t")
    (prefill,), (decode,) = pair.prefill, pair.decode
    assert len(prefill.posts) == 1
    pair.clock.advance(TTL_S + QUARANTINE_S + 5.0)
    decode.core.tick(pair.now_s)
    pair.act()
    assert len(decode.report.failed) == 1
    assert decode.disconnected == [prefill.name]
    assert not decode.report.released
    pair.clock.advance(STANDSTILL_S)
    decode.core.tick(pair.now_s)
    pair.act()
    assert decode.report.released == {"t"}


def test_a_silent_writer_loses_its_connection_before_its_blocks_are_given_away() -> None:
    """It may hang in a write; if the wire allows it, closing our end stops that write."""
    pair = Pair(TransferMode.PUSH)
    pair.want("t")
    pair.deliver()
    pair.prefill.clear()
    pair.step(TTL_S + QUARANTINE_S / 2)
    (decode,) = pair.decode
    assert decode.disconnected
    assert not decode.report.released
    pair.step(STANDSTILL_S)
    assert decode.report.released == {"t"}
