"""Two engines meet over the real side channel; what their worker halves learn, and in which order. R24, I5, I6."""

import threading
from collections.abc import Iterator

import pytest

from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.connector.rendezvous import Rendezvous
from kvferry.handoff.orders import StepOrders
from kvferry.handshake.peer_table import PeerState
from kvferry.ids import EngineId, Incarnation
from kvferry.settings import Role, SideChannelSettings
from kvferry.testing.fake_clock import FakeClock
from tests.harness.handshake_examples import side
from tests.harness.until import until

P, D = EngineId("p"), EngineId("d")


class End:
    """One engine, and what its worker halves learned: +incarnation was accepted, -incarnation is gone."""

    def __init__(self, engine: str, incarnation: str, role: Role, clock: FakeClock, *, port: int = 0) -> None:
        self.learned: list[str] = []
        self.incarnation = Incarnation(incarnation)
        self.rendezvous = Rendezvous(SideChannelSettings(port=port, timeout_s=1.0), name=engine, clock=clock)
        self.rendezvous.start(side(engine, incarnation, role), self.send)

    def send(self, orders: StepOrders) -> None:
        self.learned += [f"-{peer.incarnation}" for peer in orders.gone]
        self.learned += [f"+{peer.incarnation}" for peer in orders.accepted]

    def view(self, of: "End", engine: EngineId, *, named: bool = True) -> PeerView:
        return self.rendezvous.view(engine, of.incarnation if named else None, of.rendezvous.host, of.rendezvous.port)

    def meet(self, of: "End", engine: EngineId, *, named: bool = True) -> PeerView:
        """Polls as an engine does, once per step, until the handshake has ended."""
        view = self.view(of, engine, named=named)
        until(lambda: self.view(of, engine, named=named).status is not PeerStatus.ASKING)
        return self.view(of, engine, named=named) if view.status is PeerStatus.ASKING else view


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.open: list[End] = []

    def end(self, engine: str, incarnation: str, role: Role, *, port: int = 0) -> End:
        self.open.append(End(engine, incarnation, role, self.clock, port=port))
        return self.open[-1]

    def close(self, end: End) -> None:
        end.rendezvous.close()
        self.open.remove(end)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for end in world.open[:]:
        world.close(end)


def test_both_learn_of_each_other_once(world: World) -> None:
    p, d = world.end("p", "p1", Role.PREFILL), world.end("d", "d1", Role.DECODE)
    assert d.meet(p, P) == PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("p1"))
    assert d.meet(p, P).status is PeerStatus.ACCEPTED
    assert (p.learned, d.learned) == (["+d1"], ["+p1"])


def test_a_peer_is_not_accepted_before_the_workers_know_it(world: World) -> None:
    """The listener's thread has accepted it and is about to report it when the engine's thread looks."""
    p, d = world.end("p", "p1", Role.BOTH), world.end("d", "d1", Role.BOTH)
    begun, go_on = threading.Event(), threading.Event()

    def slowly(orders: StepOrders) -> None:
        begun.set()
        assert go_on.wait(10.0)
        p.send(orders)

    p.rendezvous._send = slowly
    d.view(p, P)
    assert begun.wait(10.0)
    seen: list[tuple[PeerView, list[str]]] = []
    looking = threading.Thread(target=lambda: seen.append((p.view(d, D), list(p.learned))))
    looking.start()
    looking.join(0.05)
    go_on.set()
    looking.join(10.0)
    assert seen == [(PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("d1")), ["+d1"])]


def test_a_restart_on_the_same_port_works_at_the_first_request(world: World) -> None:
    """I6. The old incarnation is gone before the new one is accepted."""
    p, d = world.end("p", "p1", Role.PREFILL), world.end("d", "d1", Role.DECODE)
    d.meet(p, P)
    port = p.rendezvous.port
    world.close(p)
    again = world.end("p", "p2", Role.PREFILL, port=port)
    assert d.meet(again, P) == PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("p2"))
    assert d.learned == ["+p1", "-p1", "+p2"]
    assert again.learned == ["+d1"]


