"""Columns of one table with unequal lengths: rows would be paired wrongly."""

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


@pytest.mark.parametrize("column", ["layer", "form", "region", "offset"])
def test_a_column_that_is_one_short_is_refused(column: str) -> None:  # R20
    raw = msgspec.msgpack.decode(encode_layout(attention()))
    with pytest.raises(MalformedMessage, match=rf"unequal lengths.*'{column}': 3"):
        decode_layout(hostile(**{column: raw[column][:-1]}))
