"""Numbers whose products would overflow 64 bits, so that a check of the sum would pass."""

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


@pytest.mark.parametrize("value", [1 << 48 | 1, (1 << 62) + 1, (1 << 64) - 1])
@pytest.mark.parametrize("field", ["num_blocks", "block_stride_bytes", "token_stride_bytes", "element_bytes"])
def test_numbers_beyond_the_cap_are_refused(field: str, value: int) -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["forms"][0][field] = value
    with pytest.raises(MalformedMessage, match=field):
        decode_layout(hostile(forms=raw["forms"]))


def test_products_beyond_64_bits_are_computed_exactly() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["forms"][0] |= {"num_blocks": 1 << 48, "block_stride_bytes": 1 << 48}
    with pytest.raises(MalformedMessage, match=r"ends at byte 7922816251426\d+"):
        decode_layout(hostile(forms=raw["forms"]))


def test_an_address_at_the_end_of_memory_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["regions"][0]["address"] = (1 << 63) - 1
    with pytest.raises(MalformedMessage, match="region address"):
        decode_layout(hostile(regions=raw["regions"]))