def test_a_lost_peer_is_gone_and_the_next_request_shakes_hands_again(world: World) -> None:
    """The peer has either restarted (and the request does not say so), or only forgotten us."""
    p, d = world.end("p", "p1", Role.PREFILL), world.end("d", "d1", Role.DECODE)
    d.meet(p, P)
    d.rendezvous.lost(P, Incarnation("p1"), "it gave no sign of life")
    assert d.learned == ["+p1", "-p1"]
    view = d.view(p, P)
    assert (view.status, view.reason) == (PeerStatus.REFUSED, "it gave no sign of life"), "the back-off"
    world.clock.advance(0.3)
    assert d.meet(p, P).status is PeerStatus.ACCEPTED
    assert d.learned == ["+p1", "-p1", "+p1"]
    assert p.learned == ["+d1"], "it knew us all the time"

    p.rendezvous.lost(D, Incarnation("d1"), "it was silent")
    d.rendezvous.lost(P, Incarnation("p1"), "it gave no sign of life")
    world.clock.advance(1)
    assert d.meet(p, P).status is PeerStatus.ACCEPTED
    assert p.learned == ["+d1", "-d1", "+d1"]

    port = p.rendezvous.port
    world.close(p)
    again = world.end("p", "p2", Role.PREFILL, port=port)
    d.rendezvous.lost(P, Incarnation("p1"), "it gave no sign of life")
    world.clock.advance(1)
    assert d.meet(again, P, named=False) == PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("p2"))
    assert d.learned[-2:] == ["-p1", "+p2"]


def test_the_loss_of_an_old_incarnation_changes_nothing(world: World) -> None:
    """I6. A driver may notice the loss late."""
    p, d = world.end("p", "p1", Role.PREFILL), world.end("d", "d1", Role.DECODE)
    d.meet(p, P)
    d.rendezvous.lost(P, Incarnation("p0"), "old news")
    assert d.learned == ["+p1"]
    assert d.view(p, P).status is PeerStatus.ACCEPTED


def test_a_peer_that_is_gone_again_never_reaches_the_worker_halves(world: World) -> None:
    """Otherwise the worker halves would keep it for ever: its end is reported only once."""
    p, d = world.end("p", "p1", Role.PREFILL), world.end("d", "d1", Role.DECODE)
    handshaker = d.rendezvous._started()
    taken = handshaker.take_accepted

    def late() -> object:
        accepted = taken()
        if accepted:
            handshaker.lost(P, Incarnation("p1"), "gone at once", world.clock.now_s())
        return accepted

    handshaker.take_accepted = late  # type: ignore[method-assign, assignment]
    d.meet(p, P)
    assert "+p1" not in d.learned


def test_lost_engines_with_random_ids_are_forgotten(world: World) -> None:
    """R24, I5: the peer table forgets them too, some minutes later."""
    p = world.end("p", "p1", Role.PREFILL)
    for number in range(20):
        d = world.end(f"d{number}", "i", Role.DECODE)
        assert d.meet(p, P).status is PeerStatus.ACCEPTED
        world.close(d)
        p.rendezvous.lost(EngineId(f"d{number}"), Incarnation("i"), "it was silent")
    assert p.learned.count("+i") == p.learned.count("-i") == 20
    assert {peer.state for peer in p.rendezvous.peers()} == {PeerState.LOST}
    world.clock.advance(700)
    d = world.end("d", "d1", Role.DECODE)
    d.meet(p, P)
    assert [peer.engine for peer in p.rendezvous.peers()] == ["d"]


def test_a_question_that_timed_out_unnoticed_does_not_cost_the_next_request(world: World) -> None:
    """The engine asked, then had nothing to do: the silence of the old incarnation is not an answer of the new one."""
    p, d = world.end("p", "p1", Role.PREFILL), world.end("d", "d1", Role.DECODE)
    host, port = p.rendezvous.host, p.rendezvous.port
    world.close(p)
    assert d.rendezvous.view(P, Incarnation("p1"), host, port).status is PeerStatus.ASKING
    world.clock.advance(5.0)
    p = world.end("p", "p2", Role.PREFILL, port=port)
    assert d.view(p, P).status is not PeerStatus.REFUSED, "the new incarnation is asked at once"
    assert d.meet(p, P) == PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("p2"))


def test_an_engine_whose_ranks_were_restarted_is_met_again_at_its_old_address(world: World) -> None:
    """I6: another incarnation at the same sockets. It has forgotten every peer, and shakes hands with each again."""
    p, d = world.end("p", "p1", Role.PREFILL), world.end("d", "d1", Role.DECODE)
    d.meet(p, P)
    p.incarnation = Incarnation("p2")
    p.rendezvous.restart(side("p", "p2", Role.PREFILL), p.send)
    assert p.rendezvous.peers() == ()
    assert d.meet(p, P) == PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("p2"))
    assert d.learned == ["+p1", "-p1", "+p2"]
    assert p.learned == ["+d1", "+d1"], "the old worker halves, then the new ones"
