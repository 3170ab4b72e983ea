"""Layouts as bytes: golden bytes, round trips, files."""

from pathlib import Path

import msgspec
import pytest

from kvferry.errors import ConfigError, MalformedMessage
from kvferry.layout.builders import LayoutBuilder, Pool
from kvferry.layout.description import (
    Axis,
    CacheGroup,
    CacheKind,
    CacheLayout,
    MemoryKind,
    Paging,
    Rank,
    Region,
    Tensor,
)
from kvferry.wire.layout_codec import (
    decode_layout,
    decode_layout_json,
    encode_layout,
    encode_layout_json,
    load_layouts,
    save_layouts,
)
from tests.layout.samples import attention
from tests.layout.worlds import random_case

PLAIN = CacheLayout(
    Rank(1, 1, 2),
    (Region(4096, 64, MemoryKind.VRAM, 3),),
    (CacheGroup(CacheKind.FULL, 2),),
    (Tensor("layers.0.attn", "latent", "bf16", 2, 0, 0, 0, Paging(4, 16, 8), (Axis("dim", 4, 0, 4, 2),)),),
)
MIXED = CacheLayout(
    Rank(0, 0, 1, 1, 2, 1, 2, 4),
    (Region(4096, 256), Region(8192, 64)),
    (CacheGroup(CacheKind.WINDOW, 2, 6), CacheGroup(CacheKind.STATE, 0)),
    (
        Tensor("layers.1.attn", "kv", "tiles", 32, 0, 0, 0, Paging(8, 32, None), ()),
        Tensor("layers.2.mamba", "ssm", "f32", 4, 1, 1, 0, Paging(2, 32, None), (Axis("head", 4, 2, 4, 16, True),)),
    ),
)

# Bytes that version 1 wrote. Never edit a line here: add one, with a new version.
GOLDEN: dict[str, tuple[str, CacheLayout]] = {
    "v1-plain": (
        "89a776657273696f6e01a472616e6b88a5696e64657801a774705f72616e6b01a774705f73697a6502a770705f72616e6b00"
        "a770705f73697a6501a763705f72616e6b00a763705f73697a6501ad63705f72756e5f746f6b656e7301a7726567696f6e73"
        "9184a761646472657373cd1000a96e756d5f627974657340a46b696e64a47672616da664657669636503a667726f75707391"
        "83a46b696e64a466756c6cac626c6f636b5f746f6b656e7302ad77696e646f775f746f6b656e73c0a5666f726d739188a470"
        "617274a66c6174656e74a8656e636f64696e67a462663136ad656c656d656e745f627974657302a567726f757000aa6e756d"
        "5f626c6f636b7304b2626c6f636b5f7374726964655f627974657310b2746f6b656e5f7374726964655f627974657308a461"
        "7865739186a46e616d65a364696da6657874656e7404a5737461727400a473746f7004ac7374726964655f627974657302a6"
        "61746f6d6963c2a56c6179657291ad6c61796572732e302e6174746ea4666f726d9100a6726567696f6e9100a66f66667365"
        "749100",
        PLAIN,
    ),
    "v1-mixed": (
        "89a776657273696f6e01a472616e6b88a5696e64657800a774705f72616e6b00a774705f73697a6501a770705f72616e6b01"
        "a770705f73697a6502a763705f72616e6b01a763705f73697a6502ad63705f72756e5f746f6b656e7304a7726567696f6e73"
        "9284a761646472657373cd1000a96e756d5f6279746573cd0100a46b696e64a46472616da66465766963650084a761646472"
        "657373cd2000a96e756d5f627974657340a46b696e64a46472616da664657669636500a667726f7570739283a46b696e64a6"
        "77696e646f77ac626c6f636b5f746f6b656e7302ad77696e646f775f746f6b656e730683a46b696e64a57374617465ac626c"
        "6f636b5f746f6b656e7300ad77696e646f775f746f6b656e73c0a5666f726d739288a470617274a26b76a8656e636f64696e"
        "67a574696c6573ad656c656d656e745f627974657320a567726f757000aa6e756d5f626c6f636b7308b2626c6f636b5f7374"
        "726964655f627974657320b2746f6b656e5f7374726964655f6279746573c0a4617865739088a470617274a373736da8656e"
        "636f64696e67a3663332ad656c656d656e745f627974657304a567726f757001aa6e756d5f626c6f636b7302b2626c6f636b"
        "5f7374726964655f627974657320b2746f6b656e5f7374726964655f6279746573c0a4617865739186a46e616d65a4686561"
        "64a6657874656e7404a5737461727402a473746f7004ac7374726964655f627974657310a661746f6d6963c3a56c61796572"
        "92ad6c61796572732e312e6174746eae6c61796572732e322e6d616d6261a4666f726d920001a6726567696f6e920001a66f"
        "6666736574920000",
        MIXED,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_are_read_for_ever(name: str) -> None:
    body, layout = GOLDEN[name]
    assert decode_layout(bytes.fromhex(body)) == layout


@pytest.mark.parametrize("name", GOLDEN)
def test_this_version_writes_its_golden_bytes(name: str) -> None:
    body, layout = GOLDEN[name]
    assert encode_layout(layout).hex() == body


@pytest.mark.parametrize("seed", range(40))
def test_every_layout_survives_both_encodings(seed: int) -> None:
    case = random_case(f"codec.{seed}")
    for layout in (*case.prefill.ranks, case.reader):
        assert decode_layout(encode_layout(layout)) == layout
        assert decode_layout_json(encode_layout_json(layout)) == layout


def test_the_layers_that_share_a_region_are_in_the_message() -> None:  # R18
    raw = msgspec.msgpack.decode(encode_layout(attention(layers=2)))
    assert list(zip(raw["region"], raw["layer"], strict=True)) == [
        (0, "layers.0.attn"),
        (0, "layers.0.attn"),
        (1, "layers.1.attn"),
        (1, "layers.1.attn"),
    ]


def test_eighty_layers_take_a_few_kilobytes() -> None:
    assert len(encode_layout(attention(layers=80))) < 8000


@pytest.mark.parametrize("name", ["a.json", "a.kvl"])
def test_a_file_holds_all_ranks(tmp_path: Path, name: str) -> None:
    ranks = (attention(tp_rank=0, tp_size=2), attention(tp_rank=1, tp_size=2))
    save_layouts(tmp_path / name, ranks)
    assert load_layouts(tmp_path / name) == ranks


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the layout file"):
        load_layouts(tmp_path / "none.json")


@pytest.mark.parametrize("name", ["a.json", "a.kvl"])
@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b"\x80", b'{"kvferry_layouts": []}', b"\xff\xfe"])
def test_another_kind_of_file_is_refused(tmp_path: Path, name: str, body: bytes) -> None:
    (tmp_path / name).write_bytes(body)
    with pytest.raises(MalformedMessage, match="layout file"):
        load_layouts(tmp_path / name)


def test_a_builder_makes_no_layout_that_the_checks_refuse() -> None:
    builder = LayoutBuilder()
    group = builder.full(4)
    builder.opaque("layers.0.attn", group, block_bytes=65, encoding="tiles", pool=Pool(0, 0, 8, 64))
    builder.pool(8, 64)
    with pytest.raises(MalformedMessage, match=r"overlaps itself|ends at byte"):
        builder.build()
