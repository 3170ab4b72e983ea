"""Builds the descriptions of common caches, for engines, benchmarks and tests. Nothing here allocates memory.

`block_major` describes the embedded engine's cache in one call. LayoutBuilder describes any cache: pools of blocks,
cache groups, and layers of every kind at a byte offset in a pool. Pools may be shared by the layers of a cross-layer
block (each at its own offset), or by groups whose blocks use the same pages at different times.

Addresses are passed in. For layouts that only serve planning they are made up, and spaced so that regions do not
overlap.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from math import prod

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

__all__ = [
    "AxisOrder",
    "Heads",
    "KvPlace",
    "LayoutBuilder",
    "Pool",
    "StatePart",
    "attention_bytes",
    "block_major",
    "gated_delta_parts",
    "head_range",
    "mamba1_parts",
    "mamba2_parts",
]

MADE_UP_ADDRESS = 1 << 32


@dataclass(frozen=True, slots=True)
class Heads:
    """The KV heads of a model and which of them this rank holds."""

    extent: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def head_range(num_kv_heads: int, tp_rank: int, tp_size: int) -> Heads:
    """Returns the usual split: even (the first ranks hold one head more), or replicated if ranks outnumber heads."""
    if tp_size >= num_kv_heads:
        start = tp_rank * num_kv_heads // tp_size
        return Heads(num_kv_heads, start, start + 1)
    each, rest = divmod(num_kv_heads, tp_size)
    start = tp_rank * each + min(tp_rank, rest)
    return Heads(num_kv_heads, start, start + each + (tp_rank < rest))


def block_major(
    layers: Sequence[str],
    *,
    num_blocks: int,
    block_tokens: int,
    heads: Heads,
    head_dim: int,
    element_bytes: int,
    encoding: str,
    address: int = MADE_UP_ADDRESS,
    kind: MemoryKind = MemoryKind.DRAM,
    device: int = 0,
    rank: Rank | None = None,
    group: CacheGroup | None = None,
) -> CacheLayout:
    """Describes the embedded engine's cache, in which a block of all layers is one run.

    It is one C-contiguous allocation [num_blocks, layers, 2 (k, v), heads, block_tokens, head_dim].
    """
    token = head_dim * element_bytes
    head = block_tokens * token
    half = len(heads) * head
    block = len(layers) * 2 * half
    axes = (
        Axis("head", heads.extent, heads.start, heads.stop, head),
        Axis("dim", head_dim, 0, head_dim, element_bytes),
    )
    tensors = tuple(
        Tensor(layer, part, encoding, element_bytes, 0, 0, (2 * i + j) * half, Paging(num_blocks, block, token), axes)
        for i, layer in enumerate(layers)
        for j, part in enumerate(("k", "v"))
    )
    return CacheLayout(
        rank or Rank(),
        (Region(address, num_blocks * block, kind, device),),
        (group or CacheGroup(CacheKind.FULL, block_tokens),),
        tensors,
    )


class AxisOrder(Enum):
    """The axes of a block of K (or of V) in memory, outermost first. The elements of a head are innermost."""

    NHD = ("token", "head")
    HND = ("head", "token")


class KvPlace(StrEnum):
    """How K and V of one layer are arranged in memory."""

    PACKED = "packed"
    """Each block holds its K, then its V."""
    INTERLEAVED = "interleaved"
    """Each head of a token holds its K, then its V."""
    HALVES = "halves"
    """The first half of the layer's memory holds K of all blocks, and the second half V."""
    APART = "apart"
    """K and V are in two allocations."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks of equal size in one region: block b begins at offset + b * block_stride."""

    region: int
    offset: int
    num_blocks: int
    block_stride: int

    def at(self, offset: int) -> "Pool":
        """Returns the same blocks, seen from this many bytes into each of them."""
        return Pool(self.region, self.offset + offset, self.num_blocks, self.block_stride)


@dataclass(frozen=True, slots=True)
class StatePart:
    """One C-contiguous array of a recurrent state."""

    part: str
    encoding: str
    element_bytes: int
    axes: tuple[tuple[str, int, int, int], ...]
    """(axis name, extent, start, stop), outermost first."""

    @property
    def num_bytes(self) -> int:
        """The size of this rank's shard."""
        return self.element_bytes * prod(stop - start for _, _, start, stop in self.axes)


def attention_bytes(block_tokens: int, heads: Heads, head_dim: int, element_bytes: int) -> int:
    """Returns the size of one block of K and V of one layer."""
    return 2 * block_tokens * len(heads) * head_dim * element_bytes


