"""The records of the prefill machine: one Grant per transfer, and one Consumer per decode rank that takes part.

Their states, and what moves them, are in handoff/transitions.py.
"""

from collections import deque
from dataclasses import dataclass, field

from kvferry.handoff.actions import LayoutQueries, Peer, PostId
from kvferry.handoff.binding import counts_differ, prompts_differ, too_old
from kvferry.handoff.parts import Cutter, Part
from kvferry.handoff.transitions import ConsumerState, GrantState
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import OlderPeers
from kvferry.wire.prompt_digest import Agreement, Prompt, StatedPrompt

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
    prompt: StatedPrompt | None = None
    """The prompt for which it asks; None if it cannot say."""
    agreement: Agreement | None = None
    """How far that is our prompt; None if it was not compared."""
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

    def obstacle(self, grant: "Grant", older_peers: OlderPeers, *, whole_prefix: bool) -> str:
        """Returns why nothing (more) may be handed over; "" if it may. Compares the prompts when both are known (R51).

        Every rank of prefill gets the same two prompts, so that all of them come to the same answer.
        """
        if self.push and grant.ready.start > self.start:
            return f"prefill has tokens from {grant.ready.start}, {self.start} was asked for"
        if self.agreement is None and grant.prompt is not None and self.prompt is not None:
            self.agreement = grant.prompt.agreement(self.prompt)
        agreement, ready = self.agreement, grant.ready.stop
        if agreement is None:
            if older_peers is OlderPeers.REFUSE:
                return too_old(self.peer.engine, self.peer.protocol)
            return counts_differ(ready, self.stop) if grant.final and ready != self.stop else ""
        if agreement.whole:
            return ""
        # Windows and states belong to the end of the whole range: a prefix of it is of no use.
        unusable = grant.final and not whole_prefix and agreement.num_tokens < ready
        return prompts_differ(agreement.num_tokens) if unusable or agreement.num_tokens <= self.start else ""

    def ready_stop(self, grant: "Grant") -> int:
        """Returns the end of what is ready and for this consumer's prompt."""
        stop = grant.ready.stop
        return stop if self.agreement is None or self.agreement.whole else min(stop, self.agreement.num_tokens)

    def range(self, grant: "Grant") -> TokenRange:
        """Returns what of that it asks for."""
        return TokenRange(self.start, min(self.stop, self.ready_stop(grant)))

    def cut(self, grant: "Grant", queries: LayoutQueries) -> None:
        """Push: cuts what has become ready into parts to write."""
        self.todo.extend(
            self.cutter.cut(
                self.peer,
                queries,
                ready_stop=self.ready_stop(grant),
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
    prompt: Prompt | None = None
    owner: tuple[EngineId, Incarnation] | None = None
    """The decode engine that takes part; the first one to name the transfer."""
    ranks: int = 0
    """How many decode ranks will confirm; 0 until the first one says so."""
    consumers: dict[int, Consumer] = field(default_factory=dict)
    """By rank of decode; only those that have named the transfer."""
