"""A driver that sleeps is woken by its peers, and never sleeps longer than it may."""

import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.handoff.actions import Send
from kvferry.handoff.driver.poll_interval import longest_wait_s, look_every_s
from kvferry.handoff.orders import PeerGone, StepOrders
from kvferry.ids import PeerName
from kvferry.settings import Role, TransferMode
from kvferry.transport.base import Transport
from tests.harness.handoff_engines import Engine, memory_transports, offer, settings_for, until, want

LONG_S = 30.0
"""Far longer than a test takes: a driver that sleeps this long was not woken."""


class _WithHost(Engine):
    def hello(self) -> bytes:
        from kvferry.wire.hello import Hello, decode_hello, encode_hello

        known = decode_hello(super().hello())
        return encode_hello(
            Hello(engine=known.engine, incarnation=known.incarnation, role=known.role, ranks=known.ranks,
                  host="127.0.0.1", port=1)
        )  # fmt: skip


def _nixl_transports() -> Callable[[PeerName], Transport]:
    from kvferry.transport.nixl.nixl import NixlTransport

    return NixlTransport


Pair = tuple[Engine, Engine]


@pytest.fixture(params=["memory", pytest.param("nixl", marks=pytest.mark.process)])
def make_pair(request: pytest.FixtureRequest) -> Iterator[Callable[[TransferMode], Pair]]:
    made: list[Engine] = []

    def make(mode: TransferMode) -> Pair:
        transports = memory_transports()[1] if request.param == "memory" else _nixl_transports()
        settings = settings_for(mode, ttl_s=40.0, deadline_s=40.0)
        p = _WithHost("p", Role.PREFILL, settings, transports)
        made.append(p)
        d = _WithHost("d", Role.DECODE, settings, transports)
        made.append(d)
        p.meet(d)
        d.meet(p)
        return p, d

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("mode", list(TransferMode))
def test_drivers_that_are_woken_need_no_polling(
    mode: TransferMode, make_pair: Callable[[TransferMode], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every peer wakes it, a driver that would poll only each half minute hands over at once."""
    monkeypatch.setattr("kvferry.handoff.driver.driver.longest_wait_s", _sleeps_long)
    p, d = make_pair(mode)
    until(lambda: all(_is_woken(engine) for engine in (p, d)))
    source, target = [5, 3, 9], [4, 8, 1]
    p.fill(source, 1)
    began_s = time.monotonic()
    d.submit(StepOrders(fetch=(want("t1", p, mode, target, 0, 9, deadline_s=40.0),)))
    p.submit(StepOrders(offer=(offer("t1", source, 9),)))
    until(lambda: all(s.landed for s in d.seen) and all(s.taken for s in p.seen), p, d, timeout_s=LONG_S)
    assert time.monotonic() - began_s < LONG_S / 3
    assert d.tokens(target, 0, 9).any()
    assert d.seen[0].landed[0].grant_s > 0


def _is_woken(engine: Engine) -> bool:
    """A transport that needs no polling."""
    (driver,) = engine.drivers
    bell = getattr(driver._transport, "_bell", None)
    return driver._connections.num_connected == 1 and (bell is None or bell.all_ring(driver._connections.links))


def _sleeps_long(now_s: float, *, in_flight: bool, **state: object) -> float:
    return longest_wait_s(now_s, in_flight=True, receiving=True, idle=False, due_s=None) if in_flight else LONG_S


def test_a_wake_address_is_kept_while_a_peer_is_away_and_forgotten_when_it_is_gone() -> None:
    _, transports = memory_transports()
    settings = settings_for(TransferMode.PULL)
    p, d = (_WithHost(name, role, settings, transports) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)))
    connections, (name,) = p.drivers[0]._connections, [PeerName(f"{d.engine}/{d.incarnation}/0")]
    try:
        p.meet(d)
        d.meet(p)
        until(lambda: connections.is_connected(name))
        connections.learn_wake_address(name, 7, b"token")
        assert connections._wake_addresses[name].host == "127.0.0.1"
        connections.learn_wake_address(PeerName("nobody"), 7, b"token")
        p.submit(StepOrders(gone=(PeerGone(d.engine, d.incarnation, "test"),)))
        until(lambda: not connections._wake_addresses)
    finally:
        d.close()
        p.close()


def test_how_long_a_driver_sleeps() -> None:
    def longest(**state: object) -> float:
        calm = {"in_flight": False, "receiving": False, "idle": True, "due_s": None}
        return longest_wait_s(100.0, **{**calm, **state})  # type: ignore[arg-type]  # the keywords of longest_wait_s

    def look(**state: object) -> float:
        calm = {"reply_expected": False, "receiving": False, "idle": True, "has_peers": True}
        return look_every_s(**{**calm, **state})  # type: ignore[arg-type]  # the keywords of look_every_s

    assert longest(in_flight=True) < 0.001 <= longest(receiving=True) < longest(idle=False) < longest()
    assert longest(due_s=100.01) == pytest.approx(0.01)
    assert longest(due_s=90.0) == 0.001, "late is no reason to spin"
    assert look(reply_expected=True) < look(receiving=True) < look(idle=False) < look() < look(has_peers=False) == 0.05
    assert look(receiving=True) < longest(receiving=True)


def test_a_landing_is_reported_before_prefill_gets_its_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits for the report; the Confirm that frees prefill's blocks is less urgent."""
    _, transports = memory_transports()
    settings = settings_for(TransferMode.PUSH)
    p, d = (_WithHost(name, role, settings, transports) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)))
    order: list[str] = []
    driver = d.drivers[0]
    send, report = driver._carrier._send, driver._report

    def sent(action: Send) -> None:
        order.append(type(action.message).__name__)
        send(action)

    def reported() -> None:
        report()
        order.append("reported" if driver.has_report else "")

    monkeypatch.setattr(driver._carrier, "_send", sent)
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
