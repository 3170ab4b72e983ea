"""Indices that point outside their tables."""

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


@pytest.mark.parametrize(
    ("column", "says"), [("form", "form 2 is named"), ("region", "region is 2; it must be between 0 and 1")]
)
def test_an_index_beyond_its_table_is_refused(column: str, says: str) -> None:
    with pytest.raises(MalformedMessage, match=says):
        decode_layout(hostile(**{column: [2, 2, 2, 2]}))


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"region\[0\]|>= 0"):
        decode_layout(hostile(region=[-1, 0, 1, 1]))


def test_a_group_beyond_its_table_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["forms"][0]["group"] = 1
    with pytest.raises(MalformedMessage, match="group is 1; it must be between 0 and 0"):
        decode_layout(hostile(forms=raw["forms"]))


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (3, 2), (0, 5), (4, 5)])
def test_an_axis_range_outside_its_extent_is_refused(start: int, stop: int) -> None:
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    raw["forms"][0]["axes"][0] |= {"start": start, "stop": stop}
    with pytest.raises(MalformedMessage, match=r"axis 'head' holds \["):
        decode_layout(hostile(forms=raw["forms"]))


def test_a_rank_outside_its_size_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="rank tp_rank is 4; it must be between 0 and 3"):
        decode_layout(hostile(rank={"tp_rank": 4, "tp_size": 4}))
