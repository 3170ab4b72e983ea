"""The records of the prefill machine: one Grant per transfer, and one Consumer per decode rank that takes part.

Their states, and what moves them, are in handoff/transitions.py.
"""

from collections import deque
from dataclasses import dataclass, field

from kvferry.handoff.actions import LayoutQueries, Peer, PostId
from kvferry.handoff.parts import Cutter, Part
from kvferry.handoff.transitions import ConsumerState, GrantState
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange

__all__ = ["Consumer", "Grant"]

_NEVER = float("inf")


@dataclass(slots=True)
class Consumer:
    """One decode rank of a grant."""

    peer: Peer
    push: bool
    """True if we write to it, False if it reads."""
    state: ConsumerState = ConsumerState.ACTIVE
    start: int = 0
    stop: int = 0
    until_s: float = -_NEVER
    """It is gone if no sign of life comes by then."""
    seq: int = 0
    """Pull: the number of its last claim."""
    tables: tuple[BlockTable, ...] = ()
    ttl_s: float = 0.0
    lease_s: float = -_NEVER
    """Push: until when we may write; minus infinity until a renewal was acknowledged."""
    cutter: Cutter = field(default_factory=Cutter)
    todo: deque[Part] = field(default_factory=deque)
    in_flight: dict[PostId, Part] = field(default_factory=dict)
    owes_stopped: bool = False
    """Push: a Stopped has to be sent when the last write has ended."""
    disconnected: bool = False
    """Push: a write outlived the lease, so the connection was given up."""

    def cut(self, grant: "Grant", queries: LayoutQueries) -> None:
        """Push: cuts what has become ready into parts to write."""
        self.todo.extend(
            self.cutter.cut(
                self.peer,
                queries,
                ready_stop=grant.ready.stop,
                wanted_stop=self.stop,
                final=grant.final,
                ttl_s=self.ttl_s,
            )
        )


@dataclass(slots=True)
class Grant:
    """One transfer at this rank."""

    transfer: TransferId
    unclaimed_until_s: float
    """Awaited: it is forgotten at this time. Final: decode ranks that have not come by this time are not waited for."""
    state: GrantState = GrantState.AWAITED
    end_reason: str = ""
    """Why it was withdrawn."""
    tables: tuple[BlockTable, ...] = ()
    ready: TokenRange = field(default_factory=lambda: TokenRange(0, 0))
    final: bool = False
    """`ready` is the exact range: no more will be computed. It stays true after a withdrawal."""
    note: bytes = b""
    owner: tuple[EngineId, Incarnation] | None = None
    """The decode engine that takes part; the first one to name the transfer."""
    ranks: int = 0
    """How many decode ranks will confirm; 0 until the first one says so."""
    consumers: dict[int, Consumer] = field(default_factory=dict)
    """By rank of decode; only those that have named the transfer."""
