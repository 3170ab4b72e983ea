"""An edge as strided boxes, and the boxes of one block as byte runs: what planning and packing share.

A *class* is a set of slices whose blocks move together: same cache groups, same regions, same strides. For a stretch
of n tokens inside a block, all runs of a class are the same up to a shift: its *template*.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.layout.description import CacheKind, Tensor

if TYPE_CHECKING:
    from kvferry.layout.pairing import Edge

__all__ = [
    "Box",
    "BoxClass",
    "Compiled",
    "GroupPair",
    "Template",
    "coalesced",
    "compile_edge",
    "merge_neighbours",
    "templates",
]

Int64s = npt.NDArray[np.int64]
Dim = tuple[int, int, int]
"""(count, source stride, destination stride), in bytes."""

MAX_KEPT_TEMPLATES = 64


@dataclass(frozen=True, slots=True)
class Template:
    """Runs of one stretch of tokens: offsets from the stretch's first byte on either side, sorted by source."""

    source: Int64s
    destination: Int64s
    length: Int64s


@dataclass(frozen=True, slots=True)
class Box:
    """One slice inside one block: `run` bytes, repeated over `dims`; the token axis is kept apart.

    The dims are in the order of the destination's axes; they are not coalesced.
    """

    index: int
    """Number of the slice in the edge."""
    source: int
    destination: int
    run: int
    dims: tuple[Dim, ...]
    token: tuple[int, int] | None
    """Token strides (source, destination); None: moved whole."""


@dataclass(frozen=True, slots=True)
class GroupPair:
    """Tensors that are in this group of the source and in that one of the destination share token segments."""

    source: int
    destination: int
    state: bool
    whole: bool
    """Cut into whole blocks only."""


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
    """Token strides of all boxes; None where only whole blocks, or stretches from a block's first token, use it."""
    boxes: list[Box] = field(default_factory=list)
    kept: dict[int, Template] = field(default_factory=dict)
    """Templates by their number of tokens."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """An edge, sorted for planning."""

    pairs: tuple[GroupPair, ...]
    boxes: tuple[tuple[GroupPair, Box], ...]
    """In the order of the edge's slices."""
    whole_blocks: tuple[BoxClass, ...]
    """For stretches that fill a block on both sides, and whole-block tensors: the widest classes."""
    parts: tuple[BoxClass, ...]
    """For all other stretches; only boxes with a token stride."""
    linear: tuple[BoxClass, ...]
    """Boxes whose stretches are one run of any length: used for all stretches, where whole blocks gain nothing."""
    kept: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """What packing keeps of the edge, by its side."""


def compile_edge(edge: "Edge") -> Compiled:
    """Turn names into offsets. The edge is checked already: ranges lie inside both tensors."""
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
                classes[key] = BoxClass(pair, *place[0], *place[1], token)  # noqa: B023 (called in this turn only)
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
    theirs = {axis.name: axis for axis in source.axes}
    near = destination.offset_bytes
    far = source.offset_bytes
    dims: list[Dim] = []
    for axis, (start, stop) in zip(destination.axes, ranges, strict=True):
        other = theirs[axis.name]
        far += (start - other.start) * other.stride_bytes
        near += (start - axis.start) * axis.stride_bytes
        dims.append((stop - start, other.stride_bytes, axis.stride_bytes))
    strides = source.paging.token_stride_bytes, destination.paging.token_stride_bytes
    token = None if strides[0] is None or strides[1] is None else (strides[0], strides[1])
    return Box(index, far, near, source.element_bytes, tuple(dims), token)


def _is_linear(box: Box, block_tokens: tuple[int, int], block_strides: tuple[int, int]) -> bool:
    """A token is one run and tokens follow each other without a gap, on both sides; and a block has no neighbours of
    other layers to be drawn together with: it is dense on both sides, or the block sizes differ anyway."""
    run, dims = coalesced(box.run, box.dims)
    dense = all(stride == tokens * run for stride, tokens in zip(block_strides, block_tokens, strict=True))
    return not dims and box.token == (run, run) and (dense or block_tokens[0] != block_tokens[1])


