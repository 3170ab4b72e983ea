"""Two layers in the same bytes: what is written for one would change the other unnoticed."""

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


def test_two_layers_on_overlapping_bytes_are_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["region"] = [0, 0, 0, 0]
    raw["offset"] = [0, 64, 32, 64]
    with pytest.raises(MalformedMessage, match=r"overlap in region 0"):
        decode_layout(hostile(region=raw["region"], offset=raw["offset"]))


@pytest.mark.parametrize("offset", [0, 4, 60])
def test_v_over_k_is_refused(offset: int) -> None:
    with pytest.raises(MalformedMessage, match=r"layers\.0\.attn.*overlap in region 0"):
        decode_layout(hostile(offset=[0, offset, 0, 64]))


@pytest.mark.parametrize("field", ["block_stride_bytes", "token_stride_bytes"])
def test_a_tensor_that_overlaps_itself_is_refused(field: str) -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["forms"][0][field] = 2
    with pytest.raises(MalformedMessage, match="overlaps itself"):
        decode_layout(hostile(forms=raw["forms"]))


def test_a_stride_of_zero_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["forms"][0]["axes"][0]["stride_bytes"] = 0
    with pytest.raises(MalformedMessage, match="stride_bytes is 0"):
        decode_layout(hostile(forms=raw["forms"]))


def test_overlapping_regions_are_refused() -> None:  # R21
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["regions"][1]["address"] = raw["regions"][0]["address"] + 8
    with pytest.raises(MalformedMessage, match="regions 0 and 1 overlap"):
        decode_layout(hostile(regions=raw["regions"]))
