"""Answers what the machines ask about layouts and memory, from the driver's links."""

import logging
from collections.abc import Mapping, Sequence

from kvferry.errors import MalformedMessage
from kvferry.handoff.actions import Peer
from kvferry.handoff.driver.links import Flow, Link
from kvferry.handoff.verify import CacheMemory, cell_digest, compare
from kvferry.ids import PeerName, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.description import CacheLayout
from kvferry.settings import Verify

__all__ = ["LinkQueries"]

logger = logging.getLogger(__name__)

_MIN_BYTES_PER_S = 100e6
"""Slower than any wire that is worth a hand-off."""
_MARGIN_S = 0.1
"""Time for the post itself, and for the thread to be scheduled."""


class LinkQueries:
    """Implements handoff.actions.LayoutQueries, for the decode machine (`incoming`) or the prefill machine."""

    def __init__(
        self,
        links: Mapping[PeerName, Link],
        layout: CacheLayout,
        memory: CacheMemory | None,
        verify: Verify,
        *,
        incoming: bool,
    ) -> None:
        self._links = links
        self._layout = layout
        self._memory = memory
        self._verify = verify
        self._incoming = incoming

    def _flow(self, peer: Peer) -> Flow | None:
        link = self._links.get(peer.name)
        return None if link is None else link.incoming if self._incoming else link.outgoing

    def owes(self, peer: Peer) -> bool:
        """Implements LayoutQueries.owes."""
        return self._flow(peer) is not None

    def unit_tokens(self, peer: Peer) -> int:
        """Implements LayoutQueries.unit_tokens."""
        flow = self._flow(peer)
        return 1 if flow is None else flow.unit_tokens

    def write_s(self, peer: Peer, num_tokens: int) -> float:
        """Implements LayoutQueries.write_s."""
        flow = self._flow(peer)
        num_bytes = 0 if flow is None else flow.bytes_per_token * num_tokens + flow.fixed_bytes
        return _MARGIN_S + num_bytes / _MIN_BYTES_PER_S

    def digest(self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange) -> bytes:
        """Implements LayoutQueries.digest."""
        flow = self._flow(peer)
        if flow is None or self._memory is None or self._verify is Verify.OFF:
            return b""
        try:
            return cell_digest(self._verify, transfer, flow.edge, tokens, self._memory, self._layout, tables)
        except MalformedMessage as error:
            logger.warning("no digest transfer=%s peer=%s cause=%s", transfer, peer.name, error)
            return b""

    def check(
        self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange, digest: bytes
    ) -> int:
        """Implements LayoutQueries.check."""
        flow = self._flow(peer)
        if flow is None or self._memory is None or self._verify is Verify.OFF:
            return 0
        return compare(digest, transfer, flow.edge, tokens, self._memory, self._layout, tables)
