"""Encodes cache layouts: msgpack in the handshake, JSON or msgpack in files. docs/reference/layout.md has the format.

Tensors that differ only in layer, region and offset share a *form*, and are written as columns: a rank of 80 layers
takes about 5 KB. Everything that is decoded is hostile until the layout's own checks have passed; each fault raises
MalformedMessage with the place.

Versions of the format
  1  the first one
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from kvferry.errors import ConfigError, MalformedMessage
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
from kvferry.layout.limits import MAX_AXES, MAX_BYTES, MAX_GROUPS, MAX_NAME, MAX_RANKS, MAX_REGIONS, MAX_TENSORS

__all__ = [
    "LAYOUT_VERSION",
    "MAX_LAYOUT_BYTES",
    "WireAxis",
    "WireFile",
    "WireForm",
    "WireGroup",
    "WireLayout",
    "WireRank",
    "WireRegion",
    "decode_layout",
    "decode_layout_json",
    "encode_layout",
    "encode_layout_json",
    "load_layouts",
    "save_layouts",
]

LAYOUT_VERSION = 1
MAX_LAYOUT_BYTES = 4 << 20
"""A longer layout is refused before it is read."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_TENSORS)]
Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


class WireRegion(msgspec.Struct, frozen=True, kw_only=True):
    """A description.Region."""

    address: Address
    num_bytes: Count
    kind: MemoryKind = MemoryKind.DRAM
    device: Count = 0


class WireGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A description.CacheGroup."""

    kind: CacheKind
    block_tokens: Count
    window_tokens: Count | None = None


class WireAxis(msgspec.Struct, frozen=True, kw_only=True):
    """A description.Axis."""

    name: Name
    extent: Count
    start: Count
    stop: Count
    stride_bytes: Count
    atomic: bool = False


class WireForm(msgspec.Struct, frozen=True, kw_only=True):
    """What tensors have in common: all of description.Tensor except layer, region and offset."""

    part: Name
    encoding: Name
    element_bytes: Count
    group: Index
    num_blocks: Count
    block_stride_bytes: Count
    token_stride_bytes: Count | None = None
    axes: Annotated[tuple[WireAxis, ...], msgspec.Meta(max_length=MAX_AXES)] = ()


class WireRank(msgspec.Struct, frozen=True, kw_only=True):
    """A description.Rank."""

    index: Count = 0
    tp_rank: Count = 0
    tp_size: Count = 1
    pp_rank: Count = 0
    pp_size: Count = 1
    cp_rank: Count = 0
    cp_size: Count = 1
    cp_run_tokens: Count = 1


class WireLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's layout. The last four arrays are columns of one table and have the same length."""

    version: int
    rank: WireRank
    regions: Annotated[tuple[WireRegion, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    groups: Annotated[tuple[WireGroup, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    forms: Annotated[tuple[WireForm, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    layer: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    form: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    region: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    offset: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_TENSORS)]


class WireFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file with all ranks of one engine."""

    kvferry_layouts: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


class _Version(msgspec.Struct, frozen=True):
    version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WireLayout)
_version_decoder = msgspec.msgpack.Decoder(_Version)
_json_encoder = msgspec.json.Encoder()
_json_decoder = msgspec.json.Decoder(WireLayout)
_json_version_decoder = msgspec.json.Decoder(_Version)


def encode_layout(layout: CacheLayout) -> bytes:
    """Returns a layout as msgpack. The same layout always gives the same bytes."""
    return _encoder.encode(_to_wire(layout))


def decode_layout(body: bytes) -> CacheLayout:
    """Decodes and checks a layout. Raises MalformedMessage, and nothing else, for whatever a peer may send."""
    return _decode(body, _version_decoder.decode, _decoder.decode)


def encode_layout_json(layout: CacheLayout) -> bytes:
    """Returns a layout as one line of JSON."""
    return _json_encoder.encode(_to_wire(layout))


def decode_layout_json(body: bytes) -> CacheLayout:
    """Does the same as decode_layout, for JSON."""
    return _decode(body, _json_version_decoder.decode, _json_decoder.decode)


def save_layouts(path: Path, layouts: Sequence[CacheLayout]) -> None:
    """Writes all ranks of an engine: as JSON if the name ends in .json, else as msgpack."""
    if path.suffix == ".json":
        ranks = tuple(msgspec.Raw(encode_layout_json(layout)) for layout in layouts)
        path.write_bytes(msgspec.json.format(_json_encoder.encode(WireFile(kvferry_layouts=ranks)), indent=1) + b"\n")
    else:
        ranks = tuple(msgspec.Raw(encode_layout(layout)) for layout in layouts)
        path.write_bytes(_encoder.encode(WireFile(kvferry_layouts=ranks)))


def load_layouts(path: Path) -> tuple[CacheLayout, ...]:
    """Reads what save_layouts wrote. Raises ConfigError if there is no such file, MalformedMessage for wrong
    content."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the layout file {str(path)!r}: {error.strerror}") from error
    json = path.suffix == ".json"
    try:
        file = (msgspec.json if json else msgspec.msgpack).decode(body, type=WireFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"layout file {str(path)!r}: {error}") from error
    decode = decode_layout_json if json else decode_layout
    return tuple(decode(bytes(raw)) for raw in file.kvferry_layouts)


def _to_wire(layout: CacheLayout) -> WireLayout:
    forms: dict[WireForm, int] = {}
    column: list[int] = []
    for tensor in layout.tensors:
        form = WireForm(
            part=tensor.part,
            encoding=tensor.encoding,
            element_bytes=tensor.element_bytes,
            group=tensor.group,
            num_blocks=tensor.paging.num_blocks,
            block_stride_bytes=tensor.paging.block_stride_bytes,
            token_stride_bytes=tensor.paging.token_stride_bytes,
            axes=tuple(
                WireAxis(
                    name=axis.name,
                    extent=axis.extent,
                    start=axis.start,
                    stop=axis.stop,
                    stride_bytes=axis.stride_bytes,
                    atomic=axis.atomic,
                )
                for axis in tensor.axes
            ),
        )
        column.append(forms.setdefault(form, len(forms)))
    rank = layout.rank
    return WireLayout(
        version=LAYOUT_VERSION,
        rank=WireRank(
            index=rank.index,
            tp_rank=rank.tp_rank,
            tp_size=rank.tp_size,
            pp_rank=rank.pp_rank,
            pp_size=rank.pp_size,
            cp_rank=rank.cp_rank,
            cp_size=rank.cp_size,
            cp_run_tokens=rank.cp_run_tokens,
        ),
        regions=tuple(
            WireRegion(address=r.address, num_bytes=r.num_bytes, kind=r.kind, device=r.device) for r in layout.regions
        ),
        groups=tuple(
            WireGroup(kind=g.kind, block_tokens=g.block_tokens, window_tokens=g.window_tokens) for g in layout.groups
        ),
        forms=tuple(forms),
        layer=tuple(tensor.layer for tensor in layout.tensors),
        form=tuple(column),
        region=tuple(tensor.region for tensor in layout.tensors),
        offset=tuple(tensor.offset_bytes for tensor in layout.tensors),
    )


def _decode(body: bytes, version_of: Callable[[bytes], _Version], decode: Callable[[bytes], WireLayout]) -> CacheLayout:
    if len(body) > MAX_LAYOUT_BYTES:
        raise MalformedMessage(f"layout: {len(body)} bytes; at most {MAX_LAYOUT_BYTES} are allowed")
    try:
        version = version_of(body).version
        if version != LAYOUT_VERSION:
            raise MalformedMessage(
                f"layout: format version {version!r}; this kvferry reads version {LAYOUT_VERSION}. "
                "Run the same version on both sides"
            )
        wire = decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"layout: {error}") from error
    return _from_wire(wire)


def _from_wire(wire: WireLayout) -> CacheLayout:
    lengths = {name: len(getattr(wire, name)) for name in ("layer", "form", "region", "offset")}
    if len(set(lengths.values())) > 1:
        raise MalformedMessage(f"layout: the columns of the table have unequal lengths: {lengths!r}")
    beyond = [index for index in wire.form if index >= len(wire.forms)]
    if beyond:
        raise MalformedMessage(f"layout: form {beyond[0]} is named, but there are only {len(wire.forms)} forms")
    groups = tuple(CacheGroup(g.kind, g.block_tokens, g.window_tokens) for g in wire.groups)
    regions = tuple(Region(r.address, r.num_bytes, r.kind, r.device) for r in wire.regions)
    forms = [
        (
            form,
            Paging(form.num_blocks, form.block_stride_bytes, form.token_stride_bytes),
            tuple(Axis(a.name, a.extent, a.start, a.stop, a.stride_bytes, a.atomic) for a in form.axes),
        )
        for form in wire.forms
    ]
    tensors = []
    rows: Iterable[tuple[str, int, int, int]] = zip(wire.layer, wire.form, wire.region, wire.offset, strict=True)
    for layer, number, region, offset in rows:
        form, paging, axes = forms[number]
        tensors.append(
            Tensor(layer, form.part, form.encoding, form.element_bytes, region, form.group, offset, paging, axes)
        )
    r = wire.rank
    rank = Rank(r.index, r.tp_rank, r.tp_size, r.pp_rank, r.pp_size, r.cp_rank, r.cp_size, r.cp_run_tokens)
    return CacheLayout(rank, regions, groups, tuple(tensors))
