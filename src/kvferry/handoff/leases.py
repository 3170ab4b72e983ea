"""Time: one queue of deadlines, and the holder's side of leases.

A holder counts from when it *sent* the renewal that was acknowledged, a grantor from when it *received* one, each on
its own clock. The renewal was sent before it was received, and the holder counts `drift` less: so the holder stops
before the grantor takes back, with no shared clock.

Whether a lease has *ended* is decided elsewhere: in prefill/machine.py (`_advance`), in decode/machine.py
(`_start_reads`), and in decode/wind_down.py.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

from kvferry.handoff.actions import Peer
from kvferry.ids import PeerName, TransferId
from kvferry.settings import LeaseSettings
from kvferry.wire.handoff_messages import MAX_RENEWED, Renew, RenewAck

__all__ = ["Heartbeats", "Timers", "first_of"]

KeyT = TypeVar("KeyT", bound=Hashable)

_MAX_UNACKED = 64
_MIN_EVERY_S = 0.005
"""However short a lease the peer states, it must not make us spin."""


def first_of(*times_s: float | None) -> float | None:
    """Returns the earliest time, or None for never."""
    return min((at_s for at_s in times_s if at_s is not None), default=None)


class Timers(Generic[KeyT]):
    """At most one deadline per key. Setting one again replaces it."""

    def __init__(self) -> None:
        self._at: dict[KeyT, float] = {}
        self._heap: list[tuple[float, int, KeyT]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: KeyT, at_s: float) -> None:
        """`pop_due` shall return `key` at this time, and not before."""
        if self._at.get(key) != at_s:
            self._at[key] = at_s
            self._count += 1
            heappush(self._heap, (at_s, self._count, key))

    def clear(self, key: KeyT) -> None:
        """Removes the deadline of `key`."""
        self._at.pop(key, None)

    def next_s(self) -> float | None:
        """Returns when the first key is due, or None for never."""
        heap, at = self._heap, self._at
        while heap and at.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now_s: float) -> list[KeyT]:
        """Returns all keys that are due, each once; they have no deadline any more."""
        due = []
        heap, at = self._heap, self._at
        while heap and heap[0][0] <= now_s:
            when, _, key = heappop(heap)
            if at.get(key) == when:
                del at[key]
                due.append(key)
        return due


@dataclass(slots=True)
class _Beat:
    peer: Peer
    every_s: float
    members: dict[TransferId, None] = field(default_factory=dict)
    urgent: dict[TransferId, None] = field(default_factory=dict)
    unacked: dict[int, tuple[float, tuple[TransferId, ...]]] = field(default_factory=dict)


class Heartbeats:
    """What a holder renews, and when it last did so with success: one message per peer rank, however many grants."""

    def __init__(self, lease: LeaseSettings, *, from_decode: bool) -> None:
        self._lease = lease
        self._from_decode = from_decode
        self._beats: dict[PeerName, _Beat] = {}
        self._timers: Timers[PeerName] = Timers()
        self._seq = 0

    def held_s(self, sent_s: float, ttl_s: float) -> float:
        """Returns until when a grant of `ttl_s` may be used, if its acknowledged renewal was sent at `sent_s`."""
        return sent_s + ttl_s * (1.0 - self._lease.drift)

    def add(self, peer: Peer, transfer: TransferId, now_s: float, ttl_s: float | None = None) -> None:
        """Renew this grant from now on."""
        beat = self._beats.get(peer.name)
        if beat is None:
            beat = self._beats[peer.name] = _Beat(peer, self._lease.renew_every_s)
        if ttl_s is not None and max(_MIN_EVERY_S, ttl_s / 4) < beat.every_s:
            beat.every_s = max(_MIN_EVERY_S, ttl_s / 4)
            self._timers.set(peer.name, now_s + beat.every_s)
        elif not beat.members:
            self._timers.set(peer.name, now_s + beat.every_s)
        beat.members[transfer] = None

    def renew_now(self, peer: Peer, transfer: TransferId, now_s: float) -> None:
        """Renew this grant at the next tick, before its turn."""
        beat = self._beats.get(peer.name)
        if beat is not None and transfer in beat.members:
            beat.urgent[transfer] = None
            self._timers.set(peer.name, now_s)

    def remove(self, peer: Peer, transfer: TransferId) -> None:
        """Renew it no more."""
        beat = self._beats.get(peer.name)
        if beat is not None:
            beat.members.pop(transfer, None)
            beat.urgent.pop(transfer, None)
            if not beat.members:
                self.forget(peer.name)

    def forget(self, peer: PeerName) -> None:
        """The peer is gone."""
        self._beats.pop(peer, None)
        self._timers.clear(peer)

    def note_sent(self, peer: Peer, transfer: TransferId, now_s: float) -> int:
        """Another message serves as a renewal of this one transfer. Returns the number that the peer will echo."""
        beat = self._beats[peer.name]
        return self._sent(beat, now_s, (transfer,))

    def _sent(self, beat: _Beat, now_s: float, transfers: tuple[TransferId, ...]) -> int:
        self._seq += 1
        beat.unacked[self._seq] = (now_s, transfers)
        if len(beat.unacked) > _MAX_UNACKED:
            del beat.unacked[next(iter(beat.unacked))]
        return self._seq

    def next_s(self) -> float | None:
        """Returns when `tick` next has something to do."""
        return self._timers.next_s()

    def tick(self, now_s: float) -> Iterator[tuple[Peer, Renew]]:
        """Yields the renewals that are due now."""
        for name in self._timers.pop_due(now_s):
            beat = self._beats[name]
            due = tuple(beat.urgent or beat.members)
            if not beat.urgent:
                self._timers.set(name, now_s + beat.every_s)
            else:
                beat.urgent.clear()
                self._timers.set(name, now_s + beat.every_s)
                due = tuple(beat.members) if len(beat.members) <= MAX_RENEWED else due
            for first in range(0, len(due), MAX_RENEWED):
                some = due[first : first + MAX_RENEWED]
                seq = self._sent(beat, now_s, some)
                yield (
                    beat.peer,
                    Renew(to=beat.peer.incarnation, seq=seq, from_decode=self._from_decode, transfers=some),
                )

    def acked(self, peer: PeerName, ack: RenewAck) -> tuple[float, tuple[TransferId, ...]] | None:
        """Returns when the acknowledged renewal was sent and what it named, or None for an answer to none of ours."""
        return self._match(peer, ack.seq)

    def claim_acked(self, peer: PeerName, seq: int) -> float:
        """Returns when the claim with this number was sent, or minus infinity if it is none of ours."""
        matched = self._match(peer, seq)
        return float("-inf") if matched is None else matched[0]

    def _match(self, peer: PeerName, seq: int) -> tuple[float, tuple[TransferId, ...]] | None:
        beat = self._beats.get(peer)
        return None if beat is None else beat.unacked.pop(seq, None)
