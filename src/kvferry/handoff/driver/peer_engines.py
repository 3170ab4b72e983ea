"""The peer engines that were accepted, and what our ranks and theirs have for each other.

Life of a peer engine: accepted, with its hello; then gone, or replaced by another incarnation.
"""

import logging
from dataclasses import dataclass

from kvferry.errors import MalformedMessage, PeerError
from kvferry.handoff.driver.links import Link, layouts_of, make_links
from kvferry.handoff.driver.own import OwnEngine
from kvferry.handoff.orders import PeerAccepted
from kvferry.ids import EngineId, Incarnation, PeerName
from kvferry.layout.description import CacheLayout
from kvferry.wire.hello import decode_hello

__all__ = ["PeerEngine", "PeerEngines"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PeerEngine:
    """One accepted incarnation."""

    accepted: PeerAccepted
    links: list[Link]

    @property
    def engine(self) -> EngineId:
        """Its id."""
        return self.accepted.engine

    @property
    def incarnation(self) -> Incarnation:
        """Which of its starts it is."""
        return self.accepted.incarnation


class PeerEngines:
    """One per driver. `transport` is the name of ours: peers must use the same."""

    def __init__(self, own: OwnEngine, layout: CacheLayout, transport: str) -> None:
        self._own = own
        self._layout = layout
        self._transport = transport
        layouts = own.layouts or (layout,)
        self._own_layouts = layouts if len(layouts) == own.num_ranks else ()
        self._engines: dict[EngineId, PeerEngine] = {}
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self._engines)

    def find(self, engine: EngineId) -> PeerEngine | None:
        """Returns the accepted incarnation of an engine, if there is one."""
        return self._engines.get(engine)

    def of(self, names: list[PeerName]) -> list[PeerEngine]:
        """Returns the engines that have one of these ranks."""
        return [one for one in self._engines.values() if any(link.name in names for link in one.links)]

    def accept(self, accepted: PeerAccepted) -> PeerEngine | None:
        """Takes an incarnation on, in place of any other of that engine. None: it is known already, or refused."""
        known = self._engines.get(accepted.engine)
        if known is not None and known.incarnation == accepted.incarnation:
            return None
        links = self._make_links(accepted)
        if links is None:
            return None
        self._engines[accepted.engine] = new = PeerEngine(accepted, links)
        return new

    def remove(self, engine: EngineId, incarnation: Incarnation) -> PeerEngine | None:
        """Forgets an incarnation. None: it is not the one that was accepted."""
        known = self._engines.get(engine)
        if known is None or known.incarnation != incarnation:
            return None
        return self._engines.pop(engine)

    def learn_own_layouts(self, accepted: PeerAccepted) -> list[Link]:
        """Our own engine's hello has the layouts of our sibling ranks. Returns the links that this changes.

        From them follows which bytes this rank owes to which peer.
        """
        if accepted.incarnation != self._own.incarnation or self._own_layouts:
            return []
        try:
            self._own_layouts = layouts_of(decode_hello(accepted.hello))
        except PeerError as error:
            logger.warning("own hello cannot be read cause=%s", error)
            return []
        if len(self._own_layouts) != self._own.num_ranks:
            logger.warning("own hello has %d ranks, the engine has %d", len(self._own_layouts), self._own.num_ranks)
            self._own_layouts = ()
        for engine in self._engines.values():
            engine.links = self._make_links(engine.accepted) or engine.links
        return [link for engine in self._engines.values() for link in engine.links]

    def _make_links(self, accepted: PeerAccepted) -> list[Link] | None:
        try:
            hello, links = make_links(
                accepted.hello, own_layout=self._layout, own_layouts=self._own_layouts, transport=self._transport
            )
            if (hello.engine, hello.incarnation) != (accepted.engine, accepted.incarnation):
                raise MalformedMessage(f"the hello of {accepted.engine!r} is {hello.engine!r}, or another start of it")
        except PeerError as error:
            self.num_refused += 1
            logger.warning("peer refused peer=%s cause=%s", accepted.engine, error)
            return None
        return links
