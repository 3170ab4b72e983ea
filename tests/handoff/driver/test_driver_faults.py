"""The driver when things fail, over the memory transport: real threads, faults on demand."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import TransferError
from kvferry.handoff.orders import Cancel, PeerAccepted, StepOrders, Withdraw
from kvferry.ids import TransferId
from kvferry.settings import Role, TransferMode, Verify
from kvferry.transport.memory import MemoryHub, MemoryTransport
from tests.harness.handoff_engines import Engine, memory_transports, offer, settings_for, until, want

MODES = list(TransferMode)
SOURCE, TARGET = [5, 3, 9], [4, 8, 1]


class World:
    """Yields a hub with engines on it, all of which are closed at the end."""

    def __init__(self, mode: TransferMode) -> None:
        self.mode = mode
        self.hub, self._transports = memory_transports()
        self.engines: list[Engine] = []

    def engine(self, name: str, role: Role, *, verify: Verify = Verify.SAMPLE, **options: object) -> Engine:
        settings = settings_for(self.mode, ttl_s=1.0, deadline_s=4.0, verify=verify)
        engine = Engine(name, role, settings, self._transports, **options)  # type: ignore[arg-type]
        self.engines.append(engine)
        return engine

    def pair(self, *, verify: Verify = Verify.SAMPLE) -> tuple[Engine, Engine]:
        p, d = self.engine("p", Role.PREFILL, verify=verify), self.engine("d", Role.DECODE, verify=verify)
        p.meet(d)
        d.meet(p)
        p.fill(SOURCE, 1)
        return p, d

    def hand_over(self, p: Engine, d: Engine, transfer: str) -> None:
        p.submit(StepOrders(offer=(offer(transfer, SOURCE, 12),)))
        d.submit(StepOrders(fetch=(want(transfer, p, self.mode, TARGET, 0, 12),)))


@pytest.fixture(params=MODES, ids=str)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    before = threading.active_count()
    world = World(request.param)
    yield world
    for engine in world.engines:
        engine.close()
    assert threading.active_count() == before, "a driver thread is left"


def test_a_transfer_that_fails(world: World) -> None:
    """R29: the failure is reported with its reason, both sides free their blocks, and the next hand-off works."""
    p, d = world.pair()
    world.hub.faults.fail_next = 1
    world.hand_over(p, d, "t1")
    until(lambda: d.seen[0].released == ["t1"] and p.seen[0].released == ["t1"], p, d)
    assert ["a fault was asked for" in failed.reason for failed in d.seen[0].failed] == [True]
    assert not d.seen[0].landed
    assert not p.seen[0].taken
    world.hand_over(p, d, "t2")
    until(lambda: p.seen[0].taken == ["t2"], p, d)
    np.testing.assert_array_equal(d.tokens(TARGET, 0, 12), p.tokens(SOURCE, 0, 12))


def test_prefill_is_killed(world: World) -> None:
    """R28, R29: the failure is reported within its lease; nothing of the peer is left after its successor came."""
    p, d = world.pair()
    world.hub.faults.hold = True
    world.hand_over(p, d, "t1")
    until(lambda: p.drivers[0].stats().open_grants == 1 and d.drivers[0].stats().peers == 1, p, d)
    world.hub.lose(p.drivers[0]._transport.agent_name)  # type: ignore[attr-defined]
    world.hub.faults.hold = False
    until(lambda: d.seen[0].released == ["t1"], d)
    assert len(d.seen[0].failed) + len(d.seen[0].landed) == 1
    again = world.engine("p", Role.PREFILL, start="2")
    again.fill(SOURCE, 2)
    again.meet(d)
    d.meet(again)
    world.hand_over(again, d, "t2")
    until(lambda: again.seen[0].taken == ["t2"], again, d)
    assert d.drivers[0].stats().peers == 1
    assert len(d.drivers[0]._connections.links) == 1
    np.testing.assert_array_equal(d.tokens(TARGET, 0, 12), again.tokens(SOURCE, 0, 12))


def test_decode_is_killed(world: World) -> None:
    """R25: prefill's blocks come back when the lease of the dead decode rank ends."""
    p, d = world.pair()
    world.hub.faults.hold = True
    world.hand_over(p, d, "t1")
    until(lambda: p.drivers[0].stats().open_grants == 1, p, d)
    world.hub.lose(d.drivers[0]._transport.agent_name)  # type: ignore[attr-defined]
    world.hub.faults.hold = False
    until(lambda: p.seen[0].released == ["t1"], p)
    assert not p.seen[0].taken


