"""Intersects two engines' layouts by name, to find which part of which tensor comes from which rank.

Both sides compute the same pairing, because it depends only on the layouts. Exactly one edge covers each byte of the
destination rank; otherwise the pair is refused, and the error names layer, part and range (R18, R19, R22, R23).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import lcm

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.layout.description import Axis, CacheGroup, CacheKind, CacheLayout, Rank, Tensor
from kvferry.layout.edge import Edge, Ranges, TensorSlice

__all__ = ["Pairing", "pair"]

MAX_PIECES = 65536
"""A tensor that would be cut into more pieces than this is refused."""
MAX_COMPARISONS = 1 << 20
"""The limit on pieces times offering ranks, summed over all tensors that are cut differently: about a second of work.
An engine of 512 ranks that splits 64 heads takes a thirtieth of it per pipeline stage."""


@dataclass(frozen=True)
class Pairing:
    """Where one destination rank gets its cache from. The edges are in the order of their source ranks."""

    destination: CacheLayout
    edges: tuple[Edge, ...]

    def edge_from(self, source_rank: int) -> Edge | None:
        """Returns the edge from the rank with this Rank.index, or None if that rank gives us nothing."""
        return next((edge for edge in self.edges if edge.source_rank == source_rank), None)


@dataclass(frozen=True, slots=True)
class _Offer:
    """A tensor of a source rank."""

    source: int
    """Position in the sources, which are in the order of Rank.index."""
    tensor: int
    """Index into that source's tensors."""


