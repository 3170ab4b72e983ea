"""Which bytes go where for one request: an edge and both sides' block tables in, byte runs out.

The runs come in pieces of bounded size, so that a plan of any length needs bounded memory. Inside a block, all runs of
an edge are a template that is made once and shifted from block to block; stretches of blocks that follow on in both
caches become one run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, Runs, TokenRange
from kvferry.layout.edge import BoxClass, GroupPair, Template, merge_neighbours, templates
from kvferry.layout.sharing import check_groups_apart
from kvferry.layout.tokens import MAX_TOKENS, Holder, Segments, Span, distinct, holder, lookup, segments, shared_span

if TYPE_CHECKING:
    from kvferry.layout.pairing import Edge

__all__ = ["MAX_RUNS_PER_PIECE", "Move", "moves", "plan"]

Int64s = npt.NDArray[np.int64]

MAX_RUNS_PER_PIECE = 1 << 20
"""24 MiB of runs a piece."""


@dataclass(frozen=True, slots=True)
class Move:
    """What one group pair of an edge moves for one request."""

    pair: GroupPair
    source: Holder
    destination: Holder
    span: Span


def moves(
    edge: "Edge",
    source_tables: Sequence[BlockTable],
    destination_tables: Sequence[BlockTable],
    wanted: TokenRange,
    *,
    end: int | None = None,
) -> list[Move]:
    """Check the tables and find which tokens each group pair moves. See plan() for the arguments and errors."""
    if not 0 <= wanted.start <= wanted.stop <= MAX_TOKENS:
        raise MalformedMessage(f"wanted tokens [{wanted.start}, {wanted.stop}) are not inside [0, {MAX_TOKENS}]")
    final = wanted.stop if end is None else end
    if final < wanted.stop:
        raise MalformedMessage(f"wanted tokens stop at {wanted.stop}, beyond the end of the hand-off, {final}")
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
        near, far = holders["source", pair.source], holders["destination", pair.destination]
        result.append(Move(pair, near, far, shared_span(edge, pair, near, far, wanted, final)))
    for side, layout in (("source", edge.source), ("destination", edge.destination)):
        if shared := lookup(layout).shared:
            check_groups_apart(side, shared, {group: each.ids for (at, group), each in holders.items() if at == side})
    return [move for move in result if move.span.moved]


def plan(
    edge: "Edge",
    source_tables: Sequence[BlockTable],
    destination_tables: Sequence[BlockTable],
    wanted: TokenRange,
    *,
    end: int | None = None,
    max_runs_per_piece: int = MAX_RUNS_PER_PIECE,
    pad_tail: bool = False,
) -> Iterator[Runs]:
    """The byte runs that bring `wanted` over this edge, in pieces of one region pair and bounded length each.

    `end` is the token where the destination will go on computing, wanted.stop if None: a hand-off that moves in chunks
    gives the end of the last one. Windows are judged there, and states move with the chunk that ends there. Tokens
    before a window are moved where both tables have them.

    `pad_tail`: a last block that is wanted in part, from its first token on, is moved whole where both sides have
    blocks of one size. What lies behind `wanted.stop` in it must be the request's own on the destination, and not
    computed yet. Where a block's tokens are not its outermost axis that is one run in place of hundreds.

    Raises MalformedMessage where a table is wrong (ids out of range or repeated, a page that another group's table
    lists too, no table) or lacks a needed position; before the first piece, so that nothing is copied for a request
    that cannot be served.
    """
    todo = {move.pair: move for move in moves(edge, source_tables, destination_tables, wanted, end=end)}
    return _pieces(edge, todo, max(1, max_runs_per_piece), pad_tail)


def _pieces(edge: "Edge", todo: dict[GroupPair, Move], limit: int, pad_tail: bool) -> Iterator[Runs]:
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
    """The last stretch up to the end of its block, where it begins with that block on both sides."""
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
    """The shift of each stretch on either side."""
    source = stretch.source_block * group.source_block
    destination = stretch.destination_block * group.destination_block
    if group.token is not None:
        source = source + stretch.source_token * group.token[0]
        destination = destination + stretch.destination_token * group.token[1]
    return source, destination


def _by_source(source: Int64s, destination: Int64s, *more: Int64s) -> tuple[Int64s, ...]:
    """Sorted by source, so that blocks that were handed out in any order are found to follow on."""
    if len(source) > 1 and (np.diff(source) < 0).any():
        order = np.argsort(source, kind="stable")
        return tuple(array[order] for array in (source, destination, *more))
    return (source, destination, *more)


def _linear(group: BoxClass, stretch: Segments, limit: int) -> Iterator[Runs]:
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
    """Those of `ordered` that are among the others."""
    others = np.sort(others)
    return ordered[np.searchsorted(others, ordered, "left") < np.searchsorted(others, ordered, "right")]


def _templated(group: BoxClass, stretch: Segments, num_tokens: int, limit: int) -> Iterator[Runs]:
    if not len(stretch):
        return
    source, destination = _by_source(*_starts(group, stretch))
    steps = np.diff(source)
    steps = np.where(steps == np.diff(destination), steps, -1)
    repeated = distinct(steps[steps > 0])
    for template in templates(group, num_tokens, limit):
        left = np.ones(len(template.length), np.bool_)
        # (np.intersect1d would import numpy.ma at its first call: 20 ms and more, in the first hand-off of a process.)
        for step in _common(repeated, template.length):
            # Run k of a stretch is followed by run k of the next one, if the stretches are its length apart.
            mine = template.length == step
            left &= ~mine
            heads = np.concatenate(([0], np.flatnonzero(steps != step) + 1))
            length = np.diff(np.append(heads, len(source))) * int(step)
            some = Template(template.source[mine], template.destination[mine], np.zeros(int(mine.sum()), np.int64))
            yield from _outer(group, source[heads], destination[heads], some, length, limit)
        if left.all():
            yield from _outer(group, source, destination, template, None, limit)
        elif left.any():
            rest = Template(template.source[left], template.destination[left], template.length[left])
            yield from _outer(group, source, destination, rest, None, limit)


def _outer(
    group: BoxClass, source: Int64s, destination: Int64s, template: Template, length: Int64s | None, limit: int
) -> Iterator[Runs]:
    """Every stretch with every run of the template; `length` a stretch, or the template's. At most `limit` a piece."""
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