def test_a_hanging_handoff_does_not_block_another(world: World) -> None:
    """One peer hangs, the hand-off of another one lands, and the engine's thread never waits."""
    p, d = world.pair()
    other = world.engine("q", Role.PREFILL)
    other.fill(SOURCE, 3)
    other.meet(d)
    d.meet(other)
    # A prefill that never offers, so its hand-off hangs until the deadline.
    d.submit(StepOrders(fetch=(want("hangs", p, world.mode, [20, 21, 22], 0, 12),)))
    world.hand_over(other, d, "passes")
    until(lambda: [landed.transfer for landed in d.seen[0].landed] == ["passes"], p, d, other)
    assert not d.seen[0].failed
    until(lambda: [failed.transfer for failed in d.seen[0].failed] == ["hangs"], p, d, other)
    assert "no such request came within 4 s" in d.seen[0].failed[0].reason
    until(lambda: d.seen[0].released == ["hangs"], p, d, other)


def test_cancel_and_withdraw(world: World) -> None:
    """R28: both sides get their blocks back through `released`, and no end is reported twice."""
    p, d = world.pair()
    d.submit(StepOrders(fetch=(want("t1", p, world.mode, TARGET, 0, 12),)))
    d.submit(StepOrders(cancel=(Cancel(TransferId("t1"), p.engine, p.incarnation, "gone"),)))
    p.submit(StepOrders(offer=(offer("t1", SOURCE, 12),)))
    until(lambda: d.seen[0].released == ["t1"] and p.seen[0].released == ["t1"], p, d)
    p.submit(StepOrders(offer=(offer("t2", SOURCE, 4, final=False),)))
    d.submit(StepOrders(fetch=(want("t2", p, world.mode, TARGET, 0, 12),)))
    p.submit(StepOrders(withdraw=(Withdraw(TransferId("t2"), "the client went away"),)))
    until(lambda: "t2" in d.seen[0].released and "t2" in p.seen[0].released, p, d)
    assert [failed.transfer for failed in d.seen[0].failed] == ["t2"]
    assert "the client went away" in d.seen[0].failed[0].reason
    assert not d.seen[0].landed


def test_bytes_that_changed_in_transit_are_never_used(world: World) -> None:
    """Prefill's memory is overwritten after it sent its digest."""
    p, d = world.pair(verify=Verify.ALL)
    world.hub.faults.on_post = lambda *_: p.fill(SOURCE, 99)
    world.hand_over(p, d, "t1")
    until(lambda: bool(d.seen[0].failed or d.seen[0].landed), p, d)
    assert not d.seen[0].landed
    assert d.seen[0].failed[0].reason == "what prefill rank 0 sent is not what arrived"
    assert len(d.seen[0].failed[0].arrived) == 0
    until(lambda: d.seen[0].released == ["t1"] and p.seen[0].released == ["t1"], p, d)


@pytest.mark.parametrize("verify", list(Verify))
def test_how_much_is_verified(world: World, verify: Verify) -> None:
    p, d = world.pair(verify=verify)
    world.hand_over(p, d, "t1")
    until(lambda: len(d.seen[0].landed) == 1, p, d)
    cells = d.seen[0].landed[0].verified_cells
    assert {Verify.OFF: cells == 0, Verify.SAMPLE: 1 <= cells <= 8, Verify.ALL: cells >= 4}[verify]


