"""What a worker reports about its cache: regions, tensors with named axes and byte strides, and cache groups.

No order carries meaning: layers, parts and axes have names, and pairing goes by the names. The records check themselves
when they are made, and raise MalformedMessage with the place, the value and the allowed range.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import MalformedMessage
from kvferry.layout.limits import (
    MAX_ADDRESS,
    MAX_AXES,
    MAX_BLOCK_TOKENS,
    MAX_BYTES,
    MAX_GROUPS,
    MAX_RANKS,
    MAX_REGIONS,
    MAX_TENSORS,
    check_name,
    check_within,
)
from kvferry.layout.overlap import (
    Footprint,
    check_disjoint,
    check_not_self_overlapping,
    check_regions_disjoint,
    footprint_length,
)

__all__ = ["Axis", "CacheGroup", "CacheKind", "CacheLayout", "MemoryKind", "Paging", "Rank", "Region", "Tensor"]


class MemoryKind(StrEnum):
    """Where a region's bytes live."""

    DRAM = "dram"
    VRAM = "vram"


class CacheKind(StrEnum):
    """Which tokens a cache group keeps."""

    FULL = "full"
    """The group keeps every token."""

    WINDOW = "window"
    """The group keeps the last `window_tokens` tokens; leading blocks may be absent."""

    STATE = "state"
    """The group keeps one recurrent state, "the state after token n"."""


@dataclass(frozen=True, slots=True)
class Region:
    """One physical allocation. It is registered with the transport once, however many layers share it (R21)."""

    address: int
    num_bytes: int
    kind: MemoryKind = MemoryKind.DRAM
    device: int = 0

    def __post_init__(self) -> None:
        check_within("region address", self.address, 0, MAX_ADDRESS - MAX_BYTES)
        check_within("region num_bytes", self.num_bytes, 1, MAX_BYTES)
        check_within("region device", self.device, 0, 1 << 16)


@dataclass(frozen=True, slots=True)
class Axis:
    """One inner axis of a tensor: this rank holds [start, stop) of `extent` elements, `stride_bytes` apart."""

    name: str
    extent: int
    start: int
    stop: int
    stride_bytes: int
    atomic: bool = False
    """True if the axis moves whole and is never cut (an opaque packing). Both sides must hold the same range."""

    def __post_init__(self) -> None:
        check_name("axis name", self.name)
        check_within(f"axis {self.name!r} extent", self.extent, 1, MAX_BYTES)
        if not 0 <= self.start < self.stop <= self.extent:
            raise MalformedMessage(
                f"layout: axis {self.name!r} holds [{self.start!r}, {self.stop!r}); "
                f"it must be a range inside [0, {self.extent})"
            )
        # Different elements must have different addresses.
        low = 0 if self.stop - self.start == 1 else 1
        check_within(f"axis {self.name!r} stride_bytes", self.stride_bytes, low, MAX_BYTES)


@dataclass(frozen=True, slots=True)
class Paging:
    """How a tensor is cut into blocks.

    A block holds `block_tokens` tokens of its group. `token_stride_bytes` is None if the tokens of a block cannot be
    distinguished (an opaque packing, or a state): then only whole blocks move.
    """

    num_blocks: int
    block_stride_bytes: int
    token_stride_bytes: int | None

    def __post_init__(self) -> None:
        check_within("paging num_blocks", self.num_blocks, 1, MAX_BYTES)
        check_within("paging block_stride_bytes", self.block_stride_bytes, 0 if self.num_blocks == 1 else 1, MAX_BYTES)
        if self.token_stride_bytes is not None:
            check_within("paging token_stride_bytes", self.token_stride_bytes, 0, MAX_BYTES)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One rank's shard of one part of one layer.

    Byte of (block b, token t in the block, inner index i, j, ...) =
    offset_bytes + b * block_stride + t * token_stride + sum((i - axis.start) * axis.stride_bytes), in `region`.
    An element is `element_bytes` long, and is the unit that `encoding` gives a meaning to.
    """

    layer: str
    part: str
    encoding: str
    element_bytes: int
    region: int
    """Index into CacheLayout.regions."""
    group: int
    """Index into CacheLayout.groups."""
    offset_bytes: int
    paging: Paging
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        check_name("tensor layer", self.layer)
        check_name(f"layer {self.layer!r} part", self.part)
        where = _name(self)
        check_name(f"{where} encoding", self.encoding)
        check_within(f"{where} element_bytes", self.element_bytes, 1, MAX_BYTES)
        check_within(f"{where} region", self.region, 0, MAX_REGIONS - 1)
        check_within(f"{where} group", self.group, 0, MAX_GROUPS - 1)
        check_within(f"{where} offset_bytes", self.offset_bytes, 0, MAX_BYTES)
        check_within(f"{where} number of axes", len(self.axes), 0, MAX_AXES)
        if len({axis.name for axis in self.axes}) != len(self.axes):
            raise MalformedMessage(f"layout: {where} names an axis twice: {[axis.name for axis in self.axes]!r}")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table."""

    kind: CacheKind
    block_tokens: int
    """Tokens per block. A STATE group has 0: each of its slots holds one state."""
    window_tokens: int | None = None
    """How many of the last tokens the layers attend to, counting the next one to compute. A FULL group may set it, too:
    it keeps every block though only these are needed (a hybrid model without the hybrid allocator)."""

    def __post_init__(self) -> None:
        if self.kind is CacheKind.STATE:
            check_within("state group block_tokens", self.block_tokens, 0, 0)
        else:
            check_within("group block_tokens", self.block_tokens, 1, MAX_BLOCK_TOKENS)
        if self.window_tokens is not None:
            check_within("group window_tokens", self.window_tokens, 1, MAX_BYTES)
        elif self.kind is CacheKind.WINDOW:
            raise MalformedMessage("layout: a window group has window_tokens None; give the number of tokens it keeps")


