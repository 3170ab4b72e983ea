"""Counts and sizes that would fill memory if anything were allocated before they are checked."""

import msgspec
import pytest

from kvferry.errors import MalformedMessage
from kvferry.layout.limits import MAX_AXES, MAX_NAME, MAX_TENSORS
from kvferry.wire.layout_codec import MAX_LAYOUT_BYTES, decode_layout, encode_layout
from tests.layout.samples import attention


def hostile(**changes: object) -> bytes:
    """Returns the bytes of a valid layout with some fields replaced."""
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw.update(changes)
    return msgspec.msgpack.encode(raw)


def test_a_message_that_is_too_long_is_not_even_read() -> None:
    with pytest.raises(MalformedMessage, match=f"at most {MAX_LAYOUT_BYTES}"):
        decode_layout(bytes(MAX_LAYOUT_BYTES + 1))


def test_a_claimed_length_allocates_nothing() -> None:
    body = bytearray(hostile())
    at = body.index(b"\xa6offset") + 7
    with pytest.raises(MalformedMessage):
        decode_layout(bytes(body[:at]) + b"\xdd\xff\xff\xff\xff")


def test_too_many_tensors_are_refused() -> None:
    many = MAX_TENSORS + 1
    with pytest.raises(MalformedMessage, match=r"length <= 16384"):
        decode_layout(hostile(layer=["a"] * many, form=[0] * many, region=[0] * many, offset=[0] * many))


def test_too_many_axes_are_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["forms"][0]["axes"] *= MAX_AXES
    with pytest.raises(MalformedMessage, match=r"length <= 8"):
        decode_layout(hostile(forms=raw["forms"]))


def test_a_name_that_is_too_long_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["layer"][0] = "x" * (MAX_NAME + 1)
    with pytest.raises(MalformedMessage, match=r"length <= 256"):
        decode_layout(hostile(layer=raw["layer"]))


def test_a_name_that_would_forge_log_lines_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["layer"][0] = "x\nERROR all is lost"
    with pytest.raises(MalformedMessage, match="printable"):
        decode_layout(hostile(layer=raw["layer"]))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        decode_layout(b"\x91" * 100_000)
