"""Hand-off messages: golden bytes, round trips, newer peers, fragments, and what is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable
from kvferry.wire.handoff_messages import (
    MAX_FRAME_BYTES,
    MAX_RENEWED,
    Claim,
    Confirm,
    Drop,
    Fail,
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
    frames,
    from_wire,
    to_wire,
    with_size,
)
from kvferry.wire.prompt_digest import StatedPrompt

PROMPT = StatedPrompt(65, ((65, bytes(range(16))), (40, bytes(16))), 64, bytes(range(16, 32)))

# Bytes that versions 1 and 3 wrote. Never edit a line here: add one, with a new version.
GOLDEN = [
    (
        "87a474797065a5636c61696da2746fa169a87472616e73666572a174a572616e6b7302a5737461727410a473746f70cc80a373657107",
        Claim(to="i", transfer="t", ranks=2, start=16, stop=128, seq=7),
    ),
    (
        "88a474797065a87265676973746572a2746fa169a87472616e73666572a174a572616e6b7301a5737461727400a473746f7020a67461"
        "626c65739293000092040593011091cd012ca574746c5f73cb403e000000000000",
        Register(
            to="i",
            transfer="t",
            ranks=1,
            start=0,
            stop=32,
            tables=(WireTable(0, 0, (4, 5)), WireTable(1, 16, (300,))),
            ttl_s=30.0,
        ),
    ),
    (
        "84a474797065a7636f6e6669726da2746fa169a87472616e73666572a174a572616e6b7301",
        Confirm(to="i", transfer="t", ranks=1),
    ),
    (
        "85a474797065a464726f70a2746fa169a87472616e73666572a174a572616e6b7301a6726561736f6ea4676f6e65",
        Drop(to="i", transfer="t", ranks=1, reason="gone"),
    ),
    (
        "85a474797065a67265766f6b65a2746fa169a87472616e73666572a174a572616e6b7301a6726561736f6ea4676f6e65",
        Revoke(to="i", transfer="t", ranks=1, reason="gone"),
    ),
    (
        "8ba474797065a57265616479a2746fa169a87472616e73666572a174a67461626c657391930000920405a5737461727400a473746f70"
        "14a566696e616cc3a574746c5f73cb403e000000000000a361636b07a6646967657374c4025301a46e6f7465c4016e",
        Ready(
            to="i",
            transfer="t",
            tables=(WireTable(0, 0, (4, 5)),),
            start=0,
            stop=20,
            final=True,
            ttl_s=30.0,
            ack=7,
            digest=b"S\x01",
            note=b"n",
        ),
    ),
    (
        "8aa474797065a577726f7465a2746fa169a87472616e73666572a174a47061727401a5706172747302a473746f7014a96e756d5f6279"
        "746573cd1000a86e756d5f72756e7302a6646967657374c4025301a46e6f7465c4016e",
        Wrote(
            to="i",
            transfer="t",
            part=1,
            parts=2,
            start=0,
            stop=20,
            num_bytes=4096,
            num_runs=2,
            digest=b"S\x01",
            note=b"n",
        ),
    ),
    (
        "86a474797065a577726f7465a2746fa169a87472616e73666572a174a47061727400a5706172747301a46f776573c2",
        Wrote(to="i", transfer="t", part=0, parts=1, owes=False),
    ),
    (
        "85a474797065a46661696ca2746fa169a87472616e73666572a174a6726561736f6ea977697468647261776ea57175696574c3",
        Fail(to="i", transfer="t", reason="withdrawn", quiet=True),
    ),
    ("83a474797065a773746f70706564a2746fa169a87472616e73666572a174", Stopped(to="i", transfer="t")),
    (
        "85a474797065a572656e6577a2746fa169a373657109ab66726f6d5f6465636f6465c3a97472616e736665727392a174a175",
        Renew(to="i", seq=9, from_decode=True, transfers=("t", "u")),
    ),
    (
        "85a474797065a772656e65776564a2746fa169a373657109a9746f5f6465636f6465c3a5656e64656491a175",
        RenewAck(to="i", seq=9, to_decode=True, ended=("u",)),
    ),
    (
        "87a474797065a572656e6577a2746fa169a373657100ab66726f6d5f6465636f6465c2a97472616e736665727390"
        "a962656c6c5f706f727407a462656c6cc4026162",
        Renew(to="i", seq=0, from_decode=False, transfers=(), bell_port=7, bell=b"ab"),
    ),
    (
        "86a474797065a772656e65776564a2746fa169a373657100a9746f5f6465636f6465c3a962656c6c5f706f7274cdffff"
        "a462656c6cc4026162",
        RenewAck(to="i", seq=0, to_decode=True, bell_port=65535, bell=b"ab"),
    ),
    (
        "85a474797065a470617274a2746fa169a5696e64657800a5636f756e7402a4626f6479c4027879",
        Fragment(to="i", index=0, count=2, body=b"xy"),
    ),
    # Version 4.
    (
        "88a474797065a5636c61696da2746fa169a87472616e73666572a174a572616e6b7302a5737461727410a473746f70cc80a3736571"
        "07a670726f6d70749441929241c410000102030405060708090a0b0c0d0e0f9228c4100000000000000000000000000000000040c4"
        "10101112131415161718191a1b1c1d1e1f",
        Claim(to="i", transfer="t", ranks=2, start=16, stop=128, seq=7, prompt=PROMPT),
    ),
    (
        "89a474797065a87265676973746572a2746fa169a87472616e73666572a174a572616e6b7301a5737461727400a473746f7020a674"
        "61626c657391930000920405a574746c5f73cb403e000000000000a670726f6d70749441929241c410000102030405060708090a0b"
        "0c0d0e0f9228c4100000000000000000000000000000000040c410101112131415161718191a1b1c1d1e1f",
        Register(
            to="i",
            transfer="t",
            ranks=1,
            start=0,
            stop=32,
            tables=(WireTable(0, 0, (4, 5)),),
            ttl_s=30.0,
            prompt=PROMPT,
        ),
    ),
    (
        "8aa474797065a57265616479a2746fa169a87472616e73666572a174a67461626c657391930000920405a5737461727400a473746f"
        "7014a566696e616cc3a574746c5f73cb403e000000000000ab73616d655f746f6b656e7314ab73616d655f70726f6d7074c3",
        Ready(
            to="i",
            transfer="t",
            tables=(WireTable(0, 0, (4, 5)),),
            start=0,
            stop=20,
            final=True,
            ttl_s=30.0,
            same_tokens=20,
            same_prompt=True,
        ),
    ),
    (
        "88a474797065a577726f7465a2746fa169a87472616e73666572a174a47061727401a5706172747302a473746f7014ab73616d655f"
        "746f6b656e7314ab73616d655f70726f6d7074c3",
        Wrote(to="i", transfer="t", part=1, parts=2, start=0, stop=20, same_tokens=20, same_prompt=True),
    ),
]


@pytest.mark.parametrize(("golden", "message"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes(golden: str, message: Message) -> None:
    assert encode_message(message).hex() == golden
    assert decode_message(bytes.fromhex(golden)) == message


def test_a_message_without_a_prompt_is_what_version_3_wrote() -> None:  # R51
    claim = Claim(to="i", transfer="t", ranks=2, start=16, stop=128, seq=7, prompt=None)
    assert encode_message(claim).hex() == GOLDEN[0][0]


def test_version_3_skips_what_version_4_says() -> None:  # R9 R11
    fields = msgspec.msgpack.decode(bytes.fromhex(GOLDEN[-4][0]))
    assert fields.pop("prompt")
    assert msgspec.msgpack.encode(fields).hex() == GOLDEN[0][0]


def test_every_message_has_golden_bytes() -> None:
    assert {type(message) for _, message in GOLDEN} == {*Message.__args__, Fragment}


def test_a_newer_peer_may_add_fields() -> None:
    raw = msgspec.msgpack.decode(encode_message(Stopped(to="i", transfer="t"))) | {"colour": "blue"}
    assert decode_message(msgspec.msgpack.encode(raw)) == Stopped(to="i", transfer="t")


def test_tables_go_there_and_back() -> None:
    tables = (BlockTable(0, 0, (3, 1, 2)), BlockTable(1, 32, ()))
    assert from_wire(to_wire(tables)) == tables


def test_a_part_learns_its_size_when_it_is_planned() -> None:
    assert with_size(Wrote(to="i", transfer="t", part=0), 7, 2).num_bytes == 7


@given(st.integers(0, 200_000), st.randoms(use_true_random=False))
def test_long_messages_travel_in_frames(num_blocks: int, rng: object) -> None:
    table = WireTable(0, 0, tuple(range(0, num_blocks * 7, 7)))
    message = Ready(to="i", transfer="t", tables=(table,), start=0, stop=1, final=True, ttl_s=1.0)
    pieces = list(frames(message))
    assert all(len(piece) <= MAX_FRAME_BYTES for piece in pieces)
    whole: Message | None = None
    reassembly = Reassembly()
    for piece in pieces:
        frame = decode_message(piece)
        whole = reassembly.add(frame) if isinstance(frame, Fragment) else frame
    assert whole == message


def test_a_full_heartbeat_fits_into_one_frame() -> None:
    renew = Renew(
        to="i" * 160, seq=1 << 60, from_decode=True, transfers=tuple("x" * 150 + f"{n}" for n in range(MAX_RENEWED))
    )
    assert len(list(frames(renew))) == 1


def test_a_gap_in_fragments_drops_the_message_and_the_next_one_passes() -> None:
    message = Ready(
        to="i", transfer="t", tables=(WireTable(0, 0, tuple(range(60_000))),), start=0, stop=1, final=True, ttl_s=1.0
    )
    first, second, *rest = (decode_message(piece) for piece in frames(message))
    assert rest
    reassembly = Reassembly()
    assert isinstance(first, Fragment)
    assert reassembly.add(first) is None
    assert isinstance(rest[0], Fragment)
    with pytest.raises(MalformedMessage, match=r"^hand-off message: fragment 2 of \d+; expected fragment 1"):
        reassembly.add(rest[0])
    whole = None
    for piece in (first, second, *rest):
        assert isinstance(piece, Fragment)
        whole = reassembly.add(piece)
    assert whole == message