class LayoutBuilder:
    """Collects regions, groups and tensors; build() checks them and returns the layout."""

    def __init__(
        self, rank: Rank | None = None, *, kind: MemoryKind = MemoryKind.DRAM, device: int = 0, gap_bytes: int = 4096
    ) -> None:
        self._rank = rank or Rank()
        self._kind = kind
        self._device = device
        self._gap_bytes = gap_bytes
        self._next_address = MADE_UP_ADDRESS
        self._regions: list[Region] = []
        self._groups: list[CacheGroup] = []
        self._tensors: list[Tensor] = []

    def build(self) -> CacheLayout:
        """Returns the layout. Raises MalformedMessage if the pieces do not fit together."""
        return CacheLayout(self._rank, tuple(self._regions), tuple(self._groups), tuple(self._tensors))

    def full(self, block_tokens: int, *, window_tokens: int | None = None) -> int:
        """Adds a group that keeps every token, and returns its index."""
        self._groups.append(CacheGroup(CacheKind.FULL, block_tokens, window_tokens))
        return len(self._groups) - 1

    def window(self, block_tokens: int, window_tokens: int) -> int:
        """Adds a sliding-window group, and returns its index."""
        self._groups.append(CacheGroup(CacheKind.WINDOW, block_tokens, window_tokens))
        return len(self._groups) - 1

    def states(self) -> int:
        """Adds a group of recurrent states, and returns its index."""
        self._groups.append(CacheGroup(CacheKind.STATE, 0))
        return len(self._groups) - 1

    def pool(self, num_blocks: int, block_bytes: int, *, address: int | None = None) -> Pool:
        """Adds a region that is filled with blocks without gaps, and returns the blocks."""
        where = self._next_address if address is None else address
        size = num_blocks * block_bytes
        self._regions.append(Region(where, size, self._kind, self._device))
        self._next_address = max(self._next_address, where + size + self._gap_bytes)
        return Pool(len(self._regions) - 1, 0, num_blocks, block_bytes)

    def tensor(
        self,
        layer: str,
        part: str,
        group: int,
        pool: Pool,
        *,
        encoding: str,
        element_bytes: int,
        axes: Iterable[Axis] = (),
        token_stride_bytes: int | None = None,
    ) -> None:
        """Adds any tensor, in a pool."""
        paging = Paging(pool.num_blocks, pool.block_stride, token_stride_bytes)
        self._tensors.append(
            Tensor(layer, part, encoding, element_bytes, pool.region, group, pool.offset, paging, tuple(axes))
        )

    def attention(
        self,
        layer: str,
        group: int,
        *,
        heads: Heads,
        head_dim: int,
        element_bytes: int,
        encoding: str,
        order: AxisOrder = AxisOrder.NHD,
        kv: KvPlace = KvPlace.PACKED,
        num_blocks: int = 0,
        pool: Pool | None = None,
    ) -> None:
        """Adds K and V of one layer, in `pool` or in a new region of `num_blocks` blocks.

        HALVES and APART need a new region; HALVES puts V directly after K of the last block.
        """
        block_tokens = self._groups[group].block_tokens
        interleaved = kv is KvPlace.INTERLEAVED
        element = head_dim * element_bytes * (2 if interleaved else 1)
        plane = block_tokens * len(heads) * element
        if order is AxisOrder.NHD:
            head_stride, token_stride = element, len(heads) * element
        else:
            head_stride, token_stride = block_tokens * element, element
        if pool is not None:
            assert kv in (KvPlace.PACKED, KvPlace.INTERLEAVED), "HALVES and APART do not fit in the blocks of a pool"
            first, second = pool, pool.at(head_dim * element_bytes if interleaved else plane)
        elif kv is KvPlace.APART:
            first, second = self.pool(num_blocks, plane), self.pool(num_blocks, plane)
        elif kv is KvPlace.HALVES:
            both = self.pool(2 * num_blocks, plane)
            first = Pool(both.region, 0, num_blocks, plane)
            second = first.at(num_blocks * plane)
        else:
            first = self.pool(num_blocks, plane if interleaved else 2 * plane)
            second = first.at(head_dim * element_bytes if interleaved else plane)
        axes = (
            Axis("head", heads.extent, heads.start, heads.stop, head_stride),
            Axis("dim", head_dim, 0, head_dim, element_bytes),
        )
        for part, where in (("k", first), ("v", second)):
            self.tensor(
                layer,
                part,
                group,
                where,
                encoding=encoding,
                element_bytes=element_bytes,
                axes=axes,
                token_stride_bytes=token_stride,
            )

    def scales(
        self, layer: str, group: int, *, heads: Heads | None, pool: Pool, element_bytes: int = 4, encoding: str = "f32"
    ) -> None:
        """Adds the scales of quantised K and V in a pool: one per token (heads None), or one per head of each token.

        They are [2, tokens, heads] in each block. (A scale for a whole tensor is part of the tensor's encoding.)
        """
        block_tokens = self._groups[group].block_tokens
        width = 1 if heads is None else len(heads)
        axes = () if heads is None else (Axis("head", heads.extent, heads.start, heads.stop, element_bytes),)
        for number, part in enumerate(("k.scale", "v.scale")):
            self.tensor(
                layer,
                part,
                group,
                pool.at(number * block_tokens * width * element_bytes),
                encoding=encoding,
                element_bytes=element_bytes,
                axes=axes,
                token_stride_bytes=width * element_bytes,
            )

    def latent(
        self,
        layer: str,
        group: int,
        *,
        latent_dim: int,
        element_bytes: int,
        encoding: str,
        part: str = "latent",
        num_blocks: int = 0,
        pool: Pool | None = None,
    ) -> None:
        """Adds an MLA layer: one latent (with its rotary part) per token, the same on every tensor-parallel rank."""
        token = latent_dim * element_bytes
        where = pool or self.pool(num_blocks, self._groups[group].block_tokens * token)
        self.tensor(
            layer,
            part,
            group,
            where,
            encoding=encoding,
            element_bytes=element_bytes,
            axes=(Axis("dim", latent_dim, 0, latent_dim, element_bytes),),
            token_stride_bytes=token,
        )

    def opaque(
        self,
        layer: str,
        group: int,
        *,
        block_bytes: int,
        encoding: str,
        part: str = "kv",
        num_blocks: int = 0,
        pool: Pool | None = None,
    ) -> None:
        """Adds a packing that only its kernel understands: its blocks move whole, between equal encodings."""
        where = pool or self.pool(num_blocks, block_bytes)
        self.tensor(layer, part, group, where, encoding=encoding, element_bytes=block_bytes)

    def state(
        self, layer: str, group: int, parts: Sequence[StatePart], *, num_blocks: int = 0, pool: Pool | None = None
    ) -> None:
        """Adds a recurrent state, whose parts follow each other in each slot."""
        where = pool or self.pool(num_blocks, sum(part.num_bytes for part in parts))
        for part in parts:
            axes: list[Axis] = []
            stride = part.element_bytes
            for name, extent, start, stop in reversed(part.axes):
                axes.insert(0, Axis(name, extent, start, stop, stride))
                stride *= stop - start
            self.tensor(
                layer, part.part, group, where, encoding=part.encoding, element_bytes=part.element_bytes, axes=axes
            )
            where = where.at(part.num_bytes)