def coalesced(run: int, dims: Sequence[Dim]) -> tuple[int, list[Dim]]:
    """Draw dims that follow on without a gap, on both sides, into the run. The rest, largest source stride first."""
    left = sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: (dim[1], dim[2]))
    while fitting := next((dim for dim in left if dim[1] == dim[2] == run), None):
        left.remove(fitting)
        run *= fitting[0]
    return run, left[::-1]


def templates(group: BoxClass, num_tokens: int, limit: int) -> Iterator[Template]:
    """All runs of a stretch of tokens; more than one piece only where one would hold more than `limit` runs."""
    kept = group.kept.get(num_tokens)
    if kept is not None and len(kept.length) <= limit:
        yield kept
        return
    shapes: dict[tuple[int, tuple[Dim, ...]], list[Box]] = {}
    for box in group.boxes:
        dims = box.dims if box.token is None else (*box.dims, (num_tokens, *box.token))
        run, left = coalesced(box.run, dims)
        shapes.setdefault((run, tuple(left)), []).append(box)
    total = sum(len(boxes) * prod(dim[0] for dim in dims) for (_, dims), boxes in shapes.items())
    if total <= limit:
        made = [_enumerate(run, dims, boxes, 0, prod(dim[0] for dim in dims)) for (run, dims), boxes in shapes.items()]
        template = _merged(made)
        if len(group.kept) >= MAX_KEPT_TEMPLATES:
            group.kept.clear()
        group.kept[num_tokens] = template
        yield template
        return
    for (run, dims), boxes in shapes.items():
        each = prod(dim[0] for dim in dims)
        together = max(1, limit // each)
        for first in range(0, len(boxes), together):
            for low in range(0, each, limit):
                some = boxes[first : first + together]
                yield _merged([_enumerate(run, dims, some, low, min(each, low + limit))])


def _enumerate(run: int, dims: Sequence[Dim], boxes: Sequence[Box], low: int, high: int) -> Template:
    """Elements [low, high) of the dims' product, for each box."""
    source = np.zeros(high - low, np.int64)
    destination = np.zeros(high - low, np.int64)
    if dims and low == 0 and high == prod(dim[0] for dim in dims):
        grid_source, grid_destination = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for count, far, near in dims:
            steps = np.arange(count, dtype=np.int64)
            grid_source = (grid_source[:, None] + steps * far).reshape(-1)
            grid_destination = (grid_destination[:, None] + steps * near).reshape(-1)
        source, destination = grid_source, grid_destination
    elif dims:
        left = np.arange(low, high, dtype=np.int64)
        for count, far, near in reversed(dims):
            left, index = np.divmod(left, count)
            source += index * far
            destination += index * near
    far_starts = np.array([box.source for box in boxes], np.int64)
    near_starts = np.array([box.destination for box in boxes], np.int64)
    return Template(
        (far_starts[:, None] + source).reshape(-1),
        (near_starts[:, None] + destination).reshape(-1),
        np.full(len(boxes) * (high - low), run, np.int64),
    )


def _merged(pieces: Sequence[Template]) -> Template:
    """One template of several: sorted by source, neighbours on both sides drawn together."""
    source = np.concatenate([piece.source for piece in pieces])
    destination = np.concatenate([piece.destination for piece in pieces])
    length = np.concatenate([piece.length for piece in pieces])
    if len(source) > 1 and (np.diff(source) < 0).any():
        order = np.argsort(source, kind="stable")
        source, destination, length = source[order], destination[order], length[order]
    return Template(*merge_neighbours(source, destination, length))


def merge_neighbours(source: Int64s, destination: Int64s, length: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Draw together each run and the next one, where the next one follows on both sides."""
    if len(length) < 2:
        return source, destination, length
    follows = (source[:-1] + length[:-1] == source[1:]) & (destination[:-1] + length[:-1] == destination[1:])
    if not follows.any():
        return source, destination, length
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return source[starts], destination[starts], np.add.reduceat(length, starts)
