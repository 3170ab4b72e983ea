"""A tensor that reaches beyond its region would let a peer read or overwrite the memory after it."""

import msgspec
import pytest

from kvferry.errors import MalformedMessage
from kvferry.wire.layout_codec import decode_layout, encode_layout
from tests.layout.samples import attention


def hostile(**changes: object) -> bytes:
    """Returns the bytes of a valid layout with some fields replaced."""
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw.update(changes)
    return msgspec.msgpack.encode(raw)


def test_a_tensor_that_ends_after_its_region_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["regions"][1]["num_bytes"] -= 1
    with pytest.raises(MalformedMessage, match=r"layers\.1\.attn.*ends at byte 1024 of region 1, which has 1023 bytes"):
        decode_layout(hostile(regions=raw["regions"]))


def test_an_offset_beyond_the_region_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["offset"][0] = 1 << 40
    with pytest.raises(MalformedMessage, match="ends at byte"):
        decode_layout(hostile(offset=raw["offset"]))


def test_one_block_more_than_fits_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["forms"][0]["num_blocks"] += 1
    with pytest.raises(MalformedMessage, match="ends at byte"):
        decode_layout(hostile(forms=raw["forms"]))