def _shard(extent: int, tp_rank: int, tp_size: int, unit: int = 1) -> tuple[int, int]:
    held = head_range(extent, tp_rank, tp_size)
    return held.start * unit, held.stop * unit


def mamba1_parts(
    *,
    inner: int,
    state: int,
    conv_width: int,
    tp_rank: int = 0,
    tp_size: int = 1,
    encoding: str = "f32",
    element_bytes: int = 4,
) -> tuple[StatePart, ...]:
    """Returns the parts of Mamba-1: the last conv_width - 1 inputs of the convolution, and the SSM state.

    Both are split by inner channel.
    """
    start, stop = _shard(inner, tp_rank, tp_size)
    channel = ("channel", inner, start, stop)
    return (
        StatePart("conv.x", encoding, element_bytes, (channel, ("tap", conv_width - 1, 0, conv_width - 1))),
        StatePart("ssm", encoding, element_bytes, (channel, ("state", state, 0, state))),
    )


def mamba2_parts(
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    conv_width: int,
    tp_rank: int = 0,
    tp_size: int = 1,
    encoding: str = "f32",
    element_bytes: int = 4,
) -> tuple[StatePart, ...]:
    """Returns the parts of Mamba-2: three sections of the convolution, and the SSM heads.

    The sections are x (split by head), and B and C (split by group, or replicated if ranks outnumber groups). They are
    separate parts, because unequal TP cuts each of them in a different place.
    """
    start, stop = _shard(heads, tp_rank, tp_size)
    first, last = _shard(groups, tp_rank, tp_size)
    tap = ("tap", conv_width - 1, 0, conv_width - 1)
    section = ("channel", groups * state, first * state, last * state)
    return (
        StatePart(
            "conv.x",
            encoding,
            element_bytes,
            (("channel", heads * head_dim, start * head_dim, stop * head_dim), tap),
        ),
        StatePart("conv.b", encoding, element_bytes, (section, tap)),
        StatePart("conv.c", encoding, element_bytes, (section, tap)),
        StatePart(
            "ssm",
            encoding,
            element_bytes,
            (("head", heads, start, stop), ("dim", head_dim, 0, head_dim), ("state", state, 0, state)),
        ),
    )


def gated_delta_parts(
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_width: int,
    tp_rank: int = 0,
    tp_size: int = 1,
    encoding: str = "f32",
    element_bytes: int = 4,
) -> tuple[StatePart, ...]:
    """Returns the parts of a gated delta net: the sections q, k and v of the convolution, each split by its own heads,
    and one matrix state per value head."""
    taps = ("tap", conv_width - 1, 0, conv_width - 1)

    def section(part: str, heads: int, dim: int) -> StatePart:
        start, stop = _shard(heads, tp_rank, tp_size, dim)
        return StatePart(part, encoding, element_bytes, (("channel", heads * dim, start, stop), taps))

    start, stop = _shard(value_heads, tp_rank, tp_size)
    return (
        section("conv.q", key_heads, key_dim),
        section("conv.k", key_heads, key_dim),
        section("conv.v", value_heads, value_dim),
        StatePart(
            "ssm",
            encoding,
            element_bytes,
            (("head", value_heads, start, stop), ("dim", key_dim, 0, key_dim), ("value", value_dim, 0, value_dim)),
        ),
    )
