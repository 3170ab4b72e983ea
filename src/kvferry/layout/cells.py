"""Cells: pieces of KV whose names mean the same bytes in every layout, to compare what landed with what was sent.

A cell is a layer, a part, a stretch of tokens and a range on every inner axis. Its bytes have one order, whatever the
strides: by token, then by the axes as the cell lists them. Both sides derive the same cells from a transfer id, find
them in their own memory with `cell_runs`, and hash them. A packing that moves in whole blocks is compared by the whole
blocks inside the tokens; a state is compared as a whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.description import Axis, CacheKind, CacheLayout, Rank, Tensor
from kvferry.layout.edge import Edge, GroupPair
from kvferry.layout.tokens import MAX_TOKENS, Holder, holder, lookup

__all__ = ["Cell", "CellRuns", "all_cells", "cell_runs", "sample_cells"]

Int64s = npt.NDArray[np.int64]

MAX_CELL_RUNS = 1 << 22
"""A cell that consists of more pieces is refused."""
MAX_TRIES = 64


@dataclass(frozen=True, slots=True)
class Cell:
    """One piece of KV, by name: plain values only, so that it can be sent. Hostile until cell_runs has checked it."""

    layer: str
    part: str
    start: int
    """The first token; for a state, the n of "the state after token n"."""
    stop: int
    """One past the last token; for a state, n again."""
    ranges: tuple[tuple[str, int, int], ...]
    """(axis, first, one past the last), outermost first."""


@dataclass(frozen=True, slots=True)
class CellRuns:
    """The bytes of a cell in one rank's memory, in the cell's order."""

    region: int
    offset: Int64s
    length: Int64s

    @property
    def num_bytes(self) -> int:
        """The size of the cell."""
        return int(self.length.sum())


def cell_runs(
    layout: CacheLayout,
    tables: Sequence[BlockTable],
    cell: Cell,
    *,
    side: str = "local",
    checked: dict[int, Holder] | None = None,
) -> CellRuns:
    """Returns where a cell is in this rank's memory.

    Pass the same `checked` dict for many cells of the same tables, so that each group's table is checked only once.
    Raises MalformedMessage if the rank or the tables do not hold all of the cell.
    """
    where = f"cell of layer {cell.layer!r} part {cell.part!r}"
    tensor = lookup(layout).tensors.get((cell.layer, cell.part))
    if tensor is None:
        raise MalformedMessage(f"{where}: rank {layout.rank.index} has no such tensor")
    held = None if checked is None else checked.get(tensor.group)
    if held is None:
        held = holder(side, layout, tables, tensor.group)
        if checked is not None:
            checked[tensor.group] = held
    starts = _starts(where, layout, tensor, held, cell)
    run, offsets = _inner(where, tensor, cell, MAX_CELL_RUNS // max(1, len(starts)))
    offset = (starts[:, None] + offsets).reshape(-1)
    follows = offset[1:] == offset[:-1] + run
    heads = np.concatenate(([0], np.flatnonzero(~follows) + 1)) if len(offset) else np.empty(0, np.int64)
    return CellRuns(tensor.region, offset[heads], np.diff(np.append(heads, len(offset))) * run)


def _starts(where: str, layout: CacheLayout, tensor: Tensor, held: Holder, cell: Cell) -> Int64s:
    """Returns the byte at which each token, block or state of the cell begins."""
    stride = tensor.paging.block_stride_bytes
    if layout.groups[tensor.group].kind is CacheKind.STATE:
        if len(held.ids) != 1 or not held.first_token == cell.start == cell.stop:
            raise MalformedMessage(
                f"{where}: it is the state after token {cell.start}, but rank {layout.rank.index} has {len(held.ids)} "
                f"states, after token {held.first_token}"
            )
        return np.asarray(tensor.offset_bytes + held.ids * stride, np.int64)
    if not held.first_token <= cell.start < cell.stop <= held.end:
        raise MalformedMessage(
            f"{where}: tokens [{cell.start}, {cell.stop}) are not in the table, which holds "
            f"[{held.first_token}, {held.end})"
        )
    low, high = (int(n) - held.first_local for n in held.local(np.array([cell.start, cell.stop], np.int64)))
    if tensor.paging.token_stride_bytes is None:
        inside: Int64s = held.ids[-(-low // held.block_tokens) : high // held.block_tokens]
        return np.asarray(tensor.offset_bytes + inside * stride, np.int64)
    index, token = np.divmod(np.arange(low, high, dtype=np.int64), held.block_tokens)
    first: Int64s = tensor.offset_bytes + held.ids[index] * stride + token * tensor.paging.token_stride_bytes
    return first


def _inner(where: str, tensor: Tensor, cell: Cell, limit: int) -> tuple[int, Int64s]:
    """Returns (run, offsets) of the inner elements, in the cell's order."""
    axes = {axis.name: axis for axis in tensor.axes}
    if sorted(name for name, _, _ in cell.ranges) != sorted(axes):
        raise MalformedMessage(
            f"{where}: its axes are {[name for name, _, _ in cell.ranges]!r}; the tensor has {sorted(axes)!r}"
        )
    run = tensor.element_bytes
    outer: list[tuple[Axis, int, int]] = []
    offset = 0
    count = 1
    for name, start, stop in cell.ranges:
        axis = axes[name]
        if not axis.start <= start < stop <= axis.stop:
            raise MalformedMessage(f"{where}: {name} [{start}, {stop}) is not inside [{axis.start}, {axis.stop})")
        offset += (start - axis.start) * axis.stride_bytes
        outer.append((axis, start, stop))
    while outer and (outer[-1][0].stride_bytes == run or outer[-1][2] - outer[-1][1] == 1):
        _, start, stop = outer.pop()
        run *= stop - start
    offsets = np.array([offset], np.int64)
    for axis, start, stop in outer:
        count *= stop - start
        if count > limit:
            raise MalformedMessage(f"{where}: more than {limit} pieces per token")
        offsets = (offsets[:, None] + np.arange(stop - start, dtype=np.int64) * axis.stride_bytes).reshape(-1)
    return run, offsets


