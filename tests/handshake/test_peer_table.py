"""What is known of peers, and when they are asked again. R24; I5, I6."""

import sys

import pytest

from kvferry.errors import ConfigError
from kvferry.handshake.peer_table import BackOff, Peer, PeerState, PeerTable
from kvferry.ids import EngineId, Incarnation

P = EngineId("p0")
I1, I2, I3 = Incarnation("i1"), Incarnation("i2"), Incarnation("i3")
BACK_OFF = BackOff(refused_first_s=2.0, lost_first_s=0.5, longest_s=10.0)


def a_table(max_peers: int = 10) -> PeerTable:
    return PeerTable(EngineId("d0"), Incarnation("me"), max_peers=max_peers, back_off=BACK_OFF)


def accept(table: PeerTable, incarnation: Incarnation, now_s: float = 0.0) -> Incarnation | None:
    return table.accepted(P, incarnation, now_s, address="a:1", protocol=2)


def test_one_question_at_a_time() -> None:
    table = a_table()
    assert table.get(P).state is PeerState.UNKNOWN
    assert table.may_ask(P, 0.0)
    assert table.asking(P, 0.0) == ""
    assert not table.may_ask(P, 1000.0)
    accept(table, I1)
    assert not table.may_ask(P, 1000.0)
    assert table.get(P).state is PeerState.ACCEPTED


def test_a_refusal_is_remembered_and_the_back_off_doubles() -> None:
    table = a_table()
    now_s = 0.0
    for wait_s in (2.0, 4.0, 8.0, 10.0, 10.0):
        table.asking(P, now_s, incarnation=I1)
        table.refused(P, I1, now_s, "why")
        assert not table.may_ask(P, now_s + wait_s - 0.01, I1)
        now_s += wait_s
        assert table.may_ask(P, now_s, I1)
    assert table.get(P).reason == "why"
    accept(table, I1, now_s)
    assert table.get(P).failures == 0


def test_a_restart_is_asked_at_once_and_replaces_the_old_one() -> None:  # I6
    table = a_table()
    accept(table, I1)
    assert table.may_ask(P, 1.0, I2)
    table.asking(P, 1.0, incarnation=I2)
    assert table.get(P).paired  # hand-offs of the old incarnation continue
    assert accept(table, I2, 1.1) == I1
    assert not table.may_ask(P, 2.0, I1)  # a request that names the old incarnation brings no question
    assert not table.may_ask(P, 2.0, I2)


def test_a_repaired_peer_is_asked_before_its_back_off_ends() -> None:
    table = a_table()
    for now_s in (0.0, 2.0, 6.0):
        table.refused(P, I1, now_s, "why")
    assert not table.may_ask(P, 7.0, I1)
    assert table.may_ask(P, 7.0, I2)


def test_new_incarnations_in_requests_do_not_defeat_the_back_off() -> None:
    table = a_table()
    table.asking(P, 0.0, incarnation=I1)
    table.lost(P, None, 0.0, "no answer")
    assert not table.may_ask(P, 0.1, I1)
    assert not table.may_ask(P, 0.1, Incarnation("made up"))
    accept(table, I1, 1.0)
    table.asking(P, 1.0, incarnation=Incarnation("made up"))
    assert accept(table, I1, 1.0) is None
    assert not table.may_ask(P, 1.1, Incarnation("made up 2"))


def test_silence_about_a_made_up_incarnation_does_not_end_a_pairing() -> None:
    table = a_table()
    accept(table, I1)
    table.asking(P, 1.0, incarnation=I2)
    assert table.lost(P, None, 6.0, "no answer") is None
    assert table.get(P).state is PeerState.ACCEPTED
    assert not table.may_ask(P, 6.1, I2)
    assert table.may_ask(P, 7.0, I2)


def test_a_restart_that_no_longer_fits_ends_the_pairing() -> None:
    table = a_table()
    accept(table, I1)
    table.asking(P, 1.0, incarnation=I2)
    assert table.refused(P, I2, 1.1, "now fp8") == I1
    assert table.get(P).state is PeerState.REFUSED


def test_late_messages_about_another_incarnation_change_nothing() -> None:  # I6
    table = a_table()
    accept(table, I2)
    assert table.refused(P, I1, 1.0, "late") is None
    assert table.lost(P, I1, 1.0, "late") is None
    assert table.get(P).state is PeerState.ACCEPTED


def test_two_engines_with_one_id_are_noticed_and_named() -> None:
    table = a_table()
    table.accepted(P, I1, 0.0, address="host-a:1", protocol=2)
    table.accepted(P, I2, 1.0, address="host-b:1", protocol=2)
    assert table.check_sender(P, I2, address="host-b:1").conflict == ""
    assert table.check_sender(P, I1, address="host-a:1").conflict == (
        "two engines have the id 'p0': incarnation 'i1' at 'host-a:1' and incarnation 'i2' at 'host-b:1'. "
        "Give each its own --engine-id"
    )


def test_our_own_id_is_noticed() -> None:
    table = a_table()
    check = table.check_sender(EngineId("d0"), Incarnation("other"), address="host:1")
    assert check.conflict.startswith("two engines have the id 'd0': this one (incarnation 'me') and one at 'host:1'")
    assert "with itself" in table.asking(EngineId("d0"), 0.0)


def test_a_full_table_forgets_idle_peers_and_then_refuses() -> None:
    table = a_table(max_peers=2)
    table.accepted(EngineId("a"), I1, 0.0, address="", protocol=2)
    table.refused(EngineId("b"), I1, 0.0, "why")
    assert table.check_sender(P, I1, address="").full == ""
    accept(table, I1)
    assert table.get(EngineId("b")).state is PeerState.UNKNOWN
    assert "raise side_channel.max_peers=2" in table.check_sender(EngineId("c"), I1, address="").full
    assert "raise side_channel.max_peers=2" in table.asking(EngineId("c"), 0.0)
    assert len(table.snapshot()) == 2


def test_endless_restarts_do_not_fill_memory() -> None:
    table = a_table()
    for start in range(1000):
        accept(table, Incarnation(f"i{start}"))
    assert len(table.get(P).former) <= 8


def test_idle_failures_are_forgotten() -> None:
    table = a_table()
    table.refused(P, I1, 0.0, "why")
    table.accepted(EngineId("q"), I1, 0.0, address="", protocol=1)
    assert table.expire(599.0) == ()
    assert table.expire(601.0) == (P,)
    assert [peer.engine for peer in table.snapshot()] == ["q"]


def test_a_peer_takes_less_than_a_kilobyte() -> None:
    peer = Peer(engine=P, incarnation=I1, address="10.0.0.1:5600", reason="")
    size = sum(sys.getsizeof(part) for part in (peer, peer.engine, peer.incarnation, peer.address, peer.former))
    assert size < 1024


def test_a_back_off_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="back-off"):
        BackOff(refused_first_s=0.0)
