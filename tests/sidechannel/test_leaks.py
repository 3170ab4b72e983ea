"""A refused peer leaves nothing behind. R24."""

import logging
import time

import pytest

from kvferry.handshake.exchange import ask
from kvferry.handshake.handshaker import Handshaker
from kvferry.handshake.peer_table import BackOff
from kvferry.ids import EngineId
from kvferry.settings import Role
from kvferry.wire.envelope import Kind, decode_envelope
from tests.harness.handshake_examples import side
from tests.harness.sidechannels import (
    answering,
    asking,
    collect,
    listening,
    num_descriptors,
    num_threads,
    resident_bytes,
    settings,
    shake,
)
from tests.harness.until import until

NUM_REFUSED = 1000
MOST_GROWTH_BYTES = 4 << 20


def test_a_thousand_refused_handshakes_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:  # R24
    """They run over the real side channel, each on a separate connection, and both sides refuse by the facts."""
    caplog.set_level(logging.CRITICAL, "kvferry")  # what pytest keeps of the log is no leak
    handshaker = Handshaker(side("p0"), max_peers=64)
    given = settings(max_handshakes_per_s=1e6)
    asker = Handshaker(
        side("d0", role=Role.DECODE, kv_dtype="fp8"),
        back_off=BackOff(refused_first_s=1e-9, longest_s=1e-9, lost_first_s=1e-9),
    )
    with listening(answering(handshaker), given) as server, asking(given) as client:

        def refuse(num: int) -> None:
            for _ in range(num):
                assert shake(asker, client, "p0", server.port) == "refused"

        refuse(200)  # libraries keep some memory for ever
        until(lambda: server.stats().connections == 0, "closed connections")
        before = num_descriptors(), num_threads(), resident_bytes()
        refuse(NUM_REFUSED)
        until(lambda: server.stats().connections == 0, "closed connections")
        after = num_descriptors(), num_threads(), resident_bytes()
    assert server.stats().answered == NUM_REFUSED + 200
    assert after[:2] == before[:2]
    assert after[2] - before[2] < MOST_GROWTH_BYTES
    assert handshaker.take_accepted() == asker.take_accepted() == []


def test_a_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    handshaker = Handshaker(side("p0"))
    for second in range(50):
        handshaker.answer(ask(side("d0", role=Role.DECODE, kv_dtype="fp8")), "x", float(second))
    assert [record.levelname for record in caplog.records if "kv.dtype" in record.getMessage()] == ["WARNING"]


def test_refused_strangers_do_not_fill_the_peer_table() -> None:  # R24
    handshaker = Handshaker(side("p0"), max_peers=64)
    for index in range(NUM_REFUSED):
        stranger = side(f"stranger-{index}", role=Role.DECODE, kv_dtype="fp8")
        assert decode_envelope(handshaker.answer(ask(stranger), "x", float(index))).kind is Kind.REFUSE
    assert len(handshaker.peers.snapshot()) == 64


def test_close_leaves_no_thread_and_no_descriptor() -> None:  # R24
    def once() -> None:
        with listening(lambda body, address: body) as server, asking() as client:
            for token in range(20):
                client.ask_nowait("127.0.0.1", server.port, b"x", token)
            collect(client, 20)
            client.ask_nowait("127.0.0.1", 9, b"never answered", 99)

    once()
    descriptors, threads = num_descriptors(), num_threads()  # of other tests, some may still end
    for _ in range(10):
        once()
    until(lambda: num_descriptors() <= descriptors and num_threads() <= threads, "descriptors and threads as before")


def test_an_unanswered_question_ends_and_its_socket_with_it() -> None:  # R24
    with asking(settings(timeout_s=0.05)) as client:
        client.ask_nowait("127.0.0.1", 9, b"x", 1)
        collect(client, 1)
        before = num_descriptors()
        for token in range(100):
            client.ask_nowait("127.0.0.1", 9, b"x", token)
        collect(client, 100)
        until(lambda: num_descriptors() <= before, "closed sockets")


@pytest.mark.parametrize("num", [50])
def test_a_handshaker_forgets_what_is_answered(num: int) -> None:
    handshaker = Handshaker(side("d0", role=Role.DECODE))
    for index in range(num):
        handshaker.want(EngineId(f"p{index}"), None, "127.0.0.1", 1, time.monotonic())
    for asked in handshaker.take_asks():
        handshaker.replied(asked.token, b"garbage", time.monotonic())
    assert not handshaker._sent
