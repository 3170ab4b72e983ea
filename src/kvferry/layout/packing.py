"""Plans staging: the place of a hand-off's bytes in one long buffer, and each side's copies between it and a cache.

Short runs are slow on every wire. A staged transfer packs them into a buffer on one side, moves the buffer as one long
run, and unpacks it on the other side. Both sides derive the same order in the buffer, from the edge alone: slices in
the order of the edge; within a slice, first the axes that are outside the token axis in the *source*, then tokens by
position, then the other axes (both sets of axes by falling source stride). Packing a block is then a plain copy.

Nothing here touches memory. A PackPlan is a few strided boxes, however many short runs it stands for: its cost depends
only on the number of blocks and slices. The transport's packer copies boxes with torch; tests do it with numpy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import cast

import numpy as np
import numpy.typing as npt

from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.edge import Box, Edge, GroupPair
from kvferry.layout.limits import MAX_BLOCK_TOKENS
from kvferry.layout.planning import moves
from kvferry.layout.sharing import check_groups_apart
from kvferry.layout.tokens import (
    MAX_TOKENS,
    Holder,
    Segments,
    Span,
    check_held,
    check_spans,
    distinct,
    holder,
    lookup,
    segments,
)

__all__ = ["PackBox", "PackPlan", "Side", "StagedPlan", "pack_plan", "plan_staged", "spans"]

Int64s = npt.NDArray[np.int64]
Fold = tuple[int, int, int]
"""(count, memory stride, staging stride), in bytes."""

ALIGN_BYTES = 64
"""Each slice begins at a multiple of this in staging, so that packers can copy wide words."""
MAX_PERIOD = 8


class Side(StrEnum):
    """The side whose cache a pack plan reads (source) or writes (destination)."""

    SOURCE = "source"
    DESTINATION = "destination"


@dataclass(frozen=True, slots=True)
class PackBox:
    """Pieces of `run_bytes` bytes, repeated over `dims` and over a list of blocks.

    Piece (i, j, ...) of the b-th block is in memory at offset + block_ids[b] * block_stride + sum(index * memory
    stride), counted from the start of `region`, and in staging at staging_offset + b * staging_block_stride +
    sum(index * staging stride). Pieces of one plan overlap neither in staging nor in memory. `dims` are outermost first
    in staging.
    """

    region: int
    offset: int
    block_ids: Int64s
    block_stride: int
    dims: tuple[Fold, ...]
    run_bytes: int
    staging_offset: int
    staging_block_stride: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the box copies."""
        total = self.run_bytes * len(self.block_ids)
        for count, _, _ in self.dims:
            total *= count
        return total


@dataclass(frozen=True, slots=True)
class PackPlan:
    """The copies that one side makes between its cache and staging memory."""

    side: Side
    boxes: tuple[PackBox, ...]
    num_bytes: int
    """The length of the staging buffer, which is the one long run. It is equal on both sides."""

    @property
    def payload_bytes(self) -> int:
        """The number of bytes that the boxes copy: num_bytes less the padding between slices."""
        return sum(box.num_bytes for box in self.boxes)


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """Both sides' plans, for a caller that knows both block tables."""

    source: PackPlan
    destination: PackPlan

    @property
    def num_bytes(self) -> int:
        """The length of the staging buffer."""
        return self.source.num_bytes


def plan_staged(
    edge: Edge,
    source_tables: Sequence[BlockTable],
    destination_tables: Sequence[BlockTable],
    wanted: TokenRange,
    *,
    end: int | None = None,
) -> StagedPlan:
    """Returns both pack plans. Arguments and errors are those of planning.plan."""
    found = spans(edge, source_tables, destination_tables, wanted, end=end)
    return StagedPlan(
        pack_plan(edge, Side.SOURCE, source_tables, found), pack_plan(edge, Side.DESTINATION, destination_tables, found)
    )


def spans(
    edge: Edge,
    source_tables: Sequence[BlockTable],
    destination_tables: Sequence[BlockTable],
    wanted: TokenRange,
    *,
    end: int | None = None,
) -> tuple[Span, ...]:
    """Returns what each group pair of the edge moves: all that the other side needs to make its own pack plan.

    The spans are in the order of `edge.compiled.pairs`, which is the same on both sides. Errors are those of
    planning.plan.
    """
    found = {move.pair: move.span for move in moves(edge, source_tables, destination_tables, wanted, end=end)}
    return tuple(found.get(pair, Span(0, 0, False)) for pair in edge.compiled.pairs)


