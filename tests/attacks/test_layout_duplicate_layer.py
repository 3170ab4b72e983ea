"""A layer that occurs twice, so that it is unclear which one is right."""

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


def test_a_layer_advertised_twice_by_one_rank_is_refused() -> None:  # R19
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["layer"][2:] = raw["layer"][:2]
    with pytest.raises(MalformedMessage, match=r"'layers\.0\.attn' part 'k' is advertised twice by rank 0"):
        decode_layout(hostile(layer=raw["layer"]))


def test_an_axis_named_twice_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["forms"][0]["axes"][1]["name"] = "head"
    with pytest.raises(MalformedMessage, match="names an axis twice"):
        decode_layout(hostile(forms=raw["forms"]))
