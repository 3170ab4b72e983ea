"""Defines an edge: what one source rank gives to one destination rank, compiled to strided boxes and byte runs.

A *class* is a set of slices whose blocks move together: same cache groups, same regions, same strides. For a stretch
of n tokens inside a block, all runs of a class are the same up to a shift: they form its *template*. Planning and
packing both start from here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from kvferry.layout.description import CacheKind, CacheLayout, Tensor

__all__ = [
    "Box",
    "BoxClass",
    "Compiled",
    "Edge",
    "GroupPair",
    "Ranges",
    "Template",
    "TensorSlice",
    "coalesced",
    "merge_neighbours",
    "templates",
]

Int64s = npt.NDArray[np.int64]
Dim = tuple[int, int, int]
"""(count, source stride, destination stride), in bytes."""
Ranges = tuple[tuple[int, int], ...]
"""A global range [start, stop) per axis of a tensor."""

MAX_CACHED_TEMPLATES = 64


@dataclass(frozen=True, slots=True)
class Template:
    """The runs of one stretch of tokens, as offsets from the stretch's first byte on each side, sorted by source."""

    source: Int64s
    destination: Int64s
    length: Int64s


@dataclass(frozen=True, slots=True)
class Box:
    """One slice inside one block: `run` bytes, repeated over `dims`. The token axis is kept separately.

    The dims are in the order of the destination's axes. They are not coalesced.
    """

    index: int
    """Index of the slice in the edge."""
    source: int
    destination: int
    run: int
    dims: tuple[Dim, ...]
    token: tuple[int, int] | None
    """Token strides (source, destination); None if the slice moves in whole blocks."""


@dataclass(frozen=True, slots=True)
class GroupPair:
    """A cache group of the source and one of the destination: the tensors in both share token segments."""

    source: int
    destination: int
    state: bool
    whole: bool
    """True if the tensors move in whole blocks only."""


@dataclass(slots=True)
class BoxClass:
    """Boxes that one template covers."""

    pair: GroupPair
    source_region: int
    destination_region: int
    source_block: int
    destination_block: int
    """Block strides in bytes."""
    token: tuple[int, int] | None
    """Token strides of all boxes; None if the class serves only whole blocks and stretches that begin with a block."""
    boxes: list[Box] = field(default_factory=list)
    cached_templates: dict[int, Template] = field(default_factory=dict)
    """Maps a number of tokens to the template of a stretch of that length."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """An edge, sorted for planning."""

    pairs: tuple[GroupPair, ...]
    boxes: tuple[tuple[GroupPair, Box], ...]
    """In the order of the edge's slices."""
    whole_blocks: tuple[BoxClass, ...]
    """Classes for stretches that fill a block on both sides, and for tensors that move in whole blocks: the widest."""
    parts: tuple[BoxClass, ...]
    """Classes for all other stretches; they hold only boxes with a token stride."""
    linear: tuple[BoxClass, ...]
    """Boxes whose stretches are one run of any length. They serve all stretches, as whole blocks would gain nothing."""
    packing_cache: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Maps a side to what packing has computed for it."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of one tensor that moves over one edge: a global range per axis of the destination, in its order."""

    layer: str
    part: str
    source_tensor: int
    """Index into the source layout's tensors."""
    destination_tensor: int
    """Index into the destination layout's tensors."""
    ranges: Ranges


@dataclass(frozen=True)
class Edge:
    """Everything that one source rank gives to one destination rank: at least one slice."""

    source: CacheLayout
    destination: CacheLayout
    slices: tuple[TensorSlice, ...]

    @property
    def source_rank(self) -> int:
        """Rank.index of the source."""
        return self.source.rank.index

    @property
    def destination_rank(self) -> int:
        """Rank.index of the destination."""
        return self.destination.rank.index

    @cached_property
    def compiled(self) -> Compiled:
        """The slices as strided boxes, computed once per edge, for planning and packing."""
        return _compile(self)


def _compile(edge: Edge) -> Compiled:
    """Turns names into offsets. Pairing has checked the edge: ranges lie inside both tensors."""
    whole: dict[object, BoxClass] = {}
    parts: dict[object, BoxClass] = {}
    linear: dict[object, BoxClass] = {}
    pairs: dict[GroupPair, None] = {}
    boxes: list[tuple[GroupPair, Box]] = []
    for index, piece in enumerate(edge.slices):
        source = edge.source.tensors[piece.source_tensor]
        destination = edge.destination.tensors[piece.destination_tensor]
        box = _box(index, source, destination, piece.ranges)
        pair = GroupPair(
            source.group,
            destination.group,
            edge.destination.groups[destination.group].kind is CacheKind.STATE,
            box.token is None,
        )
        pairs[pair] = None
        boxes.append((pair, box))
        block_tokens = (
            edge.source.groups[source.group].block_tokens,
            edge.destination.groups[destination.group].block_tokens,
        )
        place = (
            (source.region, destination.region),
            (source.paging.block_stride_bytes, destination.paging.block_stride_bytes),
        )

        def put(classes: dict[object, BoxClass], key: object, token: tuple[int, int] | None) -> None:
            if key not in classes:
                classes[key] = BoxClass(pair, *place[0], *place[1], token)  # noqa: B023 (called in this iteration only)
            classes[key].boxes.append(box)  # noqa: B023

        if box.token is None:
            put(whole, (pair, place), None)
            continue
        if _is_linear(box, block_tokens, place[1]):
            put(linear, (pair, place, box.token), box.token)
        else:
            put(whole, (pair, place), None)
            put(parts, (pair, place, box.token), box.token)
    return Compiled(tuple(pairs), tuple(boxes), tuple(whole.values()), tuple(parts.values()), tuple(linear.values()))


