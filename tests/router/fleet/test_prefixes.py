"""Which blocks of a prompt a worker has, by its own reports; the cost of a hand-off; the decode-only alarm."""

import msgspec
import pytest

from kvferry.engines.mini.scheduling.block_manager import BlockHash, chain_hashes
from kvferry.engines.mini.server.router_services import HASH_BYTES, packed_hashes
from kvferry.router.client_body import ClientBody
from kvferry.router.fleet.handoff_cost import MIN_SAMPLES, HandoffCost
from kvferry.router.fleet.prefixes import HASH_BYTES as ROUTER_HASH_BYTES
from kvferry.router.fleet.prefixes import Prefixes, Prompt, unpack_hashes
from kvferry.router.fleet.worker import Cached, Worker
from kvferry.router.observe.alarm import DecodeOnlyAlarm
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role
from kvferry.web.body_fields import fields_of

BLOCK = 16


def hashes_of(tokens: list[int]) -> list[bytes]:
    hashes: list[BlockHash] = []
    chain_hashes(hashes, tokens, BLOCK)
    return unpack_hashes(packed_hashes(hashes))


def a_worker(*hashes: bytes) -> Worker:
    worker = Worker("http://w", Role.PREFILL, RouterSettings())
    worker.cached = Cached(1, frozenset(hashes))
    return worker


def test_a_prompt_under_another_salt_finds_no_blocks_of_this_one() -> None:  # R38
    prefixes, text = Prefixes(), "word " * 400

    def estimate(salt: str | None) -> Prompt:
        fields = {"prompt": text} | ({} if salt is None else {"cache_salt": salt})
        body = ClientBody(fields_of(msgspec.json.encode(fields)))
        return prefixes.prompt(body.prompt_begin, body.prompt_size, None, with_pieces=True)

    hashes = hashes_of(list(range(500)))
    prefixes.learn(estimate("a"), hashes, 500, BLOCK, 2002)
    everywhere = a_worker(*hashes)
    assert estimate("a").num_cached(everywhere) > 400
    assert estimate("b").num_cached(everywhere) == estimate(None).num_cached(everywhere) == 0


def test_both_sides_hash_the_same_pieces() -> None:
    assert HASH_BYTES == ROUTER_HASH_BYTES
    assert len(hashes_of(list(range(40)))) == 2
    assert unpack_hashes(b"12345678rest") == [b"12345678"]


def test_a_later_prompt_with_the_same_beginning_finds_its_blocks() -> None:
    """One token per byte, so that what is shared is known exactly."""
    prefixes = Prefixes()
    head, size = b"s" * 1000, 2000
    first = head + b"a" * 1000
    prompt = prefixes.prompt(first, len(first), None, with_pieces=True)
    hashes = hashes_of(list(first))
    prefixes.learn(prompt, hashes, size, BLOCK, size)

    again = prefixes.prompt(first, len(first), size, with_pieces=True)
    everything = a_worker(*hashes)
    assert again.num_cached(everything) == 1920 // BLOCK * BLOCK  # whole pieces of 128 bytes
    other = prefixes.prompt(head + b"b" * 1000, len(head + b"b" * 1000), size, with_pieces=True)
    assert 800 <= other.num_cached(everything) <= 1000
    assert prefixes.prompt(b"c" * 2000, len(b"c" * 2000), None, with_pieces=True).num_cached(everything) == 0


def test_only_an_unbroken_chain_that_the_worker_reports_counts() -> None:
    prefixes, text = Prefixes(), b"x" * 1024
    hashes = hashes_of(list(text))
    prefixes.learn(prefixes.prompt(text, len(text), None, with_pieces=True), hashes, 1024, BLOCK, 1024)
    prompt = prefixes.prompt(text, len(text), 1024, with_pieces=True)
    assert prompt.num_cached(a_worker(*hashes[:3])) == 3 * BLOCK
    assert prompt.num_cached(a_worker(*hashes[1:])) == 0
    assert prompt.num_cached(a_worker()) == 0


def test_memory_is_bounded() -> None:
    prefixes = Prefixes(max_pieces=10)
    for i in range(50):
        text = bytes([i]) * 1024
        prefixes.learn(
            prefixes.prompt(text, len(text), None, with_pieces=True), hashes_of(list(text)), 1024, BLOCK, 1024
        )
    assert len(prefixes._known) == 10
    assert prefixes.prompt(b"\x00" * 1024, len(b"\x00" * 1024), 1024, with_pieces=True)._hashes == ()


def test_the_length_of_text_is_learned() -> None:
    prefixes = Prefixes()
    assert prefixes.prompt(b"x" * 400, len(b"x" * 400), None, with_pieces=False).num_tokens == 101
    for _ in range(100):
        prefixes.learn_length(len(b"x" * 400), None, 200)
    assert prefixes.prompt(b"x" * 400, len(b"x" * 400), None, with_pieces=False).num_tokens == pytest.approx(201, abs=2)
    assert prefixes.prompt(b"[1,2]", len(b"[1,2]"), 2, with_pieces=False).num_tokens == 2


def test_the_threshold_is_where_the_hand_off_costs_what_decode_loses() -> None:
    cost = HandoffCost()
    for i in range(MIN_SAMPLES - 1):
        cost.on_prefill(100 * (i % 4 + 1), 0.010 + 0.0001 * 100 * (i % 4 + 1))
        cost.on_handoff(0.030)
    assert cost.threshold_tokens() == 0  # not yet
    for i in range(50):
        cost.on_prefill(100 * (i % 4 + 1), 0.010 + 0.0001 * 100 * (i % 4 + 1))
        cost.on_handoff(0.030)
    line = cost.line()
    assert line is not None
    assert line[0] == pytest.approx(0.010)
    assert line[1] == pytest.approx(0.0001)
    assert cost.threshold_tokens() == pytest.approx(400, abs=1)


def test_prompts_of_one_length_measure_no_rate() -> None:
    cost = HandoffCost()
    for _ in range(100):
        cost.on_prefill(100, 0.02)
        cost.on_handoff(0.03)
    assert cost.line() is None
    assert cost.threshold_tokens() == 0


def test_a_negative_rate_counts_as_none() -> None:
    cost = HandoffCost()
    for i in range(100):
        cost.on_prefill(100 * (i % 4), 1.0 - 0.1 * (i % 4))
        cost.on_handoff(0.03)
    assert cost.threshold_tokens() == 0


def test_the_alarm_is_raised_for_a_share_of_the_window() -> None:
    alarm = DecodeOnlyAlarm(60.0, 0.5)
    assert not alarm.rings(0.0)
    for at_s in range(10):
        alarm.note(at_s, None if at_s % 2 else "prefill is down")
    assert alarm.rings(10.0)
    assert alarm.share(10.0) == 0.5
    assert alarm.last_reason == "prefill is down"
    alarm.note(11.0, None)
    assert not alarm.rings(11.0)
    for later_s in (12.0, 13.0):
        alarm.note(later_s, "x")
    assert alarm.rings(13.0)
    assert not alarm.rings(80.0)  # the window has passed
    assert alarm.share(80.0) == 0.0
