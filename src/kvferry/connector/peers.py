"""What a scheduler half may know of other engines: whether one can be used, and why not. No address, no socket."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvferry.ids import EngineId, Incarnation

__all__ = ["PeerBoard", "PeerStatus", "PeerView"]


class PeerStatus(StrEnum):
    """Where an engine stands with us."""

    ASKING = "asking"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    """It does not fit, does not answer, or has restarted: `reason` says which."""


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer at this moment. Once accepted, the incarnation is the one that answered."""

    status: PeerStatus
    reason: str = ""
    incarnation: Incarnation | None = None


class PeerBoard(Protocol):
    """Handshakes happen elsewhere (connector.rendezvous); this is what the scheduler half sees of them."""

    def view(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int) -> PeerView:
        """Where that engine stands; the first call for an unknown one starts a handshake. Never blocks."""
        ...