def sample_cells(seed: str, edge: Edge, tokens: TokenRange, count: int, *, end: int | None = None) -> list[Cell]:
    """Returns up to `count` cells of one token and one index of the first axis (a head) each, the same on both sides.

    They depend on the seed (the transfer id), the names and ranges of the edge's slices, the tokens, and the token from
    which the destination computes (`end`, or tokens.stop if None; see planning.plan), but not on strides or tables.
    Cells that are outside a window, and states of another chunk, are not drawn, so there may be fewer than `count`.
    """
    found: dict[Cell, None] = {}
    names = [(piece.layer, piece.part, piece.ranges) for piece in edge.slices]
    slices = sorted(range(len(names)), key=names.__getitem__)
    for number in range(count):
        for attempt in range(MAX_TRIES):
            draw = _Draw(f"{seed}/{number}/{attempt}")
            cell = _draw_cell(edge, slices[draw.below(len(slices))], tokens, tokens.stop if end is None else end, draw)
            if cell is not None:
                found[cell] = None
                break
    return list(found)


def all_cells(edge: Edge, tokens: TokenRange, *, end: int | None = None, max_tokens: int = 1024) -> Iterator[Cell]:
    """Yields cells that together are everything that the edge must bring for these tokens; `end` as in sample_cells."""
    final = tokens.stop if end is None else end
    for index, piece in enumerate(edge.slices):
        pair = edge.compiled.boxes[index][0]
        destination = edge.destination.tensors[piece.destination_tensor]
        ranges = tuple((axis.name, *bounds) for axis, bounds in zip(destination.axes, piece.ranges, strict=True))
        if pair.state:
            if tokens.start < tokens.stop == final:
                yield Cell(piece.layer, piece.part, final, final, ranges)
            continue
        for start, stop in _common(edge, pair, _needed(edge, pair, tokens, final)):
            step = max_tokens if not pair.whole else stop - start
            for low in range(start, stop, step):
                yield Cell(piece.layer, piece.part, low, min(stop, low + step), ranges)


class _Draw:
    """Pseudo-random numbers derived from a text, the same on every machine."""

    def __init__(self, text: str) -> None:
        self._remaining = int.from_bytes(blake2b(text.encode(), digest_size=32).digest(), "big")

    def below(self, limit: int) -> int:
        self._remaining, number = divmod(self._remaining, limit)
        return number


def _draw_cell(edge: Edge, index: int, tokens: TokenRange, end: int, draw: _Draw) -> Cell | None:
    piece = edge.slices[index]
    pair = edge.compiled.boxes[index][0]
    axes = edge.destination.tensors[piece.destination_tensor].axes
    ranges = [(axis.name, start, stop) for axis, (start, stop) in zip(axes, piece.ranges, strict=True)]
    if len(ranges) > 1 and not axes[0].atomic:
        name, start, stop = ranges[0]
        one = start + draw.below(stop - start)
        ranges[0] = (name, one, one + 1)
    if pair.state:
        whole = tokens.start < tokens.stop == end
        return Cell(piece.layer, piece.part, end, end, tuple(ranges)) if whole else None
    needed = _needed(edge, pair, tokens, end)
    if not len(needed):
        return None
    token = needed.start + draw.below(len(needed))
    span = TokenRange(token, token + 1)
    if pair.whole:
        # The span must be long enough to hold a whole block, wherever blocks begin.
        reach = _period(edge, pair)
        span = TokenRange(max(needed.start, token - reach), min(needed.stop, token + reach))
    common = next(_common(edge, pair, span), None)
    return None if common is None else Cell(piece.layer, piece.part, *common, tuple(ranges))


def _period(edge: Edge, pair: GroupPair) -> int:
    return edge.destination.groups[pair.destination].block_tokens * edge.destination.rank.cp_size


def _needed(edge: Edge, pair: GroupPair, tokens: TokenRange, end: int) -> TokenRange:
    """Returns the tokens that must move whatever the tables hold: those still in the destination's window."""
    window = edge.destination.groups[pair.destination].window_tokens
    low = tokens.start if window is None else max(tokens.start, end - window + 1)
    return TokenRange(min(low, tokens.stop), tokens.stop)


def _common(edge: Edge, pair: GroupPair, tokens: TokenRange) -> Iterator[tuple[int, int]]:
    """Yields stretches of tokens that both ranks hold.

    If both sides deal tokens out in the same way, it is one stretch in which other ranks' tokens are skipped.
    """
    source, destination = _any_table(edge.source.rank), _any_table(edge.destination.rank)
    if not len(tokens):
        return
    start, stop = tokens.start, tokens.stop
    if (source.cp_size, source.cp_run) == (destination.cp_size, destination.cp_run):
        low, high = (int(n) for n in source.local(np.array([start, stop], np.int64)))
        if source.cp_rank == destination.cp_rank and low < high:
            yield start, stop
        return
    marks = np.unique(np.concatenate(([start], source.run_starts(start, stop), destination.run_starts(start, stop))))
    for begin, finish in zip(marks, [*marks[1:], stop], strict=True):
        if source.owns(begin) and destination.owns(begin):
            yield int(begin), int(finish)


def _any_table(rank: Rank) -> Holder:
    """Returns a table that holds all tokens of a rank."""
    return Holder("", np.zeros(1, np.int64), 0, MAX_TOKENS, rank.cp_rank, rank.cp_size, rank.cp_run_tokens)
