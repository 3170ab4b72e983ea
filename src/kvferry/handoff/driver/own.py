"""What a driver needs to know of its own rank: who it is, what memory it has, and what it calls back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.handoff.verify import CacheMemory
from kvferry.ids import EngineId, Incarnation
from kvferry.layout.description import CacheLayout, Region

__all__ = ["Callbacks", "OwnCache", "OwnEngine"]


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """The engine that this rank belongs to."""

    engine: EngineId
    incarnation: Incarnation
    num_ranks: int = 1
    layouts: tuple[CacheLayout, ...] = ()
    """The layouts of all its ranks, in the order of Rank.index.

    A prefill engine of several ranks needs them to push and to verify. They may also come later, in a PeerAccepted of
    our own engine.
    """


@dataclass(frozen=True, slots=True)
class OwnCache:
    """The memory of this rank."""

    layout: CacheLayout
    owners: Sequence[object]
    """They keep the memory alive, and are held until the driver's `close`."""
    staging: Sequence[Region] = ()
    """The mover's staging memory, registered after the regions of the layout."""
    reader: CacheMemory | None = None
    """Reads the cache to verify it. None: it is read by address, if all of it is in DRAM, or else not verified."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Called on the driver's thread. They must neither block nor raise."""

    on_lost: Callable[[EngineId, Incarnation, str], None] = field(default=lambda engine, incarnation, reason: None)
    """An incarnation is gone and was forgotten: it gave no sign of life for `gone_after_s`, or during a whole lease."""
    on_report: Callable[[], None] = field(default=lambda: None)
    """There may be something to collect, or a change in `stats`."""
