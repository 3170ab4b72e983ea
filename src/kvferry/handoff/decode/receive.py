"""The records of the decode machine: one Receive per fetched transfer, and one Source per prefill rank of it.

Their states, and what moves them, are in handoff/transitions.py.
"""

from collections import deque
from dataclasses import dataclass, field

from kvferry.handoff.actions import LayoutQueries, Peer, PostId
from kvferry.handoff.binding import counts_differ, prompts_differ, too_old
from kvferry.handoff.orders import Failed, Fetch, Landed
from kvferry.handoff.parts import Cutter, Part
from kvferry.handoff.transitions import SETTLED, SOURCE, ReceiveState, SourceEvent, SourceState
from kvferry.ids import EngineId, Incarnation
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import LeaseSettings, OlderPeers, TransferMode
from kvferry.wire.handoff_messages import Ready, Wrote, from_wire

__all__ = ["Receive", "Source", "nothing_arrived"]

_NEVER = float("inf")


@dataclass(slots=True)
class Source:
    """One prefill rank of a receive."""

    peer: Peer
    alive_at_s: float
    """When the last sign of life for this receive came."""
    asked_s: float
    """When Claim, Register or Revoke was last sent; they are sent again until answered."""
    state: SourceState = SourceState.WAITING
    doubted: bool = False
    """Pull: it has answered its own request and not our claim, and was asked whether it lives."""
    first_sign_s: float = _NEVER
    """Pull: when it first said that it lives. A driver takes in messages before orders, so what it was ordered to grant
    may follow that sign, and precedes the next one."""
    acked_s: float = -_NEVER
    """Pull: when the last renewal that prefill acknowledged was sent."""
    lease_s: float = -_NEVER
    """Pull: until when we may read; minus infinity until prefill has said how long its grants last."""
    ttl_s: float = 0.0
    tables: tuple[BlockTable, ...] = ()
    ready_stop: int = 0
    final: bool = False
    """Prefill will compute no more: `ready_stop` is where its tokens end."""
    digest: bytes = b""
    note: bytes = b""
    same_tokens: int = -1
    """How many leading tokens of prefill's prompt are ours, as prefill says; -1: it did not compare."""
    same_prompt: bool = False
    arrived: dict[int, int] = field(default_factory=dict)
    """Parts that are here and do not yet continue `arrived_to`: start to stop."""
    arrived_to: int = 0
    # Pull.
    cutter: Cutter = field(default_factory=Cutter)
    todo: deque[Part] = field(default_factory=deque)
    in_flight: dict[PostId, Part] = field(default_factory=dict)
    disconnected: bool = False
    """The connection was given up while bytes were in flight: they may still come, for quarantine_s."""
    safe_s: float = -_NEVER
    """No byte of a disconnected peer, or of a dead writer, comes after this time."""
    # Push.
    parts: set[int] = field(default_factory=set)
    """The numbers of the parts that are here."""
    num_parts: int = 0
    """How many parts there are; 0 until the last one says so."""
    lost: bool = False
    """It cannot be reached, or gave no sign of life for a lease: no answer to a Revoke is waited for."""
    dead: bool = False
    """Its process is gone: what it had on the wire comes within quarantine_s, and nothing after that."""
    suspended_until_s: float = -_NEVER
    """Like safe_s, but for a writer that may be suspended and not dead."""

    @property
    def finished(self) -> bool:
        """It does not touch our blocks any more, and we do not touch its blocks."""
        return not self.in_flight and self.state in SETTLED

    @property
    def may_answer_revoke(self) -> bool:
        """Push: it holds our grant, and can still say that it writes no more."""
        return self.state is SourceState.ACTIVE and not (self.lost or self.dead or self.disconnected)

    def give_up(self, now_s: float, lease: LeaseSettings) -> None:
        """Push: it does not answer, and its lease is over. Starts the quarantine; the caller disconnects it."""
        self.disconnected = True
        self.safe_s = now_s + lease.quarantine_s
        self.suspended_until_s = now_s + max(lease.quarantine_s, lease.standstill_s)

    def quiet_s(self, lease: LeaseSettings) -> float:
        """Push, revoked: nothing is written after this time; before `give_up`: it has to be given up at this time."""
        if not self.disconnected:
            return self.alive_at_s + lease.ttl_s
        return self.safe_s if self.dead else self.suspended_until_s

    def extend(self, message: Ready, fetch: Fetch, queries: LayoutQueries, ttl_s: float) -> None:
        """Pull: takes over what prefill says is ready, and cuts what is new into parts to read."""
        self.tables, self.ready_stop, self.final = from_wire(message.tables), message.stop, message.final
        self._describe(message)
        self.todo.extend(
            self.cutter.cut(
                self.peer,
                queries,
                ready_stop=self.ready_stop,
                wanted_stop=fetch.wanted.stop,
                final=self.final,
                ttl_s=ttl_s,
            )
        )

    def complete(self, message: Wrote) -> None:
        """Push: takes over what the last part says of all of them."""
        self.num_parts, self.final, self.ready_stop = message.parts, True, message.stop
        self._describe(message)

    def _describe(self, message: Ready | Wrote) -> None:
        self.digest, self.note, self.same_prompt = message.digest, message.note, message.same_prompt
        self.same_tokens = message.same_tokens

    def unbound_reason(self, fetch: Fetch, older_peers: OlderPeers) -> str:
        """Returns why nothing can be taken from a peer that did not compare prompts; "" if it did, or numbers agree."""
        if self.same_tokens >= 0:
            return ""
        if older_peers is OlderPeers.REFUSE:
            return too_old(self.peer.engine, self.peer.protocol)
        expected = fetch.wanted.stop if fetch.expected_tokens is None else fetch.expected_tokens
        return "" if self.ready_stop == expected else counts_differ(self.ready_stop, expected)

    @property
    def difference(self) -> str:
        """How prefill's prompt differs from ours, as far as it was compared; "" if it does not."""
        return "" if self.same_prompt or self.same_tokens < 0 else prompts_differ(self.same_tokens)

    def arrive(self, start: int, stop: int) -> None:
        """Records that tokens [start, stop) are here; parts may come in any order."""
        self.arrived[start] = max(stop, self.arrived.get(start, 0))
        while self.arrived_to in self.arrived:
            after = self.arrived.pop(self.arrived_to)
            if after <= self.arrived_to:
                break
            self.arrived_to = after