def test_a_peer_that_does_not_fit_leaves_nothing(world: World) -> None:
    """R24: it is refused before the transport learns of it; what is fetched from it fails at once."""
    d = world.engine("d", Role.DECODE)
    p = world.engine("p", Role.PREFILL)
    hello = p.hello().replace(b"layers.0.attn", b"layers.7.attn")
    for number in range(20):
        d.submit(StepOrders(accepted=(PeerAccepted(p.engine, p.incarnation, hello[number:]),)))
    d.submit(StepOrders(fetch=(want("t1", p, world.mode, TARGET, 0, 12),)))
    until(lambda: d.seen[0].released == ["t1"], d)
    assert "is not known" in d.seen[0].failed[0].reason
    stats = d.drivers[0].stats()
    assert (stats.refused_peers, stats.peers) == (20, 0)
    assert not d.drivers[0]._connections.links
    assert not d.drivers[0]._connections.num_connected


def test_ranks_learn_of_their_siblings_from_their_own_hello(world: World) -> None:
    p = world.engine("p", Role.PREFILL, num_ranks=2, know_each_other=False)
    d = world.engine("d", Role.DECODE)
    p.meet(d)
    d.meet(p)
    p.fill(SOURCE, 1)
    world.hand_over(p, d, "t1")
    until(lambda: all(seen.taken == ["t1"] for seen in p.seen), p, d)
    np.testing.assert_array_equal(d.tokens(TARGET, 0, 12), p.tokens(SOURCE, 0, 12))
    assert d.seen[0].landed[0].verified_cells > 0


def test_a_drain_finishes_what_is_open_and_takes_nothing_new(world: World) -> None:
    """A drained driver ends by itself when nothing is open."""
    p, d = world.pair()
    world.hand_over(p, d, "t1")
    until(lambda: p.seen[0].taken == ["t1"], p, d)
    p.submit(StepOrders(offer=(offer("t2", SOURCE, 12),)))
    until(lambda: p.drivers[0].stats().open_grants == 1, p, d)
    p.drivers[0].drain()
    assert not p.drivers[0].drained
    d.submit(StepOrders(fetch=(want("t2", p, world.mode, TARGET, 0, 12),)))
    d.submit(StepOrders(fetch=(want("t3", p, world.mode, [20, 21, 22], 0, 12),)))
    until(lambda: p.drivers[0].drained, p, d)
    until(lambda: bool(d.seen[0].failed), p, d)
    assert p.seen[0].taken == ["t1", "t2"]
    assert "prefill is shutting down" in d.seen[0].failed[0].reason


def test_close_informs_the_peer(world: World) -> None:
    p, d = world.pair()
    p.submit(StepOrders(offer=(offer("t1", SOURCE, 4, final=False),)))
    d.submit(StepOrders(fetch=(want("t1", p, world.mode, TARGET, 0, 12),)))
    until(lambda: bool(d.drivers[0]._protocol.decode._receives) and not p.drivers[0]._idle, p, d)
    receive = d.drivers[0]._protocol.decode._receives[TransferId("t1")]
    # Nothing is in flight; otherwise a read that the close cuts off may be reported first.
    until(lambda: receive.sources[0].arrived_to == 4 and not receive.sources[0].in_flight, p, d)
    p.close()
    until(lambda: bool(d.seen[0].failed), d)
    assert "prefill is shutting down" in d.seen[0].failed[0].reason


def test_a_transport_that_cannot_register_fails_the_start() -> None:
    """The error is that of the transport, and no thread is left."""
    hub = MemoryHub()
    before = threading.active_count()

    def make(name: object) -> MemoryTransport:
        transport = MemoryTransport(name, hub=hub)  # type: ignore[arg-type]
        transport.close()
        return transport

    with pytest.raises(TransferError):
        Engine("p", Role.PREFILL, settings_for(TransferMode.PULL), make)
    until(lambda: threading.active_count() == before)
