"""Leases without a shared clock: whatever the delays and the drift, the holder stops before the grantor takes back."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.handoff.actions import Peer
from kvferry.handoff.leases import Heartbeats, Timers
from kvferry.ids import EngineId, Incarnation, PeerName, TransferId
from kvferry.settings import LeaseSettings
from kvferry.wire.handoff_messages import MAX_RENEWED, RenewAck

PEER = Peer(PeerName("p/p1/0"), EngineId("p"), Incarnation("p1"), 0)
T = TransferId("t")


@given(
    drift=st.floats(0.0, 0.2),
    run=st.floats(-1.0, 1.0),
    sent_s=st.floats(0.0, 1e6),
    delay_s=st.floats(0.0, 100.0),
    ttl_s=st.floats(0.01, 1000.0),
)
def test_the_holder_stops_before_the_grantor(
    drift: float, run: float, sent_s: float, delay_s: float, ttl_s: float
) -> None:
    beats = Heartbeats(LeaseSettings(drift=drift), from_decode=True)
    ends_s = beats.held_s(sent_s, ttl_s)
    # In the holder's time: the grantor received it delay_s later, and its clock runs up to `drift` faster than ours.
    taken_back_s = sent_s + delay_s + ttl_s / (1.0 + drift * max(run, 0.0))
    assert ends_s <= taken_back_s + 1e-6 * max(1.0, sent_s)


def test_an_acknowledgement_counts_for_the_renewal_that_it_answers() -> None:
    beats = Heartbeats(LeaseSettings(ttl_s=10, renew_every_s=1), from_decode=True)
    beats.add(PEER, T, 0.0)
    ((_, first),) = beats.tick(1.0)
    ((_, second),) = beats.tick(2.0)
    assert beats.acked(PEER.name, RenewAck(to="d1", seq=first.seq, to_decode=True)) == (1.0, (T,))
    assert beats.acked(PEER.name, RenewAck(to="d1", seq=first.seq, to_decode=True)) is None, "a duplicate counts once"
    assert beats.acked(PEER.name, RenewAck(to="d1", seq=second.seq, to_decode=True)) == (2.0, (T,))
    assert beats.acked(PEER.name, RenewAck(to="d1", seq=99, to_decode=True)) is None
    assert beats.acked(PeerName("p/p2/0"), RenewAck(to="d1", seq=second.seq, to_decode=True)) is None


def test_there_is_one_message_per_peer_however_many_grants() -> None:
    beats = Heartbeats(LeaseSettings(ttl_s=10, renew_every_s=1), from_decode=True)
    for number in range(MAX_RENEWED + 1):
        beats.add(PEER, TransferId(f"t{number}"), 0.0)
    sent = list(beats.tick(1.0))
    assert [len(renew.transfers) for _, renew in sent] == [MAX_RENEWED, 1]
    for number in range(MAX_RENEWED + 1):
        beats.remove(PEER, TransferId(f"t{number}"))
    assert beats.next_s() is None
    assert list(beats.tick(100.0)) == []


def test_a_short_lease_is_renewed_more_often_and_never_without_pause() -> None:
    beats = Heartbeats(LeaseSettings(ttl_s=10, renew_every_s=5), from_decode=True)
    beats.add(PEER, T, 0.0, 4.0)
    assert beats.next_s() == 1.0
    beats.add(PEER, T, 0.0, 1e-9)
    next_s = beats.next_s()
    assert next_s is not None
    assert next_s >= 0.005


def test_unacknowledged_renewals_are_forgotten_in_the_end() -> None:
    beats = Heartbeats(LeaseSettings(ttl_s=10, renew_every_s=1), from_decode=True)
    beats.add(PEER, T, 0.0)
    for second in range(1, 1000):
        list(beats.tick(float(second)))
    assert len(beats._beats[PEER.name].unacked) <= 64


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), max_size=40), st.floats(0, 100))
def test_timers_wake_all_that_are_due_and_nothing_else(sets: list[tuple[int, float]], now_s: float) -> None:
    timers: Timers[int] = Timers()
    expected: dict[int, float] = {}
    for key, at_s in sets:
        timers.set(key, at_s)
        expected[key] = at_s
    assert timers.next_s() == min(expected.values(), default=None)
    assert sorted(timers.pop_due(now_s)) == sorted(key for key, at_s in expected.items() if at_s <= now_s)
    assert len(timers) == sum(at_s > now_s for at_s in expected.values())