def pair(sources: Sequence[CacheLayout], destination: CacheLayout) -> Pairing:
    """Covers every byte of `destination` (one rank that needs KV) from `sources` (all ranks of the engine that has it).

    Raises IncompatiblePeer if a byte has no source or means something else on the other side, and MalformedMessage if
    the sources contradict each other. Layers that only the sources have are ignored.
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
        candidates = offers.get((tensor.layer, tensor.part))
        if not candidates:
            raise IncompatiblePeer(_not_offered(tensor, offers))
        for offer, ranges in covers.cover(tensor, candidates):
            slices.setdefault(offer.source, []).append(
                TensorSlice(tensor.layer, tensor.part, offer.tensor, index, ranges)
            )
    return Pairing(
        destination, tuple(Edge(ordered[source], destination, tuple(slices[source])) for source in sorted(slices))
    )


def _check_engine(sources: Sequence[CacheLayout]) -> None:
    if not sources:
        raise MalformedMessage("the engine that has the KV describes no ranks")
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
        f"layer {tensor.layer!r} part {tensor.part!r} is not offered by any rank of prefill: {have}. "
        "Serve the same model, with the same draft model, on both sides"
    )


def _without_aliases(
    destination: CacheLayout, sources: Sequence[CacheLayout], offers: Mapping[tuple[str, str], Sequence[_Offer]]
) -> Iterable[int]:
    """Yields one tensor for all layers that share a cache, as it brings the bytes of all of them.

    Checks that the peer shares the cache of the same layers.
    """
    by_place: dict[object, list[int]] = {}
    for index, tensor in enumerate(destination.tensors):
        by_place.setdefault(_place(tensor), []).append(index)
    for indices in by_place.values():
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
                    f"layers {sorted(places.values())!r} share one cache on decode and have separate caches on rank "
                    f"{layout.rank.index} of prefill: share the KV of the same layers on both sides"
                )
        yield offered[0] if offered else indices[0]


def _place(tensor: Tensor) -> object:
    axes = tuple(sorted(tensor.axes, key=lambda axis: axis.name))
    return (tensor.part, tensor.region, tensor.group, tensor.offset_bytes, tensor.paging, axes, tensor.element_bytes)


class _Covers:
    """Finds which source ranks cover a tensor. Tensors that are cut in the same way (most layers) are computed once."""

    def __init__(self, sources: Sequence[CacheLayout], destination: CacheLayout) -> None:
        self._sources = sources
        self._destination = destination
        self._pieces_by_form: dict[object, list[tuple[int, Ranges]]] = {}
        self._held_by_form: dict[object, Ranges] = {}
        self._num_comparisons = 0

    def cover(self, tensor: Tensor, offers: Sequence[_Offer]) -> list[tuple[_Offer, Ranges]]:
        """Returns the pieces of a destination tensor: each with the offer that it is taken from."""
        where = f"layer {tensor.layer!r} part {tensor.part!r}"
        group = self._destination.groups[tensor.group]
        held = [self._held(where, offer, tensor) for offer in offers]
        self._check_one_stage(where, offers)
        key = (tensor.axes, group.kind, tuple(held), tuple(offer.source for offer in offers))
        if key not in self._pieces_by_form:
            self._pieces_by_form[key] = list(self._pieces(where, tensor, group, offers, held))
        return [(offers[i], ranges) for i, ranges in self._pieces_by_form[key]]

    def _held(self, where: str, offer: _Offer, tensor: Tensor) -> Ranges:
        """Returns the ranges that the offer holds, in the order of the destination's axes.

        Checks, once for all layers of one form, that both tensors mean the same.
        """
        layout = self._sources[offer.source]
        source = layout.tensors[offer.tensor]
        # Decoded tensors of one form share their axes and paging. Both layouts live longer than this object.
        forms = [(id(t.axes), id(t.paging), t.encoding, t.element_bytes, t.group) for t in (source, tensor)]
        key = (offer.source, *forms)
        if key not in self._held_by_form:
            _check_same_meaning(where, source, layout, tensor, self._destination)
            self._held_by_form[key] = tuple((axis.start, axis.stop) for axis in _axes_like(source, tensor))
        return self._held_by_form[key]

    def _check_one_stage(self, where: str, offers: Sequence[_Offer]) -> None:
        stages = {self._sources[offer.source].rank.pp_rank for offer in offers}
        if len(stages) > 1:
            raise MalformedMessage(f"{where} is advertised twice, by pipeline stages {sorted(stages)!r} of prefill")

    def _pieces(
        self, where: str, tensor: Tensor, group: CacheGroup, offers: Sequence[_Offer], held: Sequence[Ranges]
    ) -> Iterable[tuple[int, Ranges]]:
        """Yields (index into offers, ranges) of every piece.

        If several ranks hold copies of a piece, the destination's rank decides which one it takes.
        """
        reader = self._destination.rank
        turn = reader.tp_rank * reader.cp_size + reader.cp_rank
        pieces = list(_cut(where, tensor, held))
        self._num_comparisons += len(pieces) * len(offers)
        if self._num_comparisons > MAX_COMPARISONS:
            # Pairing runs on the listener's thread: one peer must not be able to block it for the others.
            raise IncompatiblePeer(
                f"{where}: {len(offers)} ranks of prefill cut it into {len(pieces)} pieces; with the layers before it "
                f"that needs more than {MAX_COMPARISONS} comparisons. Split every layer in the same way, over fewer "
                "ranks"
            )
        for ranges in pieces:
            holders = [i for i, held_ranges in enumerate(held) if _holds(held_ranges, ranges)]
            if not holders:
                raise IncompatiblePeer(
                    f"{where}: no rank of prefill holds {_text(tensor, ranges)}, which rank {reader.index} of decode "
                    "needs"
                )
            if group.kind is CacheKind.STATE:
                yield holders[turn % len(holders)], ranges
                continue
            by_cp_rank: dict[int, list[int]] = {}
            for i in holders:
                by_cp_rank.setdefault(self._sources[offers[i].source].rank.cp_rank, []).append(i)
            for cp_rank in _overlapping_cp_ranks(self._sources[offers[holders[0]].source].rank, reader):
                copies = by_cp_rank.get(cp_rank)
                if not copies:
                    raise IncompatiblePeer(
                        f"{where}: no rank of prefill holds {_text(tensor, ranges)} for the tokens of "
                        f"context-parallel rank {cp_rank}, which rank {reader.index} of decode needs"
                    )
                yield copies[turn % len(copies)], ranges


def _holds(held: Ranges, ranges: Ranges) -> bool:
    return all(a <= start and stop <= b for (a, b), (start, stop) in zip(held, ranges, strict=True))


def _text(tensor: Tensor, ranges: Ranges) -> str:
    named = [
        f"{axis.name} [{start}, {stop}) of {axis.extent}"
        for axis, (start, stop) in zip(tensor.axes, ranges, strict=True)
    ]
    return ", ".join(named) or "it"


def _axes_like(source: Tensor, destination: Tensor) -> list[Axis]:
    """Returns the source's axes in the order of the destination's."""
    by_name = {axis.name: axis for axis in source.axes}
    return [by_name[axis.name] for axis in destination.axes]


def _cut(where: str, tensor: Tensor, held: Sequence[Ranges]) -> Iterable[Ranges]:
    """Cuts the tensor wherever a source's shard begins or ends. Atomic axes are never cut."""
    axes: list[list[tuple[int, int]]] = []
    pieces = 1
    for number, axis in enumerate(tensor.axes):
        marks = {axis.start, axis.stop}
        if not axis.atomic:
            marks |= {mark for ranges in held for mark in ranges[number] if axis.start < mark < axis.stop}
        points = sorted(marks)
        axes.append(list(pairwise(points)))
        pieces *= len(axes[-1])
    if pieces > MAX_PIECES:
        raise IncompatiblePeer(f"{where} would be cut into {pieces} pieces; at most {MAX_PIECES} are allowed")
    return product(*axes)


