"""Every state of a hand-off, and every legal move between states: one table per kind of record.

Prefill keeps one Grant per transfer, and in it one Consumer per decode rank that takes part. Decode keeps one Receive
per transfer, and in it one Source per prefill rank that has bytes for it. A record starts in the first state of its
enum. Its state changes only by `Transitions.move`, which refuses a move that the table does not list; a test holds the
rest of this package to that. The diagrams in docs/explanation/life-of-a-handoff.md are made from these tables.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, Protocol, TypeVar

__all__ = [
    "CONSUMER",
    "GRANT",
    "RECEIVE",
    "SETTLED",
    "SOURCE",
    "TABLES",
    "ConsumerEvent",
    "ConsumerState",
    "GrantEvent",
    "GrantState",
    "ReceiveEvent",
    "ReceiveState",
    "SourceEvent",
    "SourceState",
    "Stateful",
    "Transitions",
]

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


class Stateful(Protocol[StateT]):
    """A record with a state."""

    state: StateT


class Transitions(Generic[StateT, EventT]):
    """The legal moves of one kind of record. `name` is what messages and diagrams call it."""

    def __init__(self, name: str, states: type[StateT], moves: Mapping[tuple[StateT, EventT], StateT]) -> None:
        self.name = name
        self.states = states
        self.moves = moves

    def move(self, record: Stateful[StateT], event: EventT) -> None:
        """Changes the state of `record` as the table says. An event that the table does not list is a fault of ours."""
        key = (record.state, event)
        assert key in self.moves, f"a {self.name} that is {record.state.value} cannot move on {event.value!r}"
        record.state = self.moves[key]

    def diagram(self) -> str:
        """The table as the text of a mermaid state diagram, with one arrow per pair of states."""
        lines = ["stateDiagram-v2", f"    [*] --> {next(iter(self.states)).value}"]
        arrows: dict[tuple[StateT, StateT], list[str]] = {}
        for (before, event), after in self.moves.items():
            arrows.setdefault((before, after), []).append(event.value)
        lines += [f"    {a.value} --> {b.value}: {', '.join(events)}" for (a, b), events in arrows.items()]
        left = {before for (before, _), after in self.moves.items() if after is not before}
        lines += [f"    {state.value} --> [*]" for state in self.states if state not in left]
        return "\n".join(lines)


class GrantState(Enum):
    """The states of a Grant: one transfer at one prefill rank."""

    AWAITED = "awaited"
    """A decode rank named the transfer before our engine did (R17). It is forgotten if no offer comes in time."""
    OFFERED = "offered"
    """The engine has computed some tokens, and more will follow; decode ranks read (pull) or we write (push)."""
    FINAL = "final"
    """The exact range is known; a lease runs for decode ranks that have not come."""
    WITHDRAWN = "withdrawn"
    """The request ended early; decode ranks that read, and writes in flight, are waited for."""
    ENDED = "ended"
    """Nobody touches the blocks any more; they were reported as released if they had been offered."""


class GrantEvent(Enum):
    """What moves a Grant."""

    OFFER = "offer"
    FINAL_OFFER = "final offer"
    WITHDRAW = "withdraw"
    END = "all consumers ended, or time is over"


GRANT = Transitions(
    "grant",
    GrantState,
    {
        (GrantState.AWAITED, GrantEvent.OFFER): GrantState.OFFERED,
        (GrantState.AWAITED, GrantEvent.FINAL_OFFER): GrantState.FINAL,
        (GrantState.AWAITED, GrantEvent.WITHDRAW): GrantState.WITHDRAWN,
        (GrantState.AWAITED, GrantEvent.END): GrantState.ENDED,
        (GrantState.OFFERED, GrantEvent.OFFER): GrantState.OFFERED,
        (GrantState.OFFERED, GrantEvent.FINAL_OFFER): GrantState.FINAL,
        (GrantState.OFFERED, GrantEvent.WITHDRAW): GrantState.WITHDRAWN,
        (GrantState.FINAL, GrantEvent.WITHDRAW): GrantState.WITHDRAWN,
        (GrantState.FINAL, GrantEvent.END): GrantState.ENDED,
        (GrantState.WITHDRAWN, GrantEvent.END): GrantState.ENDED,
    },
)


class ConsumerState(Enum):
    """The states of a Consumer: one decode rank of a grant."""

    ACTIVE = "active"
    """It claimed or registered, and may read, or is written to."""
    DONE = "done"
    """It confirmed: it has all that it wanted."""
    GONE = "gone"
    """It gave up, was lost, or cannot be served. Writes to it may still be in flight."""


class ConsumerEvent(Enum):
    """What moves a Consumer."""

    CONFIRM = "confirm"
    GIVE_UP = "drop or revoke"
    LOSE = "lease or connection ended"
    FAIL = "cannot be served"


CONSUMER = Transitions(
    "consumer",
    ConsumerState,
    {
        (ConsumerState.ACTIVE, ConsumerEvent.CONFIRM): ConsumerState.DONE,
        (ConsumerState.ACTIVE, ConsumerEvent.GIVE_UP): ConsumerState.GONE,
        (ConsumerState.ACTIVE, ConsumerEvent.LOSE): ConsumerState.GONE,
        (ConsumerState.ACTIVE, ConsumerEvent.FAIL): ConsumerState.GONE,
    },
)


class ReceiveState(Enum):
    """The states of a Receive: one fetched transfer at one decode rank."""

    OPEN = "open"
    """Prefill ranks were asked (Claim or Register), and parts arrive."""
    LANDED = "landed"
    """Every part is here under a valid lease, and its digest is right. Reported; the blocks are the engine's."""
    FAILING = "failing"
    """It failed. Nothing new starts; the failure is reported when reads in flight have ended and writers have stopped,
    or when their time is over (R26)."""
    FAILED = "failed"
    """The engine knows that it failed, or cancelled it. Its blocks wait until no peer can write to them."""
    RELEASED = "released"
    """Nothing touches the blocks any more. Reported; the blocks are the engine's."""


