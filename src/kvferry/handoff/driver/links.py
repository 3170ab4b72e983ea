"""What the driver knows of one peer rank: how to reach it, and which bytes go between it and us."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.ids import EngineId, Incarnation, PeerName, peer_name
from kvferry.layout.description import CacheKind, CacheLayout, Region
from kvferry.layout.edge import Edge
from kvferry.layout.pairing import pair
from kvferry.settings import Role
from kvferry.wire.hello import Hello, decode_hello
from kvferry.wire.layout_codec import decode_layout

__all__ = ["Flow", "Link", "layouts_of", "make_links"]

_MAX_UNIT_TOKENS = 1 << 20


@dataclass(frozen=True)
class Flow:
    """What goes over one edge in one direction: groups that keep every token, and the rest."""

    edge: Edge

    @cached_property
    def every_token(self) -> Edge | None:
        """The part of the edge that can move chunk by chunk."""
        return self._only(full=True)

    @cached_property
    def at_the_end(self) -> Edge | None:
        """Windows and states: only what the end still needs, when the end is known."""
        return self._only(full=False)

    def _only(self, *, full: bool) -> Edge | None:
        source = self.edge.source
        slices = tuple(
            part
            for part in self.edge.slices
            if (source.groups[source.tensors[part.source_tensor].group].kind is CacheKind.FULL) is full
        )
        return Edge(source, self.edge.destination, slices) if slices else None

    @cached_property
    def unit_tokens(self) -> int:
        """A multiple of the block size of both sides, over all groups that move chunk by chunk."""
        unit = 1
        for part in self.edge.slices:
            for layout, index in (
                (self.edge.source, part.source_tensor),
                (self.edge.destination, part.destination_tensor),
            ):
                group = layout.groups[layout.tensors[index].group]
                if group.kind is CacheKind.FULL:
                    unit = lcm(unit, max(1, group.block_tokens * layout.rank.cp_size))
        return min(unit, _MAX_UNIT_TOKENS)

    @cached_property
    def bytes_per_token(self) -> int:
        """The approximate number of bytes that one token takes on this edge."""
        return sum(size for size, kind in self._sizes if kind is not CacheKind.STATE)

    @cached_property
    def fixed_bytes(self) -> int:
        """The number of bytes of states, which move once per hand-off."""
        return sum(size for size, kind in self._sizes if kind is CacheKind.STATE)

    @cached_property
    def _sizes(self) -> list[tuple[int, CacheKind]]:
        source = self.edge.source
        sizes = []
        for part in self.edge.slices:
            tensor = source.tensors[part.source_tensor]
            size = prod((stop - start for start, stop in part.ranges), start=tensor.element_bytes)
            sizes.append((size, source.groups[tensor.group].kind))
        return sizes


@dataclass(frozen=True)
class Link:
    """One rank of an accepted engine."""

    name: PeerName
    metadata: bytes
    regions: tuple[Region, ...]
    incoming: Flow | None
    """What it sends us when we decode or fetch, or None for nothing."""
    outgoing: Flow | None
    """What we send it when we prefill, or when it fetches, or None for nothing."""
    host: str = ""
    """The host of its side channel; "" if its hello has none."""


def layouts_of(hello: Hello) -> tuple[CacheLayout, ...]:
    """Returns the layouts of all ranks, in order. Raises MalformedMessage."""
    layouts = tuple(decode_layout(rank.layout) for rank in hello.ranks)
    for index, layout in enumerate(layouts):
        if layout.rank.index != index:
            raise MalformedMessage(f"engine {hello.engine!r}: rank {index} says that it is rank {layout.rank.index}")
    return layouts


def make_links(
    body: bytes, *, own_layout: CacheLayout, own_layouts: Sequence[CacheLayout], transport: str
) -> tuple[Hello, list[Link]]:
    """Decodes a Hello and pairs its ranks with ours. `own_layouts`: those of all ranks of our engine; () if not known.

    Raises MalformedMessage or IncompatiblePeer; then nothing of the peer is kept.
    """
    hello = decode_hello(body)
    layouts = layouts_of(hello)
    for rank in hello.ranks:
        if rank.transport != transport:
            raise MalformedMessage(f"engine {hello.engine!r} uses transport {rank.transport!r}, we use {transport!r}")
    incoming: dict[int, Flow] = {}
    outgoing: dict[int, Flow] = {}
    for edge in _edges(layouts, own_layout, needed=hello.role is not Role.DECODE):
        incoming[edge.source_rank] = Flow(edge)
    for layout in layouts if own_layouts else ():
        for edge in _edges(own_layouts, layout, needed=hello.role is not Role.PREFILL):
            if edge.source_rank == own_layout.rank.index:
                outgoing[layout.rank.index] = Flow(edge)
    engine, incarnation = EngineId(hello.engine), Incarnation(hello.incarnation)
    links = [
        Link(
            name=peer_name(engine, incarnation, index),
            metadata=rank.transport_metadata,
            regions=layouts[index].regions,
            incoming=incoming.get(index),
            outgoing=outgoing.get(index),
            host=hello.host,
        )
        for index, rank in enumerate(hello.ranks)
    ]
    return hello, links


def _edges(sources: Sequence[CacheLayout], destination: CacheLayout, *, needed: bool) -> tuple[Edge, ...]:
    """Returns the edges to a rank. A way that only fetches of prefixes would go (R39) need not exist; the handshake has
    noted that (handshake.fit)."""
    try:
        return pair(sources, destination).edges
    except IncompatiblePeer:
        if needed:
            raise
        return ()
