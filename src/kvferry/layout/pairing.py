"""Which part of which tensor comes from which rank: two engines' layouts, intersected by name.

A pairing is computed alike on both sides: it depends on the layouts only. Every byte that the destination rank has is
covered by exactly one edge, or the answer is a refusal that names layer, part and range (R18, R19, R22, R23).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import lcm

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.layout.description import Axis, CacheGroup, CacheKind, CacheLayout, Rank, Tensor
from kvferry.layout.edge import Compiled, compile_edge

__all__ = ["Edge", "Pairing", "TensorSlice", "pair"]

MAX_PIECES = 65536
"""A tensor that would be cut into more pieces than this is refused."""
MAX_LOOKS = 1 << 20
"""Pieces times ranks that offer the tensor, over all tensors that are cut in ways of their own: about a second's work.
A fleet of 512 ranks that splits 64 heads takes a thirtieth of it for each pipeline stage."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of one tensor that goes over one edge: for each axis of the destination, in its order, a global range."""

    layer: str
    part: str
    source_tensor: int
    """Index into the source layout's tensors."""
    destination_tensor: int
    ranges: Ranges


@dataclass(frozen=True)
class Edge:
    """Everything that one source rank gives to one destination rank. At least one slice."""

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
        """The slices as strided boxes, made once and kept: for planning and packing."""
        return compile_edge(self)


@dataclass(frozen=True)
class Pairing:
    """From where one destination rank gets its cache; edges in the order of their source ranks."""

    destination: CacheLayout
    edges: tuple[Edge, ...]

    def edge_from(self, source_rank: int) -> Edge | None:
        """The edge from the rank with this Rank.index, or None where that rank owes us nothing."""
        return next((edge for edge in self.edges if edge.source_rank == source_rank), None)


@dataclass(frozen=True, slots=True)
class _Offer:
    source: int
    """Position in the sources, which are in the order of Rank.index."""
    tensor: int


def pair(sources: Sequence[CacheLayout], destination: CacheLayout) -> Pairing:
    """Cover every byte of `destination` (one rank that wants KV) from `sources` (all ranks of the engine that has it).

    Raises IncompatiblePeer where a byte has no source, or where the two sides mean different things by it, and
    MalformedMessage where the sources contradict each other. Layers that only the sources have are ignored.
    """
    ordered = sorted(sources, key=lambda layout: layout.rank.index)
    _check_engine(ordered)
    offers: dict[tuple[str, str], list[_Offer]] = {}
    for position, layout in enumerate(ordered):
        for index, tensor in enumerate(layout.tensors):
            offers.setdefault((tensor.layer, tensor.part), []).append(_Offer(position, index))
    slices: dict[int, list[TensorSlice]] = {}
    covers = _Covers(ordered, destination)
    for index in _without_aliases(destination, ordered, offers):
        tensor = destination.tensors[index]
        found = offers.get((tensor.layer, tensor.part))
        if not found:
            raise IncompatiblePeer(_not_offered(tensor, offers))
        for offer, ranges in covers.cover(tensor, found):
            slices.setdefault(offer.source, []).append(
                TensorSlice(tensor.layer, tensor.part, offer.tensor, index, ranges)
            )
    return Pairing(
        destination, tuple(Edge(ordered[source], destination, tuple(slices[source])) for source in sorted(slices))
    )


def _check_engine(sources: Sequence[CacheLayout]) -> None:
    if not sources:
        raise MalformedMessage("the engine that has the KV names no ranks")
    sizes = {(layout.rank.cp_size, layout.rank.cp_run_tokens) for layout in sources}
    if len(sizes) > 1:
        raise MalformedMessage(f"ranks of one engine deal out tokens differently: (cp_size, run) are {sorted(sizes)!r}")
    seen: dict[tuple[int, int, int], int] = {}
    for previous, layout in zip([None, *sources], sources, strict=False):
        rank = layout.rank
        if previous is not None and previous.rank.index == rank.index:
            raise MalformedMessage(f"two ranks of one engine have the index {rank.index}")
        place = (rank.pp_rank, rank.tp_rank, rank.cp_rank)
        if place in seen:
            raise MalformedMessage(f"ranks {seen[place]} and {rank.index} are both at (pp, tp, cp) = {place!r}")
        seen[place] = rank.index


def _not_offered(tensor: Tensor, offers: Mapping[tuple[str, str], object]) -> str:
    parts = sorted(part for layer, part in offers if layer == tensor.layer)
    have = f"it offers parts {parts!r} of that layer" if parts else "it offers no part of that layer"
    return (
        f"layer {tensor.layer!r} part {tensor.part!r} is not offered by any rank of the peer: {have}. "
        "Serve the same model, with the same draft model, on both sides"
    )