class ReceiveEvent(Enum):
    """What moves a Receive."""

    LAND = "every source is done"
    FAIL = "failure or deadline"
    CANCEL = "cancel"
    REPORT = "failure reported"
    RELEASE = "every source finished"


RECEIVE = Transitions(
    "receive",
    ReceiveState,
    {
        (ReceiveState.OPEN, ReceiveEvent.LAND): ReceiveState.LANDED,
        (ReceiveState.OPEN, ReceiveEvent.FAIL): ReceiveState.FAILING,
        (ReceiveState.FAILING, ReceiveEvent.REPORT): ReceiveState.FAILED,
        (ReceiveState.FAILING, ReceiveEvent.CANCEL): ReceiveState.FAILED,
        (ReceiveState.FAILED, ReceiveEvent.CANCEL): ReceiveState.FAILED,
        (ReceiveState.FAILED, ReceiveEvent.RELEASE): ReceiveState.RELEASED,
    },
)


class SourceState(Enum):
    """The states of a Source: one prefill rank of a receive."""

    WAITING = "waiting"
    """It was asked, and has not granted (pull) or taken up our grant (push)."""
    ACTIVE = "active"
    """It has granted (pull), or holds our grant (push)."""
    DONE = "done"
    """All of it arrived and was confirmed."""
    QUIET = "quiet"
    """It will not write to our blocks any more, nor do we read its."""


class SourceEvent(Enum):
    """What moves a Source."""

    GRANT = "granted"
    COMPLETE = "all parts arrived"
    STOP = "stopped or given up"


SOURCE = Transitions(
    "source",
    SourceState,
    {
        (SourceState.WAITING, SourceEvent.GRANT): SourceState.ACTIVE,
        # A peer may send anything: a last part that comes without a lease is complete all the same.
        (SourceState.WAITING, SourceEvent.COMPLETE): SourceState.DONE,
        (SourceState.WAITING, SourceEvent.STOP): SourceState.QUIET,
        (SourceState.ACTIVE, SourceEvent.COMPLETE): SourceState.DONE,
        (SourceState.ACTIVE, SourceEvent.STOP): SourceState.QUIET,
        # Fail and Stopped may both come, and more than once.
        (SourceState.QUIET, SourceEvent.STOP): SourceState.QUIET,
    },
)

SETTLED = (SourceState.DONE, SourceState.QUIET)
"""The states of a Source that touches nothing any more, once our own reads of it have ended."""

TABLES = (GRANT, CONSUMER, RECEIVE, SOURCE)
"""All tables, in the order in which the page shows them."""