@dataclass(frozen=True, slots=True)
class Rank:
    """The position of a worker in its engine. `index` is its number among all ranks of the engine."""

    index: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    cp_run_tokens: int = 1
    """Context parallelism deals out the token axis in runs of this many tokens."""

    def __post_init__(self) -> None:
        check_within("rank index", self.index, 0, MAX_RANKS - 1)
        for name, value, size in (
            ("tp", self.tp_rank, self.tp_size),
            ("pp", self.pp_rank, self.pp_size),
            ("cp", self.cp_rank, self.cp_size),
        ):
            check_within(f"rank {name}_size", size, 1, MAX_RANKS)
            check_within(f"rank {name}_rank", value, 0, size - 1)
        check_within("rank cp_run_tokens", self.cp_run_tokens, 1, MAX_BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CacheLayout:
    """One rank's whole cache.

    Tensors of one group share no bytes, except for layers that reuse another layer's cache: their tensors coincide
    exactly. Tensors of different groups may share pages: a block id belongs to one group at a time.
    """

    rank: Rank
    regions: tuple[Region, ...]
    groups: tuple[CacheGroup, ...]
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        check_within("number of regions", len(self.regions), 1, MAX_REGIONS)
        check_within("number of groups", len(self.groups), 1, MAX_GROUPS)
        check_within("number of tensors", len(self.tensors), 1, MAX_TENSORS)
        check_regions_disjoint([(each.kind, each.device, each.address, each.num_bytes) for each in self.regions])
        seen: set[tuple[str, str]] = set()
        distinct: dict[tuple[int, int], dict[tuple[Footprint, str, str], str]] = {}
        for tensor in self.tensors:
            where = _name(tensor)
            if (tensor.layer, tensor.part) in seen:
                raise MalformedMessage(f"layout: {where} is advertised twice by rank {self.rank.index}")
            seen.add((tensor.layer, tensor.part))
            footprint = self._checked_footprint(where, tensor)
            # Layers that reuse another layer's cache coincide exactly: they are one entry.
            entries = distinct.setdefault((tensor.region, tensor.group), {})
            entries.setdefault((footprint, tensor.encoding, tensor.part), where)
        for (region, _), entries in distinct.items():
            check_disjoint([(footprint, where) for (footprint, _, _), where in entries.items()], region)

    def _checked_footprint(self, where: str, tensor: Tensor) -> Footprint:
        """Returns the tensor's bytes, which lie inside its region and do not overlap."""
        check_within(f"{where} region", tensor.region, 0, len(self.regions) - 1)
        check_within(f"{where} group", tensor.group, 0, len(self.groups) - 1)
        group = self.groups[tensor.group]
        if group.kind is CacheKind.STATE and tensor.paging.token_stride_bytes is not None:
            raise MalformedMessage(f"layout: {where} is in a state group and has a token stride; a state has no tokens")
        footprint = _footprint(tensor, group.block_tokens)
        end = footprint[0] + footprint_length(footprint)
        if end > (size := self.regions[tensor.region].num_bytes):
            raise MalformedMessage(
                f"layout: {where} ends at byte {end} of region {tensor.region}, which has {size} bytes"
            )
        check_not_self_overlapping(where, footprint)
        return footprint


def _name(tensor: Tensor) -> str:
    return f"layer {tensor.layer!r} part {tensor.part!r}"


def _footprint(tensor: Tensor, block_tokens: int) -> Footprint:
    dims = [(tensor.paging.num_blocks, tensor.paging.block_stride_bytes)]
    if tensor.paging.token_stride_bytes is not None:
        dims.append((block_tokens, tensor.paging.token_stride_bytes))
    dims += [(axis.stop - axis.start, axis.stride_bytes) for axis in tensor.axes]
    kept = sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: (-dim[1], dim[0]))
    return tensor.offset_bytes, tuple(kept), tensor.element_bytes