def _without_aliases(
    destination: CacheLayout, sources: Sequence[CacheLayout], offers: Mapping[tuple[str, str], Sequence[_Offer]]
) -> Iterable[int]:
    """Of layers that share another layer's cache, one: it brings the bytes of all. Checks that the peer shares too."""
    same: dict[object, list[int]] = {}
    for index, tensor in enumerate(destination.tensors):
        same.setdefault(_place(tensor), []).append(index)
    for indices in same.values():
        tensors = [destination.tensors[i] for i in indices]
        offered = [i for i, t in zip(indices, tensors, strict=True) if (t.layer, t.part) in offers]
        for position, layout in enumerate(sources if len(offered) > 1 else ()):
            places = {
                _place(layout.tensors[offer.tensor]): destination.tensors[i].layer
                for i in offered
                for offer in offers[(destination.tensors[i].layer, destination.tensors[i].part)]
                if offer.source == position
            }
            if len(places) > 1:
                raise IncompatiblePeer(
                    f"layers {sorted(places.values())!r} share one cache here and have caches of their own on rank "
                    f"{layout.rank.index} of the peer: share the KV of the same layers on both sides"
                )
        yield offered[0] if offered else indices[0]


def _place(tensor: Tensor) -> object:
    axes = tuple(sorted(tensor.axes, key=lambda axis: axis.name))
    return (tensor.part, tensor.region, tensor.group, tensor.offset_bytes, tensor.paging, axes, tensor.element_bytes)


class _Covers:
    """Finds who covers a tensor; tensors that are cut alike (most layers) are computed once."""

    def __init__(self, sources: Sequence[CacheLayout], destination: CacheLayout) -> None:
        self._sources = sources
        self._destination = destination
        self._known: dict[object, list[tuple[int, Ranges]]] = {}
        self._agreed: dict[object, Ranges] = {}
        self._looks = 0

    def cover(self, tensor: Tensor, offers: Sequence[_Offer]) -> list[tuple[_Offer, Ranges]]:
        where = f"layer {tensor.layer!r} part {tensor.part!r}"
        group = self._destination.groups[tensor.group]
        held = [self._held(where, offer, tensor) for offer in offers]
        self._check_one_stage(where, offers)
        key = (tensor.axes, group.kind, tuple(held), tuple(offer.source for offer in offers))
        if key not in self._known:
            self._known[key] = list(self._pieces(where, tensor, group, offers, held))
        return [(offers[i], ranges) for i, ranges in self._known[key]]

    def _held(self, where: str, offer: _Offer, tensor: Tensor) -> Ranges:
        """What the offer holds, on our axes in our order; checked once for all layers of one form."""
        source = self._sources[offer.source]
        theirs = source.tensors[offer.tensor]
        # Decoded tensors of one form share their axes and paging. Both layouts live longer than this object.
        forms = [(id(t.axes), id(t.paging), t.encoding, t.element_bytes, t.group) for t in (theirs, tensor)]
        key = (offer.source, *forms)
        if key not in self._agreed:
            _check_same_meaning(where, theirs, source, tensor, self._destination)
            self._agreed[key] = tuple((axis.start, axis.stop) for axis in _in_order(theirs, tensor))
        return self._agreed[key]

    def _check_one_stage(self, where: str, offers: Sequence[_Offer]) -> None:
        stages = {self._sources[offer.source].rank.pp_rank for offer in offers}
        if len(stages) > 1:
            raise MalformedMessage(f"{where} is advertised twice, by pipeline stages {sorted(stages)!r} of the peer")

    def _pieces(
        self, where: str, tensor: Tensor, group: CacheGroup, offers: Sequence[_Offer], held: Sequence[Ranges]
    ) -> Iterable[tuple[int, Ranges]]:
        """(index into offers, ranges) of every piece. The ranks of one piece hold copies: one is taken by our rank."""
        reader = self._destination.rank
        turn = reader.tp_rank * reader.cp_size + reader.cp_rank
        pieces = list(_cut(where, tensor, held))
        self._looks += len(pieces) * len(offers)
        if self._looks > MAX_LOOKS:
            # The listener's thread pairs: a peer must not be able to keep it from others.
            raise IncompatiblePeer(
                f"{where}: {len(offers)} ranks of the peer cut it into {len(pieces)} pieces; with the layers before it "
                f"that is more than {MAX_LOOKS} to look at. Let every layer be split in the same way, over fewer ranks"
            )
        for ranges in pieces:
            holders = [i for i, theirs in enumerate(held) if _holds(theirs, ranges)]
            if not holders:
                raise IncompatiblePeer(
                    f"{where}: no rank of the peer holds {_text(tensor, ranges)}, which rank {reader.index} here needs"
                )
            if group.kind is CacheKind.STATE:
                yield holders[turn % len(holders)], ranges
                continue
            dealt: dict[int, list[int]] = {}
            for i in holders:
                dealt.setdefault(self._sources[offers[i].source].rank.cp_rank, []).append(i)
            for cp_rank in _dealers(self._sources[offers[holders[0]].source].rank, reader):
                copies = dealt.get(cp_rank)
                if not copies:
                    raise IncompatiblePeer(
                        f"{where}: no rank of the peer holds {_text(tensor, ranges)} for the tokens of "
                        f"context-parallel rank {cp_rank}, which rank {reader.index} here needs"
                    )
                yield copies[turn % len(copies)], ranges


def _holds(theirs: Ranges, ranges: Ranges) -> bool:
    return all(a <= start and stop <= b for (a, b), (start, stop) in zip(theirs, ranges, strict=True))


