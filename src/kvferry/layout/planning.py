"""Plans which bytes go where for one request: takes an edge and both sides' block tables, and yields byte runs.

The runs come in pieces of bounded size, so a plan of any length needs bounded memory. Inside a block, all runs of an
edge form a template that is made once and shifted from block to block. Blocks that are contiguous in both caches become
one run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, Runs, TokenRange
from kvferry.layout.edge import BoxClass, Edge, GroupPair, Template, merge_neighbours, templates
from kvferry.layout.sharing import check_groups_apart
from kvferry.layout.tokens import MAX_TOKENS, Holder, Segments, Span, distinct, holder, lookup, segments, shared_span

__all__ = ["MAX_RUNS_PER_PIECE", "Move", "moves", "plan"]

Int64s = npt.NDArray[np.int64]

MAX_RUNS_PER_PIECE = 1 << 20
"""24 MiB of runs per piece."""


@dataclass(frozen=True, slots=True)
class Move:
    """What one group pair of an edge moves for one request, and both sides' checked tables."""

    pair: GroupPair
    source: Holder
    destination: Holder
    span: Span


def moves(
    edge: Edge,
    source_tables: Sequence[BlockTable],
    destination_tables: Sequence[BlockTable],
    wanted: TokenRange,
    *,
    end: int | None = None,
) -> list[Move]:
    """Checks the tables and returns which tokens each group pair moves. Arguments and errors are those of plan()."""
    if not 0 <= wanted.start <= wanted.stop <= MAX_TOKENS:
        raise MalformedMessage(f"wanted tokens [{wanted.start}, {wanted.stop}) are not inside [0, {MAX_TOKENS}]")
    final = wanted.stop if end is None else end
    if final < wanted.stop:
        raise MalformedMessage(f"wanted tokens stop at {wanted.stop}, after the end of the hand-off, {final}")
    if wanted.start == wanted.stop:
        return []
    result: list[Move] = []
    holders: dict[tuple[str, int], Holder] = {}
    for pair in edge.compiled.pairs:
        for side, layout, tables, group in (
            ("source", edge.source, source_tables, pair.source),
            ("destination", edge.destination, destination_tables, pair.destination),
        ):
            if (side, group) not in holders:
                holders[side, group] = holder(side, layout, tables, group)
        source, destination = holders["source", pair.source], holders["destination", pair.destination]
        span = shared_span(edge, pair, source, destination, wanted, final)
        result.append(Move(pair, source, destination, span))
    for side, layout in (("source", edge.source), ("destination", edge.destination)):
        if shared := lookup(layout).shared:
            check_groups_apart(side, shared, {group: each.ids for (at, group), each in holders.items() if at == side})
    return [move for move in result if move.span.moved]


def plan(
    edge: Edge,
    source_tables: Sequence[BlockTable],
    destination_tables: Sequence[BlockTable],
    wanted: TokenRange,
    *,
    end: int | None = None,
    max_runs_per_piece: int = MAX_RUNS_PER_PIECE,
    pad_tail: bool = False,
) -> Iterator[Runs]:
    """Yields the byte runs that bring `wanted` over this edge, in pieces of one region pair and bounded length each.

    `end` is the token from which the destination will compute (wanted.stop if None); a hand-off that moves in chunks
    gives the end of the last one. It decides what a window still needs, and states move with the chunk that ends there.
    Tokens before a window are moved only if both tables have them.

    `pad_tail` moves the last block whole if only its first tokens are wanted and both sides have the same block size.
    The rest of the destination's block, after `wanted.stop`, must belong to the request and not be computed yet. If
    tokens are not a block's outermost axis, this is one run instead of hundreds.

    Raises MalformedMessage if a table is missing, is wrong (ids out of range or repeated, or a page that another
    group's table lists too) or lacks a needed position. It does so before the first piece, so that nothing is copied
    for a request that cannot be served.
    """
    todo = {move.pair: move for move in moves(edge, source_tables, destination_tables, wanted, end=end)}
    return _pieces(edge, todo, max(1, max_runs_per_piece), pad_tail)


def _pieces(edge: Edge, todo: dict[GroupPair, Move], limit: int, pad_tail: bool) -> Iterator[Runs]:
    compiled = edge.compiled
    cut = {pair: segments(pair, move.source, move.destination, move.span) for pair, move in todo.items()}
    if pad_tail:
        cut = {pair: _padded(todo[pair], stretch) for pair, stretch in cut.items()}
    for group in compiled.linear:
        if group.pair in todo:
            yield from _linear(group, cut[group.pair], limit)
    for group in compiled.whole_blocks:
        if group.pair in todo:
            stretch = cut[group.pair]
            tokens = todo[group.pair].source.block_tokens
            if not (group.pair.whole or group.pair.state):
                if tokens != todo[group.pair].destination.block_tokens:
                    continue
                stretch = _select(stretch, stretch.count == tokens)
            yield from _templated(group, stretch, tokens, limit)
    for group in compiled.parts:
        if group.pair in todo:
            move = todo[group.pair]
            stretch = cut[group.pair]
            if move.source.block_tokens == move.destination.block_tokens:
                stretch = _select(stretch, stretch.count != move.source.block_tokens)
            for count in distinct(stretch.count):
                yield from _templated(group, _select(stretch, stretch.count == count), int(count), limit)


