"""What a scheduler half knows of other engines: whether one can be used, and if not, why. It sees no socket."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvferry.ids import EngineId, Incarnation
from kvferry.wire.find import Find, Found
from kvferry.wire.versions import PROTOCOL_MAX

__all__ = ["Asked", "PeerBoard", "PeerStatus", "PeerView", "PrefixBoard", "Question"]


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
    fetch_obstacle: str = ""
    """Why prefixes cannot be fetched from an accepted peer; "" if they can."""


class PeerBoard(Protocol):
    """What the scheduler half sees of handshakes. They happen in connector.rendezvous."""

    def view(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int) -> PeerView:
        """Return whether that engine can be used. Starts a handshake if the engine is unknown. Never blocks."""
        ...


class Asked:
    """A question of ours. `found` is None until it is answered, or until there will be no answer."""

    def __init__(self, transfer: str) -> None:
        self.transfer = transfer
        self.found: Found | None = None


class Question(Protocol):
    """A question of another engine."""

    @property
    def find(self) -> Find:
        """What it asks."""
        ...

    def answer(self, found: Found) -> None:
        """Answer it. Only the first call counts."""
        ...


class PrefixBoard(Protocol):
    """Questions about prefixes, ours and those of other engines (connector.finding). On the engine's thread."""

    def find(self, host: str, port: int, find: Find) -> Asked:
        """Ask an accepted engine. Never blocks; look at the result again and again."""
        ...

    def poll_finds(self) -> None:
        """Take the answers that have come. Never blocks."""
        ...

    def take_questions(self, max_bytes: int) -> Sequence[Question]:
        """Return the questions of other engines that wait longest, each of them once: one, and more as long as they
        have at most `max_bytes` of token ids together."""
        ...

    @property
    def num_questions(self) -> int:
        """The number of questions that wait."""
        ...
