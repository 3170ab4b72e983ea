"""What a scheduler half knows of other engines: whether one can be used, and if not, why. It sees no socket."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvferry.ids import EngineId, Incarnation
from kvferry.wire.versions import PROTOCOL_MAX

__all__ = ["PeerBoard", "PeerStatus", "PeerView"]


class PeerStatus(StrEnum):
    """Whether an engine can be used."""

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
    protocol: int = PROTOCOL_MAX
    """The protocol version that is spoken with an accepted peer."""


class PeerBoard(Protocol):
    """What the scheduler half sees of handshakes. They happen in connector.rendezvous."""

    def view(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int) -> PeerView:
        """Return whether that engine can be used. Starts a handshake if the engine is unknown. Never blocks."""
        ...