def _overlapping_cp_ranks(source: Rank, destination: Rank) -> list[int]:
    """Returns the context-parallel ranks of the source that hold tokens which the destination rank needs."""
    if source.cp_size == 1 or destination.cp_size == 1:
        return list(range(source.cp_size))
    source_run, destination_run = source.cp_run_tokens, destination.cp_run_tokens
    period = lcm(source.cp_size * source_run, destination.cp_size * destination_run)
    if period // min(source_run, destination_run) > MAX_PIECES:
        raise IncompatiblePeer(
            f"context parallelism of {source.cp_size} ranks in runs of {source_run} tokens cannot be matched with "
            f"{destination.cp_size} ranks in runs of {destination_run}: use sizes that divide each other"
        )
    ranks: set[int] = set()
    for start in range(destination.cp_rank * destination_run, period, destination.cp_size * destination_run):
        first, last = start // source_run, (start + destination_run - 1) // source_run
        ranks.update(run % source.cp_size for run in range(first, min(last, first + source.cp_size) + 1))
    return sorted(ranks)


_SAME_MODEL = "serve the same model on both sides"
_SAME_BACKEND = "use the same attention backend on both sides"


def _check_same_meaning(
    where: str, source: Tensor, source_layout: CacheLayout, destination: Tensor, destination_layout: CacheLayout
) -> None:
    """Raises IncompatiblePeer, naming both values, if the bytes of the two tensors do not mean the same."""
    rows = [*_tensor_rows(source, source_layout, destination, destination_layout), *_axis_rows(source, destination)]
    for name, decode, prefill, remedy in rows:
        if decode != prefill:
            raise IncompatiblePeer(
                f"{where}: {name}: decode={decode!r} prefill={prefill!r} (rank {source_layout.rank.index}); {remedy}"
            )


_Row = tuple[str, object, object, str]
"""What is compared, the value of decode (the destination), the value of prefill (the source), and the remedy."""


def _tensor_rows(
    source: Tensor, source_layout: CacheLayout, destination: Tensor, destination_layout: CacheLayout
) -> Iterable[_Row]:
    source_group, group = source_layout.groups[source.group], destination_layout.groups[destination.group]
    whole = destination.paging.token_stride_bytes is None
    source_whole = source.paging.token_stride_bytes is None
    is_state = group.kind is CacheKind.STATE
    encoding_remedy = "set the same KV cache dtype and attention backend on both sides"
    yield "encoding", destination.encoding, source.encoding, encoding_remedy
    element_bytes = destination.element_bytes, source.element_bytes
    yield "element_bytes", *element_bytes, "set the same KV cache dtype on both sides"
    yield "axes", _axis_names(destination), _axis_names(source), _SAME_MODEL
    yield "recurrent state", is_state, source_group.kind is CacheKind.STATE, _SAME_MODEL
    yield "moved in whole blocks", whole, source_whole, _SAME_BACKEND
    if whole and not is_state:
        block_tokens = group.block_tokens, source_group.block_tokens
        yield "block_tokens of whole blocks", *block_tokens, "set the same --block-size"
        cp = _context_parallelism(destination_layout), _context_parallelism(source_layout)
        yield "context parallelism of whole blocks", *cp, "use the same context parallelism on both sides"


def _axis_rows(source: Tensor, destination: Tensor) -> Iterable[_Row]:
    if _axis_names(source) != _axis_names(destination):
        return
    for decode, prefill in zip(destination.axes, _axes_like(source, destination), strict=True):
        name = repr(decode.name)
        yield f"extent of axis {name}", decode.extent, prefill.extent, _SAME_MODEL
        yield f"axis {name} is atomic", decode.atomic, prefill.atomic, _SAME_BACKEND
        if decode.atomic or prefill.atomic:
            ranges = (decode.start, decode.stop), (prefill.start, prefill.stop)
            yield f"range of atomic axis {name}", *ranges, "use the same parallel sizes on both sides"


def _axis_names(tensor: Tensor) -> list[str]:
    return sorted(axis.name for axis in tensor.axes)


def _context_parallelism(layout: CacheLayout) -> tuple[int, int]:
    rank = layout.rank
    return (rank.cp_size, rank.cp_run_tokens if rank.cp_size > 1 else 1)
