"""Rings: a driver that sleeps is woken by a peer's message, and by nothing that a stranger sends more than it must."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.clock import MonotonicClock
from kvferry.handoff.actions import Send
from kvferry.handoff.driver.poll_interval import pause_s
from kvferry.handoff.orders import StepOrders
from kvferry.ids import PeerName
from kvferry.settings import Role, TransferMode
from kvferry.transport.nixl.doorbell import EXPECTING_S, Doorbell, numeric
from tests.harness.handoff_engines import Engine, memory_transports, offer, settings_for, until, want

CLOCK = MonotonicClock()
PEER = PeerName("peer")
LONG_S = 30.0
"""Far more than a test takes: who sleeps so long was not woken."""


@pytest.fixture
def bells() -> Iterator[tuple[Doorbell, Doorbell]]:
    near, far = Doorbell(), Doorbell()
    near.open("127.0.0.1")
    far.open("127.0.0.1")
    near.learn(PEER, "127.0.0.1", far.port, far.token)
    yield near, far
    near.close()
    far.close()


def test_a_ring_wakes_whoever_sleeps(bells: tuple[Doorbell, Doorbell]) -> None:
    near, far = bells
    assert not far.expecting(CLOCK.now_s())
    assert not far.heard
    sleeper = threading.Thread(target=far.wait, args=(LONG_S, CLOCK))
    sleeper.start()
    near.ring(PEER)
    sleeper.join(LONG_S / 3)
    assert not sleeper.is_alive(), "a ring did not wake it"
    assert far.heard
    now_s = CLOCK.now_s()
    assert far.expecting(now_s) or now_s > far_rang_s(far) + EXPECTING_S
    far.arrived()
    assert not far.expecting(CLOCK.now_s()), "what was rung for has come"


def far_rang_s(bell: Doorbell) -> float:
    assert bell._rung_s is not None, "it was rung"
    return bell._rung_s


def test_wake_is_for_any_thread_and_any_time() -> None:
    bell = Doorbell()
    bell.wake()  # before it is open: the first wait is over at once
    bell.open("127.0.0.1")
    began_s = time.monotonic()
    bell.wait(LONG_S, CLOCK)
    bell.wake()
    bell.wait(LONG_S, CLOCK)
    bell.wake()
    bell.wait(0.0005, CLOCK)
    assert time.monotonic() - began_s < LONG_S / 3
    bell.close()
    bell.wake()
    bell.close()


def test_who_told_no_bell_is_not_rung(bells: tuple[Doorbell, Doorbell]) -> None:
    near, far = bells
    near.forget(PEER)
    near.ring(PEER)
    near.learn(PEER, "", far.port, far.token)  # a name for a host: it is not looked up
    near.learn(PEER, "127.0.0.1", 0, far.token)
    near.ring(PEER)
    far.wait(0.02, CLOCK)
    assert not far.heard


def test_a_stranger_without_the_token_rings_nothing_and_closes_the_bell(
    bells: tuple[Doorbell, Doorbell], caplog: pytest.LogCaptureFixture
) -> None:
    near, far = bells
    port = far.port
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for length in (0, 1, 8, 9, 4000):
            stranger.sendto(b"x" * length, ("127.0.0.1", port))
        far.wait(0.02, CLOCK)
        assert not far.heard
        assert not far.expecting(CLOCK.now_s())
        for _ in range(40):
            for _ in range(50):
                stranger.sendto(b"x" * 8, ("127.0.0.1", port))
            far.wait(0.001, CLOCK)
    assert far.port == 0, "so many forged rings close it"
    assert "without its token" in caplog.text
    far.wake()
    far.wait(LONG_S, CLOCK)  # and it is still woken by its own engine
    near.ring(PEER)
    far.learn(PEER, "127.0.0.1", near.port, near.token)
    far.ring(PEER)
    near.wait(LONG_S, CLOCK)
    assert near.heard, "a peer that was told our port sleeps until we ring: a closed bell still does"


@pytest.mark.parametrize(
    "host", ["", "worker-3.local", "0.0.0.0", "::", "224.0.0.1", "256.1.1.1", "10.0.0.1 ", "a" * 300]
)
def test_only_addresses_are_rung(host: str) -> None:
    assert numeric(host) == ""
    bell = Doorbell()
    bell.open(host)
    assert bell.port == 0
    bell.close()


def test_an_address_of_another_machine_has_no_bell() -> None:
    bell = Doorbell()
    bell.open("192.0.2.1")
    assert bell.port == 0
    assert numeric("::1") == "::1"
    bell.close()


class _WithHost(Engine):
    def hello(self) -> bytes:
        from kvferry.wire.hello import Hello, decode_hello, encode_hello

        known = decode_hello(super().hello())
        return encode_hello(
            Hello(engine=known.engine, incarnation=known.incarnation, role=known.role, ranks=known.ranks,
                  host="127.0.0.1", port=1)
        )  # fmt: skip


@pytest.mark.parametrize("mode", list(TransferMode))
def test_drivers_that_met_ring_and_need_no_polling(mode: TransferMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everybody rings, a driver that would sleep for half a minute between two looks hands over at once."""
    monkeypatch.setattr("kvferry.handoff.driver.driver.pause_s", _sleeps_long_where_all_ring)
    _, transports = memory_transports()
    settings = settings_for(mode, ttl_s=40.0, deadline_s=40.0)
    p = _WithHost("p", Role.PREFILL, settings, transports)
    d = _WithHost("d", Role.DECODE, settings, transports)
    try:
        p.meet(d)
        d.meet(p)
        until(lambda: all(driver._bell.all_ring(1) for driver in (*p.drivers, *d.drivers)))
        source, target = [5, 3, 9], [4, 8, 1]
        p.fill(source, 1)
        began_s = time.monotonic()
        d.submit(StepOrders(fetch=(want("t1", p, mode, target, 0, 9, deadline_s=40.0),)))
        p.submit(StepOrders(offer=(offer("t1", source, 9),)))
        until(lambda: all(s.landed for s in d.seen) and all(s.taken for s in p.seen), p, d, timeout_s=LONG_S)
        assert time.monotonic() - began_s < LONG_S / 3
        assert d.tokens(target, 0, 9).any()
        assert d.seen[0].landed[0].grant_s > 0
    finally:
        d.close()
        p.close()


