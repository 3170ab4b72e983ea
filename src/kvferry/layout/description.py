"""What a worker says of its cache: regions, tensors with named axes and byte strides, cache groups.

Nothing here is "in the same order as yours": layers, parts and axes have names, and pairing goes by them.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.layout import limits

__all__ = ["Axis", "CacheGroup", "CacheKind", "CacheLayout", "MemoryKind", "Paging", "Rank", "Region", "Tensor"]


class MemoryKind(StrEnum):
    """Where a region's bytes live."""

    DRAM = "dram"
    VRAM = "vram"


class CacheKind(StrEnum):
    """What a cache group keeps of the past."""

    FULL = "full"
    """Every token."""

    WINDOW = "window"
    """The last `window_tokens` tokens; leading blocks may be absent."""

    STATE = "state"
    """One recurrent state: "the state after token n"."""


@dataclass(frozen=True, slots=True)
class Region:
    """One physical allocation; registered with the transport once, whatever shares it (R21)."""

    address: int
    num_bytes: int
    kind: MemoryKind = MemoryKind.DRAM
    device: int = 0

    def __post_init__(self) -> None:
        limits.check_region(self)


@dataclass(frozen=True, slots=True)
class Axis:
    """One inner axis of a tensor: this rank holds [start, stop) of `extent` elements, `stride_bytes` apart."""

    name: str
    extent: int
    start: int
    stop: int
    stride_bytes: int
    atomic: bool = False
    """Moved whole, never cut: an opaque packing. Both sides must hold the same range."""

    def __post_init__(self) -> None:
        limits.check_axis(self)


@dataclass(frozen=True, slots=True)
class Paging:
    """How a tensor is cut into blocks.

    A block holds `block_tokens` tokens of its group; `token_stride_bytes` is None where the tokens of a block cannot
    be told apart (an opaque packing, a state): then only whole blocks move.
    """

    num_blocks: int
    block_stride_bytes: int
    token_stride_bytes: int | None

    def __post_init__(self) -> None:
        limits.check_paging(self)


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
        limits.check_tensor(self)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table."""

    kind: CacheKind
    block_tokens: int
    """Tokens a block; for a STATE group 1 slot holds one state and this is 0."""
    window_tokens: int | None = None
    """How many of the last tokens the layers can look back on, the next one to compute included. Also allowed for a
    FULL group: every block is kept, though only these are needed (a hybrid model without the hybrid allocator)."""

    def __post_init__(self) -> None:
        limits.check_group(self)


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a worker sits in its engine. `index` is its number among all ranks of the engine."""

    index: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    cp_run_tokens: int = 1
    """Context parallelism deals the token axis out in runs of this many tokens."""

    def __post_init__(self) -> None:
        limits.check_rank(self)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CacheLayout:
    """One rank's whole cache. Checks itself when made: raises MalformedMessage with the place and the value.

    Tensors of one group share no byte, but for layers that share another layer's cache: those lie exactly on top of
    each other. Tensors of different groups may share pages: a block id belongs to one group at a time.
    """

    rank: Rank
    regions: tuple[Region, ...]
    groups: tuple[CacheGroup, ...]
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        limits.check_layout(self)
