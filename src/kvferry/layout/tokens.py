"""Finds which stretch of a request's tokens is in which block on both sides, by absolute position.

Tables may come from a peer: every id and position is checked here before it is used, and MalformedMessage gives the
value and the allowed range.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
import numpy.typing as npt

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.description import CacheLayout, Rank, Tensor
from kvferry.layout.edge import Edge, GroupPair
from kvferry.layout.sharing import Lane, shared_lanes

__all__ = [
    "MAX_TOKENS",
    "Holder",
    "Lookup",
    "Segments",
    "Span",
    "check_held",
    "check_spans",
    "distinct",
    "holder",
    "lookup",
    "segments",
    "shared_span",
]

Int64s = npt.NDArray[np.int64]
MAX_TOKENS = 1 << 40
"""The largest position."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens [start, stop) of one group pair that are moved. For a state it is [n, n), and `moved` says whether."""

    start: int
    stop: int
    moved: bool


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of tokens, each inside one block on both sides, in the order of their positions.

    A stretch is `count` tokens long, and is located by a block id and a token in that block on each side. For whole
    blocks the tokens are 0 and the count is 1 (block).
    """

    source_block: Int64s
    source_token: Int64s
    destination_block: Int64s
    destination_token: Int64s
    count: Int64s

    def __len__(self) -> int:
        return len(self.count)


@dataclass(frozen=True, slots=True)
class Holder:
    """One side's checked table of one group, and which tokens its rank holds."""

    side: str
    ids: Int64s
    first_token: int
    block_tokens: int
    """0 for a state."""
    cp_rank: int
    cp_size: int
    cp_run: int

    @property
    def first_local(self) -> int:
        """The number of this rank's tokens that come before the table's first one."""
        return int(self.local(np.array([self.first_token], np.int64))[0])

    @property
    def end(self) -> int:
        """The first position of this rank that the table does not hold."""
        if self.cp_size == 1:
            return self.first_token + len(self.ids) * self.block_tokens
        last = self.first_local + len(self.ids) * self.block_tokens
        return int(self.position(np.array([last], np.int64))[0])

    def local(self, positions: Int64s) -> Int64s:
        """Returns the number of this rank's tokens that come before each position."""
        if self.cp_size == 1:
            return positions
        rounds, rest = np.divmod(positions, self.cp_size * self.cp_run)
        before: Int64s = rounds * self.cp_run + np.clip(rest - self.cp_rank * self.cp_run, 0, self.cp_run)
        return before

    def position(self, local: Int64s) -> Int64s:
        """Returns the absolute positions of this rank's i-th tokens."""
        if self.cp_size == 1:
            return local
        rounds, rest = np.divmod(local, self.cp_run)
        return rounds * (self.cp_size * self.cp_run) + self.cp_rank * self.cp_run + rest

    def owns(self, positions: Int64s) -> npt.NDArray[np.bool_]:
        """Returns whether each position is one of this rank's."""
        owned: npt.NDArray[np.bool_] = (positions // self.cp_run) % self.cp_size == self.cp_rank
        return owned

    def block_starts(self, start: int, stop: int) -> Int64s:
        """Returns the absolute positions in (start, stop) at which one of this table's blocks begins."""
        low, high = (int(n) for n in self.local(np.array([start, stop], np.int64)))
        phase = self.first_local % self.block_tokens
        first = low + (phase - low) % self.block_tokens
        return self.position(np.arange(first, high, self.block_tokens, dtype=np.int64))

    def run_starts(self, start: int, stop: int) -> Int64s:
        """Returns the absolute positions in [start, stop) from which on the tokens belong to another rank."""
        if self.cp_size == 1:
            return np.empty(0, np.int64)
        return np.arange(-(-start // self.cp_run) * self.cp_run, stop, self.cp_run, dtype=np.int64)


def distinct(values: Int64s) -> Int64s:
    """Returns each value once, in order. (np.unique hashes first, which costs more than sorting at our sizes.)"""
    ordered = np.sort(values)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if len(ordered) else ordered


@dataclass(frozen=True, slots=True)
class Lookup:
    """What every request needs to know about a layout."""

    num_blocks: dict[int, int]
    """Maps a group to a number of blocks: ids below it are valid in every tensor of the group."""
    tensors: dict[tuple[str, str], Tensor]
    """Maps (layer, part) to its tensor."""
    shared: tuple[tuple[Lane, ...], ...]
    """The lanes of cache groups that share pages."""


_lookups: dict[int, Lookup] = {}


def lookup(layout: CacheLayout) -> Lookup:
    """Returns the lookup of a layout, made once per layout. It is cached by identity, because comparing is slower."""
    found = _lookups.get(id(layout))
    if found is None:
        num_blocks: dict[int, int] = {}
        for tensor in layout.tensors:
            num_blocks[tensor.group] = min(num_blocks.get(tensor.group, MAX_TOKENS), tensor.paging.num_blocks)
        by_name = {(tensor.layer, tensor.part): tensor for tensor in layout.tensors}
        found = Lookup(num_blocks, by_name, shared_lanes(layout))
        _lookups[id(layout)] = found
        # A peer's layout is forgotten with the peer (I5), and before another layout can get the same id().
        weakref.finalize(layout, _lookups.pop, id(layout), None).atexit = False
    return found


def holder(side: str, layout: CacheLayout, tables: Sequence[BlockTable], group: int) -> Holder:
    """Finds and checks the table of one group. Raises MalformedMessage, whose text names the `side`."""
    found: BlockTable | None = None
    for table in tables:
        if not 0 <= table.group < len(layout.groups):
            raise MalformedMessage(
                f"{side} block table: group is {table.group!r}; the layout has {len(layout.groups)} groups"
            )
        if table.group == group:
            if found is not None:
                raise MalformedMessage(f"{side} block table: group {group} has two tables")
            found = table
    if found is None:
        raise MalformedMessage(f"{side} block table: group {group} has no table")
    if not 0 <= found.first_token <= MAX_TOKENS:
        raise MalformedMessage(
            f"{side} block table of group {group}: first_token is {found.first_token!r}; "
            f"it must be between 0 and {MAX_TOKENS}"
        )
    limit = lookup(layout).num_blocks[group]
    rank = layout.rank
    return Holder(
        side=side,
        ids=_checked_ids(side, found, limit),
        first_token=found.first_token,
        block_tokens=layout.groups[group].block_tokens,
        **_cp_fields(rank),
    )


def _cp_fields(rank: Rank) -> dict[str, int]:
    return {"cp_rank": rank.cp_rank, "cp_size": rank.cp_size, "cp_run": rank.cp_run_tokens if rank.cp_size > 1 else 1}


def _checked_ids(side: str, table: BlockTable, limit: int) -> Int64s:
    where = f"{side} block table of group {table.group}"
    try:
        ids = np.asarray(table.block_ids, np.int64).reshape(-1) if len(table.block_ids) else np.empty(0, np.int64)
    except (OverflowError, ValueError, TypeError) as error:
        raise MalformedMessage(f"{where}: block ids must be whole numbers below 2**63: {error}") from error
    if len(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= limit:
            raise MalformedMessage(f"{where}: block id {low if low < 0 else high} is not in [0, {limit})")
        ordered = np.sort(ids)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise MalformedMessage(f"{where}: block id {int(twice[0])} is listed twice")
    return ids


def shared_span(edge: Edge, pair: GroupPair, source: Holder, destination: Holder, wanted: TokenRange, end: int) -> Span:
    """Returns which tokens of this group pair move. Raises MalformedMessage if a needed token lacks a block on a side.

    `end` is the token from which the destination will compute: it decides what a window still needs, and it is the
    token whose state is needed.
    """
    if pair.state:
        return _shared_state(edge, pair, source, destination, wanted, end)
    if pair.whole and source.cp_rank == destination.cp_rank:
        _check_phase(source, destination)
    start = max(wanted.start, source.first_token, destination.first_token)
    stop = max(start, min(wanted.stop, source.end, destination.end))
    window = edge.destination.groups[pair.destination].window_tokens
    needed = wanted.start if window is None else max(wanted.start, min(wanted.stop, end - window + 1))
    for low, high in ((needed, min(start, wanted.stop)), (max(stop, needed), wanted.stop)):
        missing = _first_common(source, destination, low, high)
        if missing is not None:
            raise MalformedMessage(_missing(edge, pair, source, destination, missing, TokenRange(needed, wanted.stop)))
    return Span(start, stop, stop > start)


def _shared_state(
    edge: Edge, pair: GroupPair, source: Holder, destination: Holder, wanted: TokenRange, end: int
) -> Span:
    if wanted.stop < end or wanted.stop <= wanted.start:
        return Span(end, end, False)
    for side, group in ((source, pair.source), (destination, pair.destination)):
        if len(side.ids) != 1:
            raise MalformedMessage(
                f"{side.side} block table of state group {group}: {len(side.ids)} slots; a request has one state"
            )
        if side.first_token != end:
            layer = next(
                s.layer for s in edge.slices if edge.destination.tensors[s.destination_tensor].group == pair.destination
            )
            raise MalformedMessage(
                f"layer {layer!r}: the {side.side}'s state is the one after token {side.first_token}; "
                f"the one after token {end} is needed. Prefill must compute exactly the tokens that decode asks for"
            )
    return Span(end, end, True)


def _check_phase(source: Holder, destination: Holder) -> None:
    offset = source.first_local - destination.first_local
    if offset % source.block_tokens:
        raise MalformedMessage(
            f"blocks that move whole begin at token {source.first_token} on the source and at token "
            f"{destination.first_token} on the destination; they must be a multiple of {source.block_tokens} apart"
        )


def _first_common(source: Holder, destination: Holder, start: int, stop: int) -> int | None:
    """Returns the first position in [start, stop) that belongs to both ranks, or None."""
    if start >= stop:
        return None
    if source.cp_size == destination.cp_size == 1:
        return start
    # Both patterns repeat after this many tokens, so there is no need to search further, however distant `stop` is.
    stop = min(stop, start + lcm(source.cp_size * source.cp_run, destination.cp_size * destination.cp_run))
    marks = distinct(np.concatenate(([start], source.run_starts(start, stop), destination.run_starts(start, stop))))
    common = marks[source.owns(marks) & destination.owns(marks)]
    return int(common[0]) if len(common) else None


def _missing(
    edge: Edge, pair: GroupPair, source: Holder, destination: Holder, position: int, needed: TokenRange
) -> str:
    piece = next(
        s
        for s in edge.slices
        if edge.destination.tensors[s.destination_tensor].group == pair.destination
        and edge.source.tensors[s.source_tensor].group == pair.source
    )
    lacking, group = (
        (source, pair.source) if not source.first_token <= position < source.end else (destination, pair.destination)
    )
    return (
        f"layer {piece.layer!r}: tokens [{needed.start}, {needed.stop}) are needed, but the {lacking.side} block table "
        f"of group {group} holds [{lacking.first_token}, {lacking.end}): token {position} has no block"
    )


def check_spans(edge: Edge, spans: Sequence[Span]) -> None:
    """Checks spans that a peer sent: one per group pair, inside [0, MAX_TOKENS]. Raises MalformedMessage."""
    pairs = edge.compiled.pairs
    if len(spans) != len(pairs):
        raise MalformedMessage(
            f"{len(spans)} token spans for {len(pairs)} pairs of cache groups; one per pair is needed"
        )
    for span in spans:
        if not 0 <= span.start <= span.stop <= MAX_TOKENS:
            raise MalformedMessage(f"token span [{span.start}, {span.stop}) is not inside [0, {MAX_TOKENS}]")


def check_held(pair: GroupPair, table: Holder, span: Span) -> None:
    """Raises MalformedMessage unless the table has a block for every token of the span."""
    if pair.state:
        if len(table.ids) != 1 or table.first_token != span.start:
            raise MalformedMessage(
                f"{table.side} block table of a state has {len(table.ids)} slots, after token {table.first_token}; "
                f"one slot, after token {span.start}, is needed"
            )
    elif not table.first_token <= span.start <= span.stop <= table.end:
        raise MalformedMessage(
            f"{table.side} block table holds tokens [{table.first_token}, {table.end}); "
            f"[{span.start}, {span.stop}) are needed"
        )


def segments(pair: GroupPair, source: Holder, destination: Holder, span: Span) -> Segments:
    """Cuts a span at every block boundary of both sides. shared_span has checked the positions."""
    if pair.state:
        zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        return Segments(source.ids[:1], zero, destination.ids[:1], zero, one)
    if pair.whole:
        return _whole_blocks(source, destination, span)
    start, stop = span.start, span.stop
    marks = [source.block_starts(start, stop), destination.block_starts(start, stop)]
    same_pattern = (source.cp_size, source.cp_run) == (destination.cp_size, destination.cp_run)
    if not same_pattern or source.cp_rank != destination.cp_rank:
        marks += [source.run_starts(start, stop), destination.run_starts(start, stop)]
    first = source.position(source.local(np.array([start], np.int64))) if same_pattern else np.array([start], np.int64)
    begin = distinct(np.concatenate((first, *marks)))
    begin = begin[begin < stop]
    finish = np.append(begin[1:], stop)[: len(begin)]
    if source.cp_size > 1 or destination.cp_size > 1:
        keep = source.owns(begin) & destination.owns(begin)
        begin, finish = begin[keep], finish[keep]
    source_local = source.local(begin) - source.first_local
    destination_local = destination.local(begin) - destination.first_local
    count = source.local(finish) - source.local(begin)
    source_index, source_token = np.divmod(source_local, source.block_tokens)
    destination_index, destination_token = np.divmod(destination_local, destination.block_tokens)
    if len(count) > 1:
        # Stretches that are contiguous inside both blocks become one (this happens with context parallelism).
        follows = (
            (source_local[:-1] + count[:-1] == source_local[1:])
            & (destination_local[:-1] + count[:-1] == destination_local[1:])
            & (source_token[1:] != 0)
            & (destination_token[1:] != 0)
        )
        if follows.any():
            heads = np.concatenate(([0], np.flatnonzero(~follows) + 1))
            count = np.add.reduceat(count, heads)
            source_index, source_token = source_index[heads], source_token[heads]
            destination_index, destination_token = destination_index[heads], destination_token[heads]
    return Segments(
        source.ids[source_index], source_token, destination.ids[destination_index], destination_token, count
    )


def _whole_blocks(source: Holder, destination: Holder, span: Span) -> Segments:
    """Returns the whole blocks that hold any token of the span.

    Pairing has checked that both sides have the same block size and context parallelism.
    """
    low, high = (int(n) for n in source.local(np.array([span.start, span.stop], np.int64)))
    if source.cp_rank != destination.cp_rank or low >= high:
        empty = np.empty(0, np.int64)
        return Segments(empty, empty, empty, empty, empty)
    offset = source.first_local - destination.first_local
    first = (low - source.first_local) // source.block_tokens
    last = -(-(high - source.first_local) // source.block_tokens)
    index = np.arange(first, last, dtype=np.int64)
    zeros = np.zeros(len(index), np.int64)
    return Segments(source.ids[index], zeros, destination.ids[index + offset // source.block_tokens], zeros, zeros + 1)