def pack_plan(edge: Edge, side: Side, tables: Sequence[BlockTable], moved: Sequence[Span]) -> PackPlan:
    """Returns one side's plan, from its own tables and the spans that move. Both may come from a peer.

    Raises MalformedMessage if they do not fit the edge or each other, or if two groups' tables list the same page.
    """
    layout = edge.source if side is Side.SOURCE else edge.destination
    check_spans(edge, moved)
    by_pair: dict[GroupPair, tuple[Holder, Segments]] = {}
    for pair, span in zip(edge.compiled.pairs, moved, strict=True):
        if span.moved:
            table = holder(side, layout, tables, _group(side, pair))
            check_held(pair, table, span)
            by_pair[pair] = (table, _stretches(edge, side, pair, table, span))
    if shared := lookup(layout).shared:
        check_groups_apart(side, shared, {_group(side, pair): table.ids for pair, (table, _) in by_pair.items()})
    boxes: list[PackBox] = []
    at = 0
    for alike in _alike(edge, side):
        if alike.pair not in by_pair or not len(by_pair[alike.pair][1]):
            continue
        size, made = _boxes(edge, side, alike.first, by_pair[alike.pair][1])
        size = -(-size // ALIGN_BYTES) * ALIGN_BYTES
        for index, shift, folds in alike.folds:
            dims = tuple((count, step, slices * size) for count, step, slices in folds)
            boxes += [
                replace(
                    box,
                    offset=box.offset + shift,
                    dims=dims + box.dims,
                    staging_offset=at + index * size + box.staging_offset,
                )
                for box in made
            ]
        at += size * alike.count
    return PackPlan(side, tuple(boxes), at)


@dataclass(frozen=True, slots=True)
class _Alike:
    """Consecutive slices in staging that differ only in their memory offset."""

    pair: GroupPair
    first: Box
    count: int
    folds: tuple[tuple[int, int, tuple[Fold, ...]], ...]
    """One entry per box: (index of its first slice, that slice's shift in memory, dims). The dims count their staging
    strides in slices."""


def _group(side: Side, pair: GroupPair) -> int:
    return pair.source if side is Side.SOURCE else pair.destination


def _memory(side: Side, box: Box) -> int:
    return box.source if side is Side.SOURCE else box.destination


def _stretches(edge: Edge, side: Side, pair: GroupPair, table: Holder, span: Span) -> Segments:
    """Returns this side's tokens of the span, cut only at its own block boundaries.

    For the source they are in the source columns of the result, for the destination in the destination columns.
    """
    other = (edge.destination if side is Side.SOURCE else edge.source).rank
    # The other side's blocks do not matter here: pretend that it has one block that holds everything.
    block_tokens = table.block_tokens if pair.whole or pair.state else MAX_TOKENS
    ids = np.zeros(1, np.int64)
    if pair.whole and not pair.state:
        ids, first = np.zeros(len(table.ids), np.int64), table.first_token
    else:
        first = table.first_token if pair.state else 0
    other_table = Holder("other", ids, first, block_tokens, other.cp_rank, other.cp_size, other.cp_run_tokens)
    if side is Side.SOURCE:
        return segments(pair, table, other_table, span)
    return segments(pair, other_table, table, span)


def _alike(edge: Edge, side: Side) -> tuple[_Alike, ...]:
    """Returns all slices of the edge, in its order, computed once per edge and side."""
    cached = edge.compiled.packing_cache.get(side)
    if cached is None:
        cached = edge.compiled.packing_cache[side] = tuple(_find_alike(edge, side))
    return cast("tuple[_Alike, ...]", cached)


def _find_alike(edge: Edge, side: Side) -> Iterator[_Alike]:
    layout = edge.source if side is Side.SOURCE else edge.destination
    group: list[Box] = []
    last: tuple[GroupPair, object] | None = None
    for pair, box in edge.compiled.boxes:
        piece = edge.slices[box.index]
        tensor = layout.tensors[piece.source_tensor if side is Side.SOURCE else piece.destination_tensor]
        key = (pair, (box.run, box.dims, box.token, tensor.region, tensor.paging.block_stride_bytes))
        if last is not None and key != last:
            yield _Alike(last[0], group[0], len(group), tuple(_folds([_memory(side, each) for each in group])))
            group = []
        group.append(box)
        last = key
    if last is not None:
        yield _Alike(last[0], group[0], len(group), tuple(_folds([_memory(side, each) for each in group])))


def _folds(offsets: Sequence[int]) -> Iterator[tuple[int, int, tuple[Fold, ...]]]:
    """Splits the offsets of slices into few arithmetic progressions; the result is that of _Alike.folds."""
    count = len(offsets)
    for period in range(1, min(MAX_PERIOD, count) + 1):
        if count % period:
            continue
        step = offsets[period] - offsets[0] if count > period else 0
        if step < 0 or any(b - a != step for a, b in zip(offsets, offsets[period:], strict=False)):
            continue
        outer: tuple[Fold, ...] = ((count // period, step, period),) if count > period else ()
        if period == 1:
            yield 0, 0, outer
        elif period == 2 and offsets[1] > offsets[0]:
            yield 0, 0, (*outer, (2, offsets[1] - offsets[0], 1))
        else:
            for index in range(period):
                yield index, offsets[index] - offsets[0], outer
        return
    for index in range(count):
        yield index, offsets[index] - offsets[0], ()


def _boxes(edge: Edge, side: Side, box: Box, stretch: Segments) -> tuple[int, list[PackBox]]:
    """Returns the size in bytes of one slice in staging, and its boxes, as if the slice began at 0."""
    piece = edge.slices[box.index]
    layout = edge.source if side is Side.SOURCE else edge.destination
    tensor = layout.tensors[piece.source_tensor if side is Side.SOURCE else piece.destination_tensor]
    own = 1 if side is Side.SOURCE else 2
    blocks, tokens = (
        (stretch.source_block, stretch.source_token)
        if side is Side.SOURCE
        else (stretch.destination_block, stretch.destination_token)
    )
    total = int(stretch.count.sum())
    # The source's strides determine the order in staging, on both sides.
    split = box.token[0] if box.token is not None else MAX_TOKENS
    ordered = sorted((dim for dim in box.dims if dim[0] > 1), key=lambda dim: -dim[1])
    inner: list[Fold] = []
    width = box.run
    for dim in reversed([dim for dim in ordered if dim[1] <= split]):
        inner.insert(0, (dim[0], dim[own], width))
        width *= dim[0]
    token_staging = width
    width *= total
    outer: list[Fold] = []
    for dim in reversed([dim for dim in ordered if dim[1] > split]):
        outer.insert(0, (dim[0], dim[own], width))
        width *= dim[0]
    token_memory = 0 if box.token is None else box.token[own - 1]
    made: list[PackBox] = []
    for rows, token, count in _alike_stretches(tokens, stretch.count):
        begins = (np.cumsum(stretch.count) - stretch.count)[rows]
        for stretch_rows, step in _progressions(begins):
            dims = [*outer, *([(count, token_memory, token_staging)] if count > 1 else []), *inner]
            run, dims = _contiguous(box.run, dims)
            made.append(
                PackBox(
                    region=tensor.region,
                    offset=_memory(side, box) + token * token_memory,
                    block_ids=blocks[rows][stretch_rows],
                    block_stride=tensor.paging.block_stride_bytes,
                    dims=tuple(dims),
                    run_bytes=run,
                    staging_offset=int(begins[stretch_rows][0]) * token_staging,
                    staging_block_stride=step * token_staging,
                )
            )
    return width, made


def _contiguous(run: int, dims: list[Fold]) -> tuple[int, list[Fold]]:
    """Merges innermost dims into the run, as long as they are contiguous in memory and in staging."""
    while dims and dims[-1][1] == dims[-1][2] == run:
        run *= dims[-1][0]
        dims = dims[:-1]
    return run, dims


def _alike_stretches(tokens: Int64s, counts: Int64s) -> Iterator[tuple[Int64s, int, int]]:
    """Yields the rows of stretches that begin at the same token of a block and have the same length."""
    keys = tokens * MAX_BLOCK_TOKENS + (counts - 1)
    for key in distinct(keys):
        token, count = divmod(int(key), MAX_BLOCK_TOKENS)
        yield np.flatnonzero(keys == key), token, count + 1


def _progressions(begins: Int64s) -> Iterator[tuple[slice, int]]:
    """Yields slices of `begins` in which the step is constant, with that step."""
    first = 0
    while first < len(begins):
        if first + 1 == len(begins):
            yield slice(first, first + 1), 0
            return
        step = int(begins[first + 1] - begins[first])
        breaks = np.flatnonzero(np.diff(begins[first:]) != step)
        last = first + int(breaks[0]) + 1 if len(breaks) else len(begins)
        yield slice(first, last), step
        first = last
