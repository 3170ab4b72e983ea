"""What is known of other engines, and when to ask them again. No I/O; time is an argument.

Life of a peer, one entry an engine id:

    UNKNOWN    nobody has spoken of it.
    ASKING     our question is on its way; it is not asked again.
    ACCEPTED   the verdict was good, on whichever side asked. A new incarnation replaces the old one.
    REFUSED    the verdict was bad, or the answer was no answer. Not asked again before `retry_at_s`; a request for it
               fails at once, with the reason.
    LOST       it was accepted, and is gone, or did not answer. As REFUSED, with a shorter back-off.

A new incarnation is a restart: it may be asked at once, whatever was thought of the old one (I6). An incarnation that
was replaced and speaks again is no restart: two engines run under one id, and both are named.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from kvferry.errors import ConfigError
from kvferry.ids import EngineId, Incarnation

__all__ = ["BackOff", "Heard", "Peer", "PeerAccepted", "PeerBook", "PeerGone", "PeerState"]

_MAX_FORMER = 8
"""Incarnations remembered of one engine id: a fleet that restarts for ever must not fill our memory."""
_MAX_REASON_CHARS = 2048


class PeerState(StrEnum):
    """See the module's text."""

    UNKNOWN = "unknown"
    ASKING = "asking"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """How long a peer is left alone after its nth failure in a row: first_s, doubled each time, up to longest_s."""

    refused_first_s: float = 2.0
    lost_first_s: float = 0.25
    longest_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < min(self.refused_first_s, self.lost_first_s) <= self.longest_s:
            raise ConfigError(f"back-off {self!r} must have first times above 0 and at most longest_s")

    def wait_s(self, state: PeerState, failures: int) -> float:
        """Seconds until it may be asked again, after `failures` in a row (1 or more)."""
        first_s = self.refused_first_s if state is PeerState.REFUSED else self.lost_first_s
        return float(min(self.longest_s, first_s * 2.0 ** min(failures - 1, 30)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What is known of one engine id; an immutable snapshot, under 1 KiB."""

    engine: EngineId
    state: PeerState = PeerState.UNKNOWN
    incarnation: Incarnation | None = None
    """None: not known. Of ACCEPTED, always known."""
    address: str = ""
    """Where it was last reached, or spoke from."""
    protocol: int = 0
    """The version spoken with an ACCEPTED peer."""
    reason: str = ""
    """Of REFUSED and LOST: why, with the remedy."""
    notes: tuple[str, ...] = ()
    """Of ACCEPTED: what differs and is bridged (Verdict.notes)."""
    since_s: float = 0.0
    asked_s: float = float("-inf")
    """When the last question to it was sent."""
    retry_at_s: float = 0.0
    failures: int = 0
    former: tuple[tuple[Incarnation, str], ...] = ()
    """Incarnations that were replaced, and their addresses; the latest last."""
    wanted: Incarnation | None = None
    """The incarnation that the last question was for, if a request named one."""
    paired: bool = False
    """`incarnation` is accepted and has not been replaced: also while a newer one is asked for."""


@dataclass(frozen=True, slots=True)
class PeerAccepted:
    """A peer was accepted: only now may anything be allocated, registered or connected for it."""

    engine: EngineId
    incarnation: Incarnation
    hello: bytes
    """The peer's payload (wire.hello), decoded, checked and paired, and encoded again in our newest version."""


@dataclass(frozen=True, slots=True)
class PeerGone:
    """An accepted incarnation was replaced or lost, or no longer fits: disconnect it. Its hand-offs end as lost.

    An incarnation that is not known, or was already replaced, changes nothing. It may be accepted again.
    """

    engine: EngineId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """What it means that an incarnation of an engine speaks."""

    conflict: str = ""
    """Two engines run under one id: the text names both. The speaker is to be refused."""
    full: str = ""
    """There is no room for another peer: the text says which setting."""


class PeerBook:
    """All peers of one engine. Thread-safe: the listener's thread and the engine's share it; nothing in it blocks."""

    def __init__(
        self, engine: EngineId, incarnation: Incarnation, *, max_peers: int = 4096, back_off: BackOff | None = None
    ) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._max_peers = max_peers
        self._back_off = back_off or BackOff()
        self._peers: dict[EngineId, Peer] = {}
        self._lock = threading.Lock()

    def get(self, engine: EngineId) -> Peer:
        """A snapshot; UNKNOWN for a peer that nobody has spoken of."""
        with self._lock:
            return self._peers.get(engine) or Peer(engine=engine)

    def peers(self) -> tuple[Peer, ...]:
        """Snapshots of all of them, for /health and metrics."""
        with self._lock:
            return tuple(self._peers.values())

    def may_ask(self, engine: EngineId, now_s: float, incarnation: Incarnation | None = None) -> bool:
        """Whether to send a handshake now. `incarnation`: the one that a request names, if it names one."""
        peer = self.get(engine)
        if peer.state is PeerState.UNKNOWN:
            return True
        if peer.state is PeerState.ASKING:
            return False
        restarted = incarnation not in {None, peer.incarnation, *(former for former, _ in peer.former)}
        if peer.state is PeerState.ACCEPTED:
            return restarted and now_s >= peer.retry_at_s
        if restarted and incarnation != peer.wanted:
            # The gap is for requests that name a new incarnation each: they cost a handshake in a while.
            return now_s - peer.asked_s >= self._back_off.lost_first_s
        return now_s >= peer.retry_at_s

    def asking(
        self, engine: EngineId, now_s: float, *, address: str = "", incarnation: Incarnation | None = None
    ) -> str:
        """A handshake is on its way. Returns why it must not be, or "": no room, or the id is our own."""
        with self._lock:
            if engine == self._engine:
                return self._our_own_id(incarnation, address)
            peer = self._peers.get(engine)
            if peer is None:
                full = self._make_room()
                if full:
                    return full
                peer = Peer(engine=engine)
            # Also where an older incarnation is accepted: its hand-offs go on until it is replaced or gone.
            self._peers[engine] = replace(
                peer,
                state=PeerState.ASKING,
                address=address or peer.address,
                since_s=now_s,
                asked_s=now_s,
                wanted=incarnation,
            )
            return ""

    def heard(self, engine: EngineId, incarnation: Incarnation, *, address: str) -> Heard:
        """An incarnation speaks: is it who it says it is? Changes nothing but to make room for one more."""
        with self._lock:
            if engine == self._engine:
                return Heard(conflict=self._our_own_id(incarnation, address))
            peer = self._peers.get(engine)
            if peer is None:
                return Heard(full=self._make_room())
            for former, former_address in peer.former:
                if former == incarnation:
                    return Heard(conflict=_two_engines(engine, former, address or former_address, peer))
            return Heard()

    def accepted(
        self,
        engine: EngineId,
        incarnation: Incarnation,
        now_s: float,
        *,
        address: str,
        protocol: int,
        notes: tuple[str, ...] = (),
    ) -> Incarnation | None:
        """The pair fits. Returns the incarnation that this one replaces: forget what was kept for it."""
        with self._lock:
            peer = self._peers.get(engine) or Peer(engine=engine)
            former = peer.former
            if peer.incarnation not in (None, incarnation):
                former = (*former, (Incarnation(str(peer.incarnation)), peer.address))[-_MAX_FORMER:]
            other_wanted = peer.wanted not in (None, incarnation)
            self._peers[engine] = Peer(
                engine=engine,
                state=PeerState.ACCEPTED,
                incarnation=incarnation,
                address=address,
                protocol=protocol,
                notes=notes,
                since_s=now_s,
                # A request named an incarnation that is not the one that answers: do not ask for it at once again.
                retry_at_s=now_s + self._back_off.lost_first_s if other_wanted else 0.0,
                former=former,
                paired=True,
            )
            return peer.incarnation if peer.paired and peer.incarnation != incarnation else None

    def refused(
        self, engine: EngineId, incarnation: Incarnation | None, now_s: float, reason: str, *, address: str = ""
    ) -> Incarnation | None:
        """The pair does not fit. Returns the incarnation that it was paired with until now: forget what it has."""
        return self._failed(engine, incarnation, now_s, reason, PeerState.REFUSED, address)

    def lost(self, engine: EngineId, incarnation: Incarnation | None, now_s: float, reason: str) -> Incarnation | None:
        """It did not answer (`incarnation` is None), or its transport says that it is gone. Returns as `refused`."""
        return self._failed(engine, incarnation, now_s, reason, PeerState.LOST, "")

    def forget(self, engine: EngineId) -> None:
        """Nothing is known of it any more."""
        with self._lock:
            self._peers.pop(engine, None)

    def expire(self, now_s: float, idle_s: float = 600.0) -> tuple[EngineId, ...]:
        """Forget refused and lost peers of which nothing was heard for `idle_s`; returns who they were."""
        with self._lock:
            old = [
                peer.engine
                for peer in self._peers.values()
                if peer.state in (PeerState.REFUSED, PeerState.LOST) and now_s - peer.since_s > idle_s
            ]
            for engine in old:
                del self._peers[engine]
            return tuple(old)

    def _failed(
        self,
        engine: EngineId,
        incarnation: Incarnation | None,
        now_s: float,
        reason: str,
        state: PeerState,
        address: str,
    ) -> Incarnation | None:
        with self._lock:
            peer = self._peers.get(engine)
            if peer is None:
                if self._make_room():
                    return None
                peer = Peer(engine=engine)
            failures = peer.failures + 1
            retry_at_s = now_s + self._back_off.wait_s(state, failures)
            if peer.paired and incarnation is None:
                # Nobody answered for the newer incarnation that a request named: that says nothing of the one we have.
                self._peers[engine] = replace(
                    peer, state=PeerState.ACCEPTED, since_s=now_s, retry_at_s=retry_at_s, failures=failures
                )
                return None
            if peer.paired and incarnation != peer.incarnation and peer.state is PeerState.ACCEPTED:
                return None  # of an incarnation that we neither work with nor asked for: changes nothing (I6)
            # What a request named stays known as `wanted`: the next request that names it is no news.
            self._peers[engine] = replace(
                peer,
                state=state,
                incarnation=incarnation or peer.wanted or peer.incarnation,
                address=address or peer.address,
                reason=reason[:_MAX_REASON_CHARS],
                since_s=now_s,
                retry_at_s=retry_at_s,
                failures=failures,
                paired=False,
            )
            return peer.incarnation if peer.paired else None

    def _make_room(self) -> str:
        """Room for one more: a refused or lost peer goes, the longest silent first. Else, why there is none."""
        if len(self._peers) < self._max_peers:
            return ""
        idle = _oldest(peer for peer in self._peers.values() if peer.state in (PeerState.REFUSED, PeerState.LOST))
        if idle is None:
            return (
                f"{self._engine!r} already has {len(self._peers)} peers and takes no more: "
                f"raise side_channel.max_peers={self._max_peers}, or add engines"
            )
        del self._peers[idle.engine]
        return ""

    def _our_own_id(self, incarnation: Incarnation | None, address: str) -> str:
        if incarnation in (None, self._incarnation):
            return f"engine {self._engine!r} was asked to shake hands with itself: name another engine as its peer"
        return (
            f"two engines have the id {self._engine!r}: this one (incarnation {self._incarnation!r}) and one at "
            f"{address!r} (incarnation {incarnation!r}). Give each its own --engine-id"
        )


def _oldest(peers: Iterable[Peer]) -> Peer | None:
    return min(peers, key=lambda peer: peer.since_s, default=None)


def _two_engines(engine: EngineId, former: Incarnation, address: str, peer: Peer) -> str:
    return (
        f"two engines have the id {engine!r}: incarnation {former!r} at {address!r} and incarnation "
        f"{peer.incarnation!r} at {peer.address!r}. Give each its own --engine-id"
    )