def _text(tensor: Tensor, ranges: Ranges) -> str:
    named = [
        f"{axis.name} [{start}, {stop}) of {axis.extent}"
        for axis, (start, stop) in zip(tensor.axes, ranges, strict=True)
    ]
    return ", ".join(named) or "it"


def _in_order(theirs: Tensor, ours: Tensor) -> list[Axis]:
    by_name = {axis.name: axis for axis in theirs.axes}
    return [by_name[axis.name] for axis in ours.axes]


def _cut(where: str, tensor: Tensor, held: Sequence[Ranges]) -> Iterable[Ranges]:
    """Cut the tensor wherever a source's shard begins or ends. Atomic axes are not cut: all or nothing."""
    axes: list[list[tuple[int, int]]] = []
    pieces = 1
    for number, axis in enumerate(tensor.axes):
        marks = {axis.start, axis.stop}
        if not axis.atomic:
            marks |= {mark for theirs in held for mark in theirs[number] if axis.start < mark < axis.stop}
        points = sorted(marks)
        axes.append(list(pairwise(points)))
        pieces *= len(axes[-1])
    if pieces > MAX_PIECES:
        raise IncompatiblePeer(f"{where} would be cut into {pieces} pieces; at most {MAX_PIECES} are allowed")
    return product(*axes)


def _dealers(theirs: Rank, ours: Rank) -> list[int]:
    """The context-parallel ranks of the peer that have tokens which our rank needs."""
    if theirs.cp_size == 1 or ours.cp_size == 1:
        return list(range(theirs.cp_size))
    period = lcm(theirs.cp_size * theirs.cp_run_tokens, ours.cp_size * ours.cp_run_tokens)
    if period // min(theirs.cp_run_tokens, ours.cp_run_tokens) > MAX_PIECES:
        raise IncompatiblePeer(
            f"context parallelism of {theirs.cp_size} ranks in runs of {theirs.cp_run_tokens} tokens cannot be matched "
            f"with {ours.cp_size} ranks in runs of {ours.cp_run_tokens}: use sizes that divide each other"
        )
    mine = ours.cp_size * ours.cp_run_tokens
    dealers: set[int] = set()
    for start in range(ours.cp_rank * ours.cp_run_tokens, period, mine):
        first, last = start // theirs.cp_run_tokens, (start + ours.cp_run_tokens - 1) // theirs.cp_run_tokens
        dealers.update(run % theirs.cp_size for run in range(first, min(last, first + theirs.cp_size) + 1))
    return sorted(dealers)


def _check_same_meaning(
    where: str, theirs: Tensor, source: CacheLayout, ours: Tensor, destination: CacheLayout
) -> None:
    """Raise IncompatiblePeer, naming both values, where the bytes of the two tensors do not mean the same."""
    their_group, our_group = source.groups[theirs.group], destination.groups[ours.group]
    their_axes, our_axes = sorted(axis.name for axis in theirs.axes), sorted(axis.name for axis in ours.axes)
    whole = ours.paging.token_stride_bytes is None
    rows = [
        ("encoding", ours.encoding, theirs.encoding, "set the same KV cache dtype and attention backend on both sides"),
        ("element_bytes", ours.element_bytes, theirs.element_bytes, "set the same KV cache dtype on both sides"),
        ("axes", our_axes, their_axes, "serve the same model on both sides"),
        (
            "recurrent state",
            our_group.kind is CacheKind.STATE,
            their_group.kind is CacheKind.STATE,
            "serve the same model on both sides",
        ),
        (
            "moved in whole blocks",
            whole,
            theirs.paging.token_stride_bytes is None,
            "use the same attention backend on both sides",
        ),
    ]
    if whole and our_group.kind is not CacheKind.STATE:
        rows.append(
            (
                "block_tokens of whole blocks",
                our_group.block_tokens,
                their_group.block_tokens,
                "set the same --block-size",
            )
        )
        rows.append(("context parallelism of whole blocks", _deal(destination), _deal(source), "set the same on both"))
    if our_axes == their_axes:
        for mine, peer in zip(ours.axes, _in_order(theirs, ours), strict=True):
            rows.append(
                (f"extent of axis {mine.name!r}", mine.extent, peer.extent, "serve the same model on both sides")
            )
            rows.append((f"axis {mine.name!r} is atomic", mine.atomic, peer.atomic, "use the same attention backend"))
            if mine.atomic or peer.atomic:
                rows.append(
                    (
                        f"range of atomic axis {mine.name!r}",
                        (mine.start, mine.stop),
                        (peer.start, peer.stop),
                        "use the same parallel sizes on both sides",
                    )
                )
    for name, local, remote, remedy in rows:
        if local != remote:
            raise IncompatiblePeer(
                f"{where}: {name}: local={local!r} remote={remote!r} (rank {source.rank.index}); {remedy}"
            )


def _deal(layout: CacheLayout) -> tuple[int, int]:
    rank = layout.rank
    return (rank.cp_size, rank.cp_run_tokens if rank.cp_size > 1 else 1)
