"""Fuzzed messages from a seed: 3,500 per target here; `python -m tests.attacks.fuzz` sends a million. R8.

No crash, no hang, no exception but ours; the listener answers a good peer afterwards.
"""

import logging

import pytest

from kvferry.handshake.handshaker import Handshaker
from kvferry.settings import Role
from tests.attacks.fuzz import TARGETS, engine, run, run_listener
from tests.harness.sidechannels import answering, asking, listening, settings, shake

SEED = 20240601
NUM_EACH = 3500
SLOWEST_MS = 2000.0


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvferry")


@pytest.mark.parametrize("target", TARGETS)
def test_fuzzed(target: str) -> None:  # R8 R20
    result = run(target, NUM_EACH, SEED)
    slowest_ms = result["slowest_ms"]
    assert isinstance(slowest_ms, float)
    assert slowest_ms < SLOWEST_MS
    # Both outcomes occurred, so the messages are neither all noise nor all good.
    assert len(result.keys() - {"target", "messages", "seed", "slowest_ms"}) >= 2, result


def test_a_live_listener_survives_and_answers_a_good_peer() -> None:  # R8
    handshaker = Handshaker(engine("p0", Role.PREFILL, tp=2), max_peers=64)
    given = settings(max_handshakes_per_s=1e9, max_message_bytes=1 << 18)
    with listening(answering(handshaker), given) as server, asking() as client:
        run_listener(server, NUM_EACH, SEED)
        assert shake(Handshaker(engine("good", Role.DECODE)), client, "p0", server.port) == "accepted"
        stats = server.stats()
    assert stats.failed == 0
    assert stats.malformed > 0
    assert stats.answered + stats.malformed > NUM_EACH * 0.98  # except for the oversized ones
