"""Hand-off messages that no correct peer sends: refused while decoding, or harmless to the machines."""

import random
import tracemalloc
from typing import Any

import msgspec
import pytest

from kvferry.errors import MalformedMessage
from kvferry.handoff.actions import MachineLimits
from kvferry.settings import TransferMode
from kvferry.wire.handoff_messages import (
    MAX_MESSAGE_BYTES,
    Claim,
    Confirm,
    Drop,
    Fragment,
    Message,
    Ready,
    Reassembly,
    Register,
    Renew,
    RenewAck,
    Revoke,
    Stopped,
    WireTable,
    Wrote,
    decode_message,
    encode_message,
)
from tests.harness.handoff_pair import Pair

CLAIM = {"type": "claim", "to": "i", "transfer": "t", "ranks": 1, "start": 0, "stop": 4, "seq": 1}
READY = {"type": "ready", "to": "i", "transfer": "t", "tables": [[0, 0, [1]]], "start": 0, "stop": 4}
READY |= {"final": True, "ttl_s": 1.0}
WROTE = {"type": "wrote", "to": "i", "transfer": "t", "part": 0}


@pytest.mark.parametrize(
    "raw",
    [
        CLAIM | {"ranks": 0},
        CLAIM | {"ranks": 5000},
        CLAIM | {"start": -1},
        CLAIM | {"start": 5},
        CLAIM | {"stop": 1 << 50},
        CLAIM | {"seq": -1},
        CLAIM | {"transfer": ""},
        CLAIM | {"transfer": "x" * 161},
        CLAIM | {"to": 7},
        CLAIM | {"type": "nonsense"},
        READY | {"tables": [[0, 0, [-1]]]},
        READY | {"tables": [[0, 0, [1 << 31]]]},
        READY | {"tables": [[64, 0, [1]]]},
        READY | {"tables": [[0, -1, [1]]]},
        READY | {"tables": [[0, 0, [1]], [0, 0, [2]]]},
        READY | {"tables": [[n % 64, 0, []] for n in range(65)]},
        READY | {"ttl_s": 0.0},
        READY | {"ttl_s": float("nan")},
        READY | {"ttl_s": float("inf")},
        READY | {"ttl_s": 1e9},
        READY | {"note": b"x" * 4097},
        READY | {"digest": b"x" * (1 << 20)},
        READY | {"final": 1},
        WROTE | {"part": 2, "parts": 2},
        WROTE | {"start": 2, "stop": 1},
        WROTE | {"num_bytes": -1},
        {"type": "renew", "to": "i", "seq": 1, "from_decode": True, "transfers": ["t"] * 257},
        {"type": "renewed", "to": "i", "seq": 1, "to_decode": True, "ended": [""]},
        {"type": "fail", "to": "i", "transfer": "t", "reason": "x" * 501, "quiet": True},
        {"type": "part", "to": "i", "index": 2, "count": 2, "body": b""},
        {"type": "part", "to": "i", "index": 0, "count": 1, "body": b""},
        [],
        7,
        None,
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(raw: Any) -> None:
    with pytest.raises(MalformedMessage, match=r"^hand-off message: "):
        decode_message(msgspec.msgpack.encode(raw))


def test_random_bytes_are_refused_or_decoded_and_nothing_else() -> None:
    rng = random.Random(7)
    good = [msgspec.msgpack.encode(raw) for raw in (CLAIM, READY, WROTE)]
    for _ in range(20_000):
        body = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            decode_message(bytes(body))
        except MalformedMessage:
            continue


@pytest.mark.parametrize(
    "body", [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_claimed_sizes_and_depths_allocate_nothing(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            decode_message(body)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_message_that_is_too_long_is_not_read() -> None:
    with pytest.raises(MalformedMessage, match="at most"):
        decode_message(b"\x80" * (MAX_MESSAGE_BYTES + 1))


def test_fragments_without_end_are_bounded() -> None:
    reassembly = Reassembly()
    body = b"x" * 60_000
    fits = MAX_MESSAGE_BYTES // len(body)
    for index in range(fits):
        reassembly.add(Fragment(to="i", index=index, count=4096, body=body))
    with pytest.raises(MalformedMessage, match="bytes so far"):
        reassembly.add(Fragment(to="i", index=fits, count=4096, body=body))
    assert reassembly.add(Fragment(to="i", index=0, count=2, body=b"x")) is None


def test_a_fragment_of_a_fragment_is_refused() -> None:
    inner = encode_message(Fragment(to="i", index=0, count=2, body=b"x"))
    reassembly = Reassembly()
    reassembly.add(Fragment(to="i", index=0, count=2, body=inner[:5]))
    with pytest.raises(MalformedMessage, match="a fragment of a fragment"):
        reassembly.add(Fragment(to="i", index=1, count=2, body=inner[5:]))


# What is well-formed, and still wrong.


def _peer_of(pair: Pair, side: str) -> tuple[Any, Any, Any]:
    """Yields (attacker's name, our Peer record as the attacker addresses us, our rank)."""
    ours = (pair.prefill if side == "prefill" else pair.decode)[0]
    theirs = (pair.decode if side == "prefill" else pair.prefill)[0]
    return theirs.name, next(iter(theirs.core._peers.values())), ours


def test_unknown_transfers_are_bounded() -> None:
    """A peer cannot fill our memory with claims for requests that we don't have."""
    pair = Pair(TransferMode.PULL, limits=MachineLimits(max_open=10, max_ended=10))
    attacker, us, prefill = _peer_of(pair, "prefill")
    for number in range(1000):
        pair.hand(attacker, us, Claim(to=us.incarnation, transfer=f"x{number}", ranks=1, start=0, stop=4, seq=1))
    assert len(prefill.core.prefill._grants) == 10
    pair.wires.clear()
    pair.step(200.0, deliver=False)
    assert not prefill.core.prefill._grants
    assert len(prefill.core.prefill._ended) <= 10


def test_a_rank_beyond_the_stated_number_of_ranks_is_refused() -> None:
    pair = Pair(TransferMode.PULL, decode_ranks=2)
    pair.offer("t")
    sender = pair.decode[1].name
    us = next(iter(pair.decode[1].core._peers.values()))
    pair.hand(sender, us, Claim(to=us.incarnation, transfer="t", ranks=1, start=0, stop=4, seq=1))
    assert [type(message).__name__ for _, _, message in pair.wires] == ["Fail"]


@pytest.mark.parametrize("kind", [Confirm, Drop, Revoke])
def test_no_engine_ends_the_handoff_of_another(kind: type[Any]) -> None:
    """Another engine that knows the transfer id cannot free blocks that are being read."""
    pair = Pair(TransferMode.PULL)
    pair.want("t")
    pair.offer("t")
    pair.deliver()
    (prefill,) = pair.prefill
    prefill.core.peer_accepted("mallory", "m1", 1, pair.now_s)  # type: ignore[arg-type]
    fields = {"reason": "x"} if kind is not Confirm else {}
    prefill.core.message("mallory/m1/0", kind(to="p1", transfer="t", ranks=1, **fields), pair.now_s)  # type: ignore[arg-type]
    pair.act()
    assert not prefill.report.released
    pair.finish_all()
    assert prefill.report.taken == {"t"}


def test_an_unknown_peer_changes_nothing() -> None:
    pair = Pair(TransferMode.PULL)
    pair.offer("t")
    (prefill,) = pair.prefill
    for message in (
        Confirm(to="p1", transfer="t", ranks=1),
        Renew(to="p1", seq=1, from_decode=True, transfers=("t",)),
        Claim(to="p1", transfer="t", ranks=1, start=0, stop=4, seq=1),
    ):
        prefill.core.message("nobody/n1/0", message, pair.now_s)  # type: ignore[arg-type]
    pair.act()
    assert prefill.core.num_stale == 3
    assert not pair.wires
    assert not prefill.report.released


def _lies() -> list[tuple[str, Message]]:
    table = (WireTable(0, 0, (1 << 30,)),)
    return [
        ("decode", Ready(to="d1", transfer="t", tables=table, start=3, stop=4, final=True, ttl_s=1.0)),
        ("decode", Ready(to="d1", transfer="t", tables=(), start=0, stop=1 << 39, final=True, ttl_s=1.0, ack=1 << 60)),
        ("decode", Wrote(to="d1", transfer="t", part=1 << 39, parts=0, start=0, stop=1 << 39)),
        ("decode", Wrote(to="d1", transfer="t", part=0, parts=1 << 39)),
        ("decode", Stopped(to="d1", transfer="t")),
        ("decode", RenewAck(to="d1", seq=1 << 60, to_decode=True)),
        ("decode", RenewAck(to="d1", seq=1, to_decode=False, ended=("t",))),
        ("prefill", Register(to="p1", transfer="t", ranks=1, start=0, stop=1 << 39, tables=table, ttl_s=1e-9)),
        ("prefill", Register(to="p1", transfer="t", ranks=4096, start=0, stop=4, tables=(), ttl_s=86400.0)),
        ("prefill", Renew(to="p1", seq=0, from_decode=False, transfers=("t", "t", "t"))),
        ("prefill", Revoke(to="p1", transfer="t", ranks=2, reason="")),
    ]


@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("lie", range(len(_lies())))
def test_false_messages_raise_nothing_and_end_by_the_deadline(mode: TransferMode, lie: int) -> None:
    """Whatever a peer sends, no machine raises, and everything ends within the stated time."""
    side, message = _lies()[lie]
    pair = Pair(mode)
    pair.want("t")
    pair.deliver()
    attacker, us, _ = _peer_of(pair, side)
    pair.hand(attacker, us, message)
    pair.offer("t")
    pair.hand(attacker, us, message)
    for _ in range(4):
        for rank in (*pair.prefill, *pair.decode):
            while rank.posts:
                pair.finish(rank, error="no such block")
        pair.step(35.0)
    for rank in (*pair.prefill, *pair.decode):
        assert rank.core.idle
        assert rank.core.next_deadline_s() is None
    assert pair.prefill[0].report.released == {"t"}
    (decode,) = pair.decode
    assert len(decode.report.landed) + len(decode.report.failed) == 1
