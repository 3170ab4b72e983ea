"""A layout of a version that we do not know is refused by its number, never by a decoder error."""

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


def test_a_newer_version_is_named() -> None:  # R8
    with pytest.raises(MalformedMessage, match="format version 2; this kvferry reads version 1"):
        decode_layout(hostile(version=2, regions="these have changed"))


def test_a_newer_peer_may_add_fields() -> None:
    assert decode_layout(hostile(colour="blue")) == attention()


@pytest.mark.parametrize("body", [b"", b"\xc0", b"\x80", b"\xff" * 8, b"\xa3abc"])
def test_bytes_that_are_no_layout_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessage, match="layout"):
        decode_layout(body)
