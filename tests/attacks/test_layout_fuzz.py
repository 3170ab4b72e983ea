"""Random damage to a layout's bytes: what still decodes is safe to pair and plan; the rest is refused with a reason."""

from collections.abc import Callable

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.builders import LayoutBuilder, head_range, mamba2_parts
from kvferry.layout.description import CacheLayout
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan
from kvferry.wire.layout_codec import decode_layout, decode_layout_json, encode_layout, encode_layout_json
from tests.harness.hypothesis_profile import examples


def sample() -> CacheLayout:
    builder = LayoutBuilder()
    full, window, states = builder.full(4), builder.window(2, 6), builder.states()
    for name, group in (("layers.0.attn", full), ("layers.1.attn", window)):
        builder.attention(
            name, group, heads=head_range(4, 0, 1), head_dim=2, element_bytes=2, encoding="bf16", num_blocks=8
        )
    parts = mamba2_parts(heads=4, head_dim=2, groups=2, state=2, conv_width=3)
    builder.state("layers.2.mamba", states, parts, num_blocks=4)
    builder.opaque("layers.3.attn", full, block_bytes=24, encoding="tiles", num_blocks=8)
    return builder.build()


SAMPLE = sample()
TABLES = [BlockTable(0, 0, [1, 3]), BlockTable(1, 2, [0, 2, 4]), BlockTable(2, 8, [3])]
NUMBERS = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([63, 64, 127, 128, 255, 1 << 16, 1 << 20, 1 << 31, 1 << 32, (1 << 48) + 1, (1 << 63) - 1, 1 << 63]),
)
VALUES = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=4), st.floats(), st.lists(NUMBERS, max_size=3))


def use(body: bytes, decode: Callable[[bytes], CacheLayout]) -> None:
    """Checks that what the decoder accepts is safe to use, as a source and as a destination."""
    try:
        layout = decode(body)
    except MalformedMessage:
        return
    for source, destination in ((layout, SAMPLE), (SAMPLE, layout)):
        try:
            for edge in pair([source], destination).edges:
                for runs in plan(edge, TABLES, TABLES, TokenRange(0, 8)):
                    for start, length, region in (
                        (runs.source, runs.length, source.regions[runs.source_region]),
                        (runs.destination, runs.length, destination.regions[runs.destination_region]),
                    ):
                        assert start.min() >= 0
                        assert (start + length).max() <= region.num_bytes
        except (IncompatiblePeer, MalformedMessage):
            continue


@settings(max_examples=examples(250), suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_bytes_are_refused_or_safe(data: st.DataObject) -> None:
    json = data.draw(st.booleans())
    body = bytearray(encode_layout_json(SAMPLE) if json else encode_layout(SAMPLE))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(body) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "double"])):
            case "flip" if body:
                body[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del body[at : at + data.draw(st.integers(1, 40))]
            case "insert":
                body[at:at] = data.draw(st.binary(min_size=1, max_size=9))
            case _:
                body[at:at] = body[at : at + 30]
    use(bytes(body), decode_layout_json if json else decode_layout)


@settings(max_examples=examples(350), suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_wrong_values_in_a_valid_shape_are_refused_or_safe(data: st.DataObject) -> None:
    raw = msgspec.msgpack.decode(encode_layout(SAMPLE))
    for _ in range(data.draw(st.integers(1, 3))):
        node: object = raw
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            child = node[key]  # type: ignore[index]
            if not isinstance(child, dict | list) or not child or data.draw(st.integers(0, 9)) == 0:
                node[key] = data.draw(VALUES)  # type: ignore[index]
                break
            node = child
    try:
        body = msgspec.msgpack.encode(raw)
    except (OverflowError, UnicodeEncodeError):
        return
    use(body, decode_layout)
