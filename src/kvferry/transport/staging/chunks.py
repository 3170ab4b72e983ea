"""Cuts a staged transfer into chunks that fit the staging pool, and the processor's cache.

In a whole pack plan a slice (one part of one layer) lies in one piece in staging, however many tokens it has. Cut by
tokens into chunks of a few blocks, all slices of a chunk lie together: where the source's blocks are whole runs of
all layers, they stay so, and the source side needs no packing. And what was just read is still in cache when it is
unpacked.

Chunks of whole units (the least common multiple of all block sizes) are all alike but for their block ids, so they are
planned once. What is not a unit, and every edge with several groups, windows, states or context parallelism, is planned
chunk by chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.description import CacheKind, CacheLayout
from kvferry.layout.packing import PackBox, PackPlan, StagedPlan, plan_staged
from kvferry.layout.planning import moves

if TYPE_CHECKING:
    from kvferry.layout.edge import Edge

__all__ = ["CHUNK_BYTES", "chunk_plans"]

CHUNK_BYTES = 8 << 20
"""Larger chunks are unpacked from memory and not from a cache; smaller ones cost more calls and more waiting."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Side:
    table: BlockTable
    ids: Int64s
    block_tokens: int

    def blocks_of(self, first_token: int, num_tokens: int) -> slice:
        begin = (first_token - self.table.first_token) // self.block_tokens
        return slice(begin, begin + num_tokens // self.block_tokens)


def chunk_plans(
    edge: "Edge",
    source_tables: Sequence[BlockTable],
    destination_tables: Sequence[BlockTable],
    wanted: TokenRange,
    *,
    end: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[StagedPlan]:
    """Returns pack plans that together move `wanted`, each of about `chunk_bytes`, in the order of their tokens.

    Arguments and errors are those of planning.plan; errors come before the first plan. A chunk is longer if one
    unit is. With `end`, or if a state or a window depends on the end of the range, there is one plan for all.
    """
    # Everything that can be wrong is found now, and not after half of the chunks have been moved.
    todo = moves(edge, source_tables, destination_tables, wanted, end=end)
    if not todo:
        return iter(())
    if end not in (None, wanted.stop) or not all(
        _keeps_all(edge, move.pair.source, move.pair.destination) for move in todo
    ):
        return iter((plan_staged(edge, source_tables, destination_tables, wanted, end=end),))
    return _chunks(edge, source_tables, destination_tables, wanted, chunk_bytes)


def _keeps_all(edge: "Edge", source: int, destination: int) -> bool:
    return all(
        layout.groups[index].kind is CacheKind.FULL and layout.groups[index].window_tokens is None
        for layout, index in ((edge.source, source), (edge.destination, destination))
    )


def _chunks(
    edge: "Edge",
    source_tables: Sequence[BlockTable],
    destination_tables: Sequence[BlockTable],
    wanted: TokenRange,
    chunk_bytes: int,
) -> Iterator[StagedPlan]:
    paged = [group for layout in (edge.source, edge.destination) for group in layout.groups if group.block_tokens]
    unit = lcm(*(group.block_tokens for group in paged))
    dealt = edge.source.rank.cp_size > 1 or edge.destination.rank.cp_size > 1
    start = min(-(-wanted.start // unit) * unit, wanted.stop)
    stop = start if dealt else max(start, wanted.stop // unit * unit)
    if start > wanted.start:
        yield plan_staged(edge, source_tables, destination_tables, TokenRange(wanted.start, start))
    if stop > start:
        template = plan_staged(edge, source_tables, destination_tables, TokenRange(start, start + unit))
        per_chunk = max(1, chunk_bytes // max(1, template.num_bytes))
        sides = _simple_sides(edge, source_tables, destination_tables)
        for first in range(start, stop, per_chunk * unit):
            tokens = TokenRange(first, min(stop, first + per_chunk * unit))
            if sides is None:
                yield plan_staged(edge, source_tables, destination_tables, tokens)
            else:
                yield StagedPlan(
                    _repeated(template.source, sides[0], start, tokens, unit),
                    _repeated(template.destination, sides[1], start, tokens, unit),
                )
    if wanted.stop > stop:
        yield from _rest(edge, source_tables, destination_tables, TokenRange(stop, wanted.stop), unit, chunk_bytes)


def _rest(
    edge: "Edge",
    source_tables: Sequence[BlockTable],
    destination_tables: Sequence[BlockTable],
    tokens: TokenRange,
    unit: int,
    chunk_bytes: int,
) -> Iterator[StagedPlan]:
    whole = plan_staged(edge, source_tables, destination_tables, tokens)
    if whole.num_bytes <= chunk_bytes:
        yield whole
        return
    units_a_chunk = max(1, len(tokens) * chunk_bytes // (whole.num_bytes * unit))
    step = units_a_chunk * unit
    if step >= len(tokens):
        yield whole
        return
    for first in range(tokens.start, tokens.stop, step):
        yield plan_staged(edge, source_tables, destination_tables, TokenRange(first, min(tokens.stop, first + step)))


def _simple_sides(
    edge: "Edge", source_tables: Sequence[BlockTable], destination_tables: Sequence[BlockTable]
) -> tuple[_Side, _Side] | None:
    """Returns both sides if each has one group, whose blocks the template's block ids identify; else None."""
    sides = []
    for layout, tables in ((edge.source, source_tables), (edge.destination, destination_tables)):
        if len(layout.groups) != 1 or len(tables) != 1 or not _is_paged_alike(layout):
            return None
        block_tokens = layout.groups[0].block_tokens
        table = tables[0]
        if table.first_token % block_tokens:
            return None
        sides.append(_Side(table, np.asarray(table.block_ids, dtype=np.int64), block_tokens))
    return sides[0], sides[1]


def _is_paged_alike(layout: CacheLayout) -> bool:
    return all(tensor.paging.token_stride_bytes is not None for tensor in layout.tensors)


def _repeated(template: PackPlan, side: _Side, start: int, tokens: TokenRange, unit: int) -> PackPlan:
    """Returns the template's unit once for each unit of `tokens`, one after the other in staging."""
    num_units = len(tokens) // unit
    blocks_a_unit = unit // side.block_tokens
    own = side.ids[side.blocks_of(start, unit)]
    there = side.ids[side.blocks_of(tokens.start, len(tokens))]
    place = {int(block): index for index, block in enumerate(own)}
    boxes: list[PackBox] = []
    for box in template.boxes:
        at = [place.get(int(block), -1) for block in box.block_ids]
        if -1 in at:
            raise MalformedMessage(f"block ids {box.block_ids.tolist()!r} of a plan are not in its table")
        if len(at) == 1:
            ids = there[at[0] :: blocks_a_unit]
            boxes.append(replace(box, block_ids=ids, staging_block_stride=template.num_bytes))
        else:
            boxes.extend(
                replace(
                    box,
                    block_ids=there[index::blocks_a_unit],
                    staging_offset=box.staging_offset + order * box.staging_block_stride,
                    staging_block_stride=template.num_bytes,
                )
                for order, index in enumerate(at)
            )
    joined = tuple(_joined(box) for box in boxes)
    return PackPlan(template.side, joined, template.num_bytes * num_units)


def _joined(box: PackBox) -> PackBox:
    """Merges dims into the run if they are contiguous on both sides."""
    run, dims = box.run_bytes, list(box.dims)
    while dims and dims[-1][1] == dims[-1][2] == run:
        run *= dims.pop()[0]
    return replace(box, run_bytes=run, dims=tuple(dims))