def _sleeps_long_where_all_ring(now_s: float, **state: object) -> float:
    pause = pause_s(now_s, **state)  # type: ignore[arg-type]  # the keywords of pause_s, passed on
    return LONG_S if state["all_ring"] and not state["in_flight"] and not state["expecting"] else pause


def test_whoever_departs_is_rung_no_more() -> None:
    from kvferry.handoff.orders import PeerGone

    _, transports = memory_transports()
    settings = settings_for(TransferMode.PULL)
    p, d = (_WithHost(name, role, settings, transports) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)))
    try:
        p.meet(d)
        d.meet(p)
        until(lambda: bool(p.drivers[0]._bell._peers))
        p.submit(StepOrders(gone=(PeerGone(d.engine, d.incarnation, "test"),)))
        until(lambda: not p.drivers[0]._bell._peers)
    finally:
        d.close()
        p.close()


def test_pauses() -> None:
    idle = {
        "in_flight": False, "expecting": False, "all_ring": True, "awaited": False, "receiving": False, "idle": True,
        "has_peers": True, "due_s": None,
    }  # fmt: skip

    def pause(**state: object) -> float:
        return pause_s(100.0, **{**idle, **state})  # type: ignore[arg-type]  # the keywords of pause_s

    assert pause(in_flight=True) < pause(expecting=True) < 0.001 <= pause(receiving=True) < pause(idle=False) < pause()
    assert pause(receiving=True, all_ring=False) < pause(receiving=True)
    assert pause(due_s=100.01) == pytest.approx(0.01)
    assert pause(due_s=90.0) == 0.001, "late is no reason to spin"
    assert pause(all_ring=False, has_peers=False) == 0.05


def test_a_landing_is_reported_before_prefill_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits for it; the Confirm that gives prefill its blocks back is no hurry."""
    _, transports = memory_transports()
    settings = settings_for(TransferMode.PUSH)
    p, d = (_WithHost(name, role, settings, transports) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)))
    order: list[str] = []
    driver = d.drivers[0]
    send, report = driver._send, driver._report

    def sent(action: Send) -> None:
        order.append(type(action.message).__name__)
        send(action)

    def reported() -> None:
        report()
        order.append("reported" if driver.has_report else "")

    monkeypatch.setattr(driver, "_send", sent)
    monkeypatch.setattr(driver, "_report", reported)
    try:
        p.meet(d)
        d.meet(p)
        p.fill([5], 1)
        d.submit(StepOrders(fetch=(want("t1", p, TransferMode.PUSH, [4], 0, 3),)))
        p.submit(StepOrders(offer=(offer("t1", [5], 3),)))
        until(lambda: bool(p.seen[0].taken), p)
        assert order.index("reported") < order.index("Confirm")
    finally:
        d.close()
        p.close()