def _box(index: int, source: Tensor, destination: Tensor, ranges: Sequence[tuple[int, int]]) -> Box:
    source_axes = {axis.name: axis for axis in source.axes}
    source_offset = source.offset_bytes
    destination_offset = destination.offset_bytes
    dims: list[Dim] = []
    for destination_axis, (start, stop) in zip(destination.axes, ranges, strict=True):
        source_axis = source_axes[destination_axis.name]
        source_offset += (start - source_axis.start) * source_axis.stride_bytes
        destination_offset += (start - destination_axis.start) * destination_axis.stride_bytes
        dims.append((stop - start, source_axis.stride_bytes, destination_axis.stride_bytes))
    strides = source.paging.token_stride_bytes, destination.paging.token_stride_bytes
    token = None if strides[0] is None or strides[1] is None else (strides[0], strides[1])
    return Box(index, source_offset, destination_offset, source.element_bytes, tuple(dims), token)


def _is_linear(box: Box, block_tokens: tuple[int, int], block_strides: tuple[int, int]) -> bool:
    """Whether a stretch of tokens of any length is one run on both sides, and nothing is lost by treating it so.

    A token must be one run, and tokens must follow each other without a gap. The block must have no neighbours of other
    layers to be merged with: it is dense on both sides, or the block sizes differ anyway.
    """
    run, dims = coalesced(box.run, box.dims)
    dense = all(stride == tokens * run for stride, tokens in zip(block_strides, block_tokens, strict=True))
    return not dims and box.token == (run, run) and (dense or block_tokens[0] != block_tokens[1])


def coalesced(run: int, dims: Sequence[Dim]) -> tuple[int, list[Dim]]:
    """Merges dims that are contiguous on both sides into the run; returns it and the remaining dims.

    The remaining dims are in the order of falling source stride.
    """
    remaining = sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: (dim[1], dim[2]))
    while contiguous := next((dim for dim in remaining if dim[1] == dim[2] == run), None):
        remaining.remove(contiguous)
        run *= contiguous[0]
    return run, remaining[::-1]


def templates(group: BoxClass, num_tokens: int, limit: int) -> Iterator[Template]:
    """Yields all runs of a stretch of tokens, as one template, or as several of at most `limit` runs each."""
    cached = group.cached_templates.get(num_tokens)
    if cached is not None and len(cached.length) <= limit:
        yield cached
        return
    shapes: dict[tuple[int, tuple[Dim, ...]], list[Box]] = {}
    for box in group.boxes:
        dims = box.dims if box.token is None else (*box.dims, (num_tokens, *box.token))
        run, remaining = coalesced(box.run, dims)
        shapes.setdefault((run, tuple(remaining)), []).append(box)
    total = sum(len(boxes) * prod(dim[0] for dim in dims) for (_, dims), boxes in shapes.items())
    if total <= limit:
        made = [_enumerate(run, dims, boxes, 0, prod(dim[0] for dim in dims)) for (run, dims), boxes in shapes.items()]
        template = _merged(made)
        if len(group.cached_templates) >= MAX_CACHED_TEMPLATES:
            group.cached_templates.clear()
        group.cached_templates[num_tokens] = template
        yield template
        return
    for (run, dims), boxes in shapes.items():
        each = prod(dim[0] for dim in dims)
        boxes_per_piece = max(1, limit // each)
        for first in range(0, len(boxes), boxes_per_piece):
            for low in range(0, each, limit):
                batch = boxes[first : first + boxes_per_piece]
                yield _merged([_enumerate(run, dims, batch, low, min(each, low + limit))])


def _enumerate(run: int, dims: Sequence[Dim], boxes: Sequence[Box], low: int, high: int) -> Template:
    """Returns the runs of elements [low, high) of the product of the dims, for each box."""
    source = np.zeros(high - low, np.int64)
    destination = np.zeros(high - low, np.int64)
    if dims and low == 0 and high == prod(dim[0] for dim in dims):
        grid_source, grid_destination = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for count, source_stride, destination_stride in dims:
            steps = np.arange(count, dtype=np.int64)
            grid_source = (grid_source[:, None] + steps * source_stride).reshape(-1)
            grid_destination = (grid_destination[:, None] + steps * destination_stride).reshape(-1)
        source, destination = grid_source, grid_destination
    elif dims:
        rest = np.arange(low, high, dtype=np.int64)
        for count, source_stride, destination_stride in reversed(dims):
            rest, index = np.divmod(rest, count)
            source += index * source_stride
            destination += index * destination_stride
    source_starts = np.array([box.source for box in boxes], np.int64)
    destination_starts = np.array([box.destination for box in boxes], np.int64)
    return Template(
        (source_starts[:, None] + source).reshape(-1),
        (destination_starts[:, None] + destination).reshape(-1),
        np.full(len(boxes) * (high - low), run, np.int64),
    )


def _merged(pieces: Sequence[Template]) -> Template:
    """Merges several templates into one, sorted by source, in which runs that are adjacent on both sides are joined."""
    source = np.concatenate([piece.source for piece in pieces])
    destination = np.concatenate([piece.destination for piece in pieces])
    length = np.concatenate([piece.length for piece in pieces])
    if len(source) > 1 and (np.diff(source) < 0).any():
        order = np.argsort(source, kind="stable")
        source, destination, length = source[order], destination[order], length[order]
    return Template(*merge_neighbours(source, destination, length))


def merge_neighbours(source: Int64s, destination: Int64s, length: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Joins each run with the next one if the two are adjacent on both sides."""
    if len(length) < 2:
        return source, destination, length
    follows = (source[:-1] + length[:-1] == source[1:]) & (destination[:-1] + length[:-1] == destination[1:])
    if not follows.any():
        return source, destination, length
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return source[starts], destination[starts], np.add.reduceat(length, starts)
