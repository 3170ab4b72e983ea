"""Rings: a sleeping transport is woken by a peer, and by an unknown sender no more than necessary."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.clock import MonotonicClock
from kvferry.ids import PeerName
from kvferry.transport.base import WakeAddress
from kvferry.transport.nixl.doorbell import EXPECTING_S, Doorbell, numeric

CLOCK = MonotonicClock()
PEER = PeerName("peer")
LONG_S = 30.0
"""Far longer than a test takes: a transport that sleeps this long was not woken."""


def make_bell(host: str = "127.0.0.1") -> Doorbell:
    bell = Doorbell(CLOCK)
    bell.open()
    bell.listen(host)
    return bell


def address_of(bell: Doorbell, host: str = "127.0.0.1") -> WakeAddress:
    return WakeAddress(host, bell.port, bell.token)


@pytest.fixture
def bells() -> Iterator[tuple[Doorbell, Doorbell]]:
    """Yields a transport that rings, and one that is rung."""
    ringing, rung = make_bell(), make_bell()
    ringing.learn(PEER, address_of(rung))
    yield ringing, rung
    ringing.close()
    rung.close()


def test_a_ring_wakes_a_sleeping_transport(bells: tuple[Doorbell, Doorbell]) -> None:
    ringing, rung = bells
    assert (rung.expecting(), rung.rings_arrive) == (False, False)
    sleeper = threading.Thread(target=rung.wait, args=(LONG_S,))
    sleeper.start()
    ringing.ring(PEER)
    sleeper.join(LONG_S / 3)
    assert not sleeper.is_alive(), "a ring did not wake it"
    assert rung.rings_arrive
    assert rung._rung_at_s is not None
    assert rung.expecting() or CLOCK.now_s() > rung._rung_at_s + EXPECTING_S
    rung.message_came()
    assert not rung.expecting(), "the message that was rung for has come"


def test_wake_works_from_any_thread_at_any_time() -> None:
    bell = Doorbell(CLOCK)
    bell.wake()  # before it is open: the first wait returns at once
    bell.open()
    bell.listen("127.0.0.1")
    began_s = time.monotonic()
    bell.wait(LONG_S)
    bell.wake()
    bell.wait(LONG_S)
    bell.wake()
    bell.wait(0.0005)
    assert time.monotonic() - began_s < LONG_S / 3
    bell.close()
    bell.wake()
    bell.close()


def test_a_peer_that_gave_no_address_is_not_rung(bells: tuple[Doorbell, Doorbell]) -> None:
    ringing, rung = bells
    ringing.forget(PEER)
    ringing.ring(PEER)
    ringing.learn(PEER, address_of(rung, "worker-3.local"))  # a host name, which is not looked up
    ringing.learn(PEER, WakeAddress("127.0.0.1", 0, rung.token))
    ringing.ring(PEER)
    rung.wait(0.02)
    assert not rung.rings_arrive


def test_all_ring_only_if_rings_arrive_and_every_peer_gave_an_address(bells: tuple[Doorbell, Doorbell]) -> None:
    ringing, rung = bells
    rung.learn(PEER, address_of(ringing))
    assert not rung.all_ring([PEER]), "no ring has come through yet"
    ringing.ring(PEER)
    rung.wait(LONG_S)
    assert rung.all_ring([PEER])
    assert not rung.all_ring([PEER, PeerName("another")])
    assert not rung.all_ring([])


def test_a_stranger_without_the_token_rings_nothing_and_closes_the_bell(
    bells: tuple[Doorbell, Doorbell], caplog: pytest.LogCaptureFixture
) -> None:
    ringing, rung = bells
    port = rung.port
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for length in (0, 1, 8, 9, 4000):
            stranger.sendto(b"x" * length, ("127.0.0.1", port))
        rung.wait(0.02)
        assert not rung.rings_arrive
        assert not rung.expecting()
        for _ in range(40):
            for _ in range(50):
                stranger.sendto(b"x" * 8, ("127.0.0.1", port))
            rung.wait(0.001)
    assert rung.port == 0, "many forged rings close it"
    assert "without its token" in caplog.text
    rung.wake()
    rung.wait(LONG_S)  # and it is still woken by its own engine
    rung.learn(PEER, address_of(ringing))
    rung.ring(PEER)
    ringing.wait(LONG_S)
    assert ringing.rings_arrive, "a peer that knows our port sleeps until we ring: a closed bell still does"


@pytest.mark.parametrize(
    "host", ["", "worker-3.local", "0.0.0.0", "::", "224.0.0.1", "256.1.1.1", "10.0.0.1 ", "a" * 300]
)
def test_only_addresses_are_rung(host: str) -> None:
    assert numeric(host) == ""
    bell = make_bell(host)
    assert bell.port == 0
    bell.close()


def test_an_address_of_another_machine_has_no_bell() -> None:
    bell = make_bell("192.0.2.1")
    assert bell.port == 0
    assert numeric("::1") == "::1"
    bell.close()