@dataclass(slots=True)
class Receive:
    """One fetched transfer."""

    fetch: Fetch
    begun_s: float
    deadline_s: float
    sources: dict[int, Source] = field(default_factory=dict)
    """By rank of prefill; only those that have bytes for us."""
    state: ReceiveState = ReceiveState.OPEN
    reason: str = ""
    """Why it failed or was cancelled."""
    arrived: TokenRange | None = None
    """What may be used of a failed one, when that is known to be less than what its sources count."""
    disconnect_s: float = _NEVER
    """After a failure: the connections of reads that are still in flight at this time are given up."""
    report_s: float = _NEVER
    """After a failure: it is reported at this time at the latest."""
    num_bytes: int = 0
    num_runs: int = 0
    verified_cells: int = 0
    granted_s: float = 0.0
    """When the last prefill rank so far was found to take part."""

    def grant(self, source: Source, now_s: float) -> None:
        """A prefill rank has granted (pull), or holds our grant (push)."""
        if source.state is SourceState.WAITING:
            SOURCE.move(source, SourceEvent.GRANT)
            self.granted_s = now_s

    def add_part(self, source: Source, message: Wrote) -> None:
        """Push: counts a part that is in our memory; the last one says how many there are."""
        source.parts.add(message.part)
        source.same_tokens = message.same_tokens
        self.num_bytes += message.num_bytes
        self.num_runs += message.num_runs
        if message.parts:
            source.complete(message)
        else:
            source.arrive(message.start, message.stop)

    def mark_dead(self, engine: EngineId, incarnation: Incarnation) -> bool:
        """`engine` runs as `incarnation` now, so processes of its other incarnations are dead. True if any is new."""
        dead = [
            source
            for source in self.sources.values()
            if source.peer.engine == engine and source.peer.incarnation != incarnation and not source.dead
        ]
        for source in dead:
            source.dead = True
        return bool(dead)

    @property
    def pull(self) -> bool:
        """True if we read, False if prefill writes."""
        return self.fetch.mode is TransferMode.PULL

    @property
    def num_survivors(self) -> int:
        """After a failure: how many sources still move bytes, or may do so until they say that they have stopped."""
        sources = self.sources.values()
        return sum(bool(one.in_flight) or (not self.pull and one.may_answer_revoke) for one in sources)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of this rank, over all cache groups."""
        return sum(len(table.block_ids) for table in self.fetch.tables)

    def what_arrived(self, *, whole_prefix: bool) -> TokenRange:
        """Returns what of a failed hand-off is here from every prefill rank, and may be used."""
        start = self.fetch.wanted.start
        bound = all(source.same_tokens >= 0 for source in self.sources.values())
        if self.arrived is not None or not whole_prefix or not bound:
            return self.arrived or TokenRange(start, start)
        stop = min((source.arrived_to for source in self.sources.values()), default=start)
        return TokenRange(start, max(start, min(stop, self.fetch.wanted.stop)))

    def as_landed(self, now_s: float) -> Landed:
        """Returns the report of its success."""
        sources = self.sources.values()
        stop = min((source.arrived_to for source in sources), default=self.fetch.wanted.stop)
        difference = next((source.difference for source in sources if source.difference), "")
        return Landed(
            transfer=self.fetch.transfer,
            request=self.fetch.request,
            arrived=TokenRange(self.fetch.wanted.start, stop),
            num_bytes=self.num_bytes,
            num_runs=self.num_runs,
            transfer_s=now_s - self.begun_s,
            verified_cells=self.verified_cells,
            note=b"" if difference else next((source.note for source in sources if source.note), b""),
            grant_s=max(0.0, self.granted_s - self.begun_s),
            difference=difference,
        )


def nothing_arrived(order: Fetch, reason: str) -> Failed:
    """Returns the report of a fetch that failed before it began."""
    return Failed(order.transfer, order.request, reason, TokenRange(order.wanted.start, order.wanted.start))