def _padded(move: Move, stretch: Segments) -> Segments:
    """Extends the last stretch to the end of its block, if it begins with that block on both sides."""
    tokens = move.source.block_tokens
    alike = tokens == move.destination.block_tokens and move.source.cp_size == move.destination.cp_size == 1
    if move.pair.whole or move.pair.state or not alike or not len(stretch):
        return stretch
    if stretch.source_token[-1] or stretch.destination_token[-1]:
        return stretch
    count = stretch.count.copy()
    count[-1] = tokens
    return Segments(
        stretch.source_block, stretch.source_token, stretch.destination_block, stretch.destination_token, count
    )


def _select(stretch: Segments, keep: npt.NDArray[np.bool_]) -> Segments:
    return Segments(
        stretch.source_block[keep],
        stretch.source_token[keep],
        stretch.destination_block[keep],
        stretch.destination_token[keep],
        stretch.count[keep],
    )


def _starts(group: BoxClass, stretch: Segments) -> tuple[Int64s, Int64s]:
    """Returns the shift of each stretch on each side."""
    source = stretch.source_block * group.source_block
    destination = stretch.destination_block * group.destination_block
    if group.token is not None:
        source = source + stretch.source_token * group.token[0]
        destination = destination + stretch.destination_token * group.token[1]
    return source, destination


def _by_source(source: Int64s, destination: Int64s, *more: Int64s) -> tuple[Int64s, ...]:
    """Sorts by source, so that contiguous blocks are recognised in whatever order they were allocated."""
    if len(source) > 1 and (np.diff(source) < 0).any():
        order = np.argsort(source, kind="stable")
        return tuple(array[order] for array in (source, destination, *more))
    return (source, destination, *more)


def _linear(group: BoxClass, stretch: Segments, limit: int) -> Iterator[Runs]:
    """Yields the runs of boxes for which a stretch of any length is one run."""
    assert group.token is not None, "a linear class has token strides"
    if not len(stretch):
        return
    source, destination = _starts(group, stretch)
    source, destination, length = merge_neighbours(*_by_source(source, destination, stretch.count * group.token[0]))
    whole = Template(
        np.array([box.source for box in group.boxes], np.int64),
        np.array([box.destination for box in group.boxes], np.int64),
        np.zeros(len(group.boxes), np.int64),
    )
    yield from _outer(group, source, destination, whole, length, limit)


def _common(ordered: Int64s, others: Int64s) -> Int64s:
    """Returns the values of `ordered` that are also in `others`."""
    others = np.sort(others)
    return ordered[np.searchsorted(others, ordered, "left") < np.searchsorted(others, ordered, "right")]


def _templated(group: BoxClass, stretch: Segments, num_tokens: int, limit: int) -> Iterator[Runs]:
    """Yields the runs of stretches that are all `num_tokens` long."""
    if not len(stretch):
        return
    source, destination = _by_source(*_starts(group, stretch))
    steps = np.diff(source)
    steps = np.where(steps == np.diff(destination), steps, -1)
    repeated = distinct(steps[steps > 0])
    for template in templates(group, num_tokens, limit):
        unmerged = np.ones(len(template.length), np.bool_)
        # (np.intersect1d would import numpy.ma at its first call: 20 ms or more, in the first hand-off of a process.)
        for step in _common(repeated, template.length):
            # If stretches are as far apart as run k is long, then run k of each is contiguous with run k of the next.
            mask = template.length == step
            unmerged &= ~mask
            heads = np.concatenate(([0], np.flatnonzero(steps != step) + 1))
            length = np.diff(np.append(heads, len(source))) * int(step)
            merged = Template(template.source[mask], template.destination[mask], np.zeros(int(mask.sum()), np.int64))
            yield from _outer(group, source[heads], destination[heads], merged, length, limit)
        if unmerged.all():
            yield from _outer(group, source, destination, template, None, limit)
        elif unmerged.any():
            rest = Template(template.source[unmerged], template.destination[unmerged], template.length[unmerged])
            yield from _outer(group, source, destination, rest, None, limit)


def _outer(
    group: BoxClass, source: Int64s, destination: Int64s, template: Template, length: Int64s | None, limit: int
) -> Iterator[Runs]:
    """Yields every stretch with every run of the template, at most `limit` runs per piece.

    `length` is the length of the runs, one per stretch; None means the template's own.
    """
    width = len(template.length)
    for left in range(0, width, limit):
        columns = slice(left, min(width, left + limit))
        across = columns.stop - columns.start
        rows = max(1, limit // across)
        for top in range(0, len(source), rows):
            down = slice(top, min(len(source), top + rows))
            shape = (down.stop - down.start, across)
            lengths = np.empty(shape, np.int64)
            lengths[:] = template.length[columns] if length is None else length[down, None]
            yield Runs(
                group.source_region,
                group.destination_region,
                (source[down, None] + template.source[columns]).reshape(-1),
                (destination[down, None] + template.destination[columns]).reshape(-1),
                lengths.reshape(-1),
            )
