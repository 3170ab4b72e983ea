"""Groups whose kind and numbers contradict each other."""

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
    ("group", "says"),
    [
        ({"kind": "state", "block_tokens": 4}, "state group block_tokens is 4"),
        ({"kind": "full", "block_tokens": 0}, "group block_tokens is 0"),
        ({"kind": "window", "block_tokens": 4}, "window_tokens None"),
        ({"kind": "window", "block_tokens": 4, "window_tokens": 0}, "window_tokens is 0"),
        ({"kind": "full", "block_tokens": 1 << 21}, "group block_tokens is 2097152"),
        ({"kind": "state", "block_tokens": 0}, "in a state group and has a token stride"),
        ({"kind": "shared", "block_tokens": 4}, "Invalid enum value 'shared'"),
    ],
)
def test_a_contradictory_group_is_refused(group: dict[str, object], says: str) -> None:
    with pytest.raises(MalformedMessage, match=says):
        decode_layout(hostile(groups=[group]))
