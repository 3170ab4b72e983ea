"""Keeps what is known of other engines, and decides when to ask them again. No I/O; time is an argument.

The life of a peer, with one entry per engine id:

UNKNOWN No request has named the peer, and it has not asked us. ASKING Our question is on its way; the peer is not asked
again. ACCEPTED The pair fits, whichever side asked. A new incarnation replaces the old one. REFUSED The pair does not
fit, or the answer was malformed. The peer is not asked again before `retry_at_s`; until then a request for it fails at
once, with the reason. LOST The peer was accepted and has gone, or did not answer. As REFUSED, with a shorter back-off.

A new incarnation means that the engine restarted: it may be asked at once, whatever happened to the old one (I6). If an
incarnation that was replaced asks again, two engines run under one id: it is refused with a text that names both.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from kvferry.errors import ConfigError
from kvferry.ids import EngineId, Incarnation
from kvferry.wire.versions import PROTOCOL_MAX

__all__ = ["BackOff", "Peer", "PeerAccepted", "PeerGone", "PeerState", "PeerTable", "SenderCheck"]

_MAX_FORMER = 8
"""The number of former incarnations that are remembered per engine id, so that endless restarts do not fill our
memory."""
_MAX_REASON_CHARS = 2048


class PeerState(StrEnum):
    """The state of a peer; the module's docstring explains them."""

    UNKNOWN = "unknown"
    ASKING = "asking"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """How long a peer is not asked again: first_s after its first failure, doubled by each further one up to
    longest_s."""

    refused_first_s: float = 2.0
    lost_first_s: float = 0.25
    longest_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < min(self.refused_first_s, self.lost_first_s) <= self.longest_s:
            raise ConfigError(f"back-off {self!r} must have first times above 0 and at most longest_s")

    def wait_s(self, state: PeerState, failures: int) -> float:
        """Returns the seconds until the peer may be asked again, after `failures` in a row (1 or more)."""
        first_s = self.refused_first_s if state is PeerState.REFUSED else self.lost_first_s
        return float(min(self.longest_s, first_s * 2.0 ** min(failures - 1, 30)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What is known of one engine id: an immutable snapshot of under 1 KiB."""

    engine: EngineId
    state: PeerState = PeerState.UNKNOWN
    incarnation: Incarnation | None = None
    """The incarnation, or None if it is not known. It is always known if the state is ACCEPTED."""
    address: str = ""
    """The address at which the peer was last reached, or from which it asked."""
    protocol: int = 0
    """The protocol version that is spoken with an ACCEPTED peer."""
    reason: str = ""
    """Why the peer is REFUSED or LOST, with the remedy."""
    fetch_obstacle: str = ""
    """Why prefixes cannot be fetched from an ACCEPTED peer; "" if they can."""
    notes: tuple[str, ...] = ()
    """The differences that are bridged with an ACCEPTED peer (Verdict.notes)."""
    since_s: float = 0.0
    asked_s: float = float("-inf")
    """When the last question to the peer was sent."""
    retry_at_s: float = 0.0
    failures: int = 0
    former: tuple[tuple[Incarnation, str], ...] = ()
    """Incarnations that were replaced and their addresses, latest last."""
    wanted: Incarnation | None = None
    """The incarnation that the last question was for, if a request named one."""
    paired: bool = False
    """Whether `incarnation` is accepted and has not been replaced. It stays true while a newer one is asked for."""


@dataclass(frozen=True, slots=True)
class PeerAccepted:
    """A peer was accepted: only now may anything be allocated, registered or connected for it."""

    engine: EngineId
    incarnation: Incarnation
    hello: bytes
    """The peer's payload (wire.hello), decoded, checked and paired, and encoded again in our newest version."""
    protocol: int = PROTOCOL_MAX
    """The version in which hand-off messages are exchanged with this peer."""


@dataclass(frozen=True, slots=True)
class PeerGone:
    """An accepted incarnation was replaced or lost, or no longer fits: disconnect it. Its hand-offs end as lost.

    An incarnation that is not known, or was already replaced, changes nothing. It may be accepted again.
    """

    engine: EngineId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class SenderCheck:
    """The result of checking who sent a handshake. Both texts are empty if the sender may go on."""

    conflict: str = ""
    """Names two engines that run under one id. The sender must be refused."""
    full: str = ""
    """Says that there is no room for another peer, and which setting to change. The sender must be refused."""


class PeerTable:
    """All peers of one engine. Thread-safe: the listener's and the engine's thread share it. No method blocks."""

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
        """Returns a snapshot of a peer, which is UNKNOWN if there is no entry."""
        with self._lock:
            return self._peers.get(engine) or Peer(engine=engine)

    def snapshot(self) -> tuple[Peer, ...]:
        """Returns snapshots of all peers, for /health and metrics."""
        with self._lock:
            return tuple(self._peers.values())

    def may_ask(self, engine: EngineId, now_s: float, incarnation: Incarnation | None = None) -> bool:
        """Returns whether to send a handshake now. `incarnation` is the one that a request names, if any."""
        peer = self.get(engine)
        if peer.state is PeerState.UNKNOWN:
            return True
        if peer.state is PeerState.ASKING:
            return False
        restarted = incarnation not in {None, peer.incarnation, *(former for former, _ in peer.former)}
        if peer.state is PeerState.ACCEPTED:
            return restarted and now_s >= peer.retry_at_s
        if restarted and incarnation != peer.wanted:
            # If every request names a new incarnation, this gap limits how often they cost a handshake.
            return now_s - peer.asked_s >= self._back_off.lost_first_s
        return now_s >= peer.retry_at_s

    def asking(
        self, engine: EngineId, now_s: float, *, address: str = "", incarnation: Incarnation | None = None
    ) -> str:
        """Records that a handshake is about to be sent. Returns why it must not be sent, or "" if it may.

        It must not if there is no room for another peer, or if the id is our own.
        """
        with self._lock:
            if engine == self._engine:
                return self._our_own_id(incarnation, address)
            peer = self._peers.get(engine)
            if peer is None:
                full = self._make_room()
                if full:
                    return full
                peer = Peer(engine=engine)
            # An older incarnation may be accepted meanwhile: its hand-offs go on until it is replaced or gone.
            self._peers[engine] = replace(
                peer,
                state=PeerState.ASKING,
                address=address or peer.address,
                since_s=now_s,
                asked_s=now_s,
                wanted=incarnation,
            )
            return ""

    def check_sender(self, engine: EngineId, incarnation: Incarnation, *, address: str) -> SenderCheck:
        """Checks that the sender of a handshake is no second engine under a known id, and that there is room for it."""
        with self._lock:
            if engine == self._engine:
                return SenderCheck(conflict=self._our_own_id(incarnation, address))
            peer = self._peers.get(engine)
            if peer is None:
                return SenderCheck(full=self._make_room())
            for former, former_address in peer.former:
                if former == incarnation:
                    return SenderCheck(conflict=_two_engines(engine, former, address or former_address, peer))
            return SenderCheck()

    def accepted(
        self,
        engine: EngineId,
        incarnation: Incarnation,
        now_s: float,
        *,
        address: str,
        protocol: int,
        notes: tuple[str, ...] = (),
        fetch_obstacle: str = "",
    ) -> Incarnation | None:
        """Records that the pair fits. Returns the incarnation that this one replaces, which must be disconnected."""
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
                fetch_obstacle=fetch_obstacle,
                notes=notes,
                since_s=now_s,
                # A request named another incarnation than the one that answered: do not ask for it again at once.
                retry_at_s=now_s + self._back_off.lost_first_s if other_wanted else 0.0,
                former=former,
                paired=True,
            )
            return peer.incarnation if peer.paired and peer.incarnation != incarnation else None

    def refused(
        self, engine: EngineId, incarnation: Incarnation | None, now_s: float, reason: str, *, address: str = ""
    ) -> Incarnation | None:
        """Records that the pair does not fit. Returns the incarnation that was paired until now, to disconnect it."""
        return self._failed(engine, incarnation, now_s, reason, PeerState.REFUSED, address)

    def lost(self, engine: EngineId, incarnation: Incarnation | None, now_s: float, reason: str) -> Incarnation | None:
        """Records that a peer did not answer (`incarnation` is None), or that its transport lost it.

        Returns the same as `refused`.
        """
        return self._failed(engine, incarnation, now_s, reason, PeerState.LOST, "")

    def forget(self, engine: EngineId) -> None:
        """Forgets everything about a peer."""
        with self._lock:
            self._peers.pop(engine, None)

    def expire(self, now_s: float, idle_s: float = 600.0) -> tuple[EngineId, ...]:
        """Forgets refused and lost peers whose state has not changed for `idle_s`, and returns them."""
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
                # The newer incarnation that a request named did not answer; the one that is paired is not affected.
                self._peers[engine] = replace(
                    peer, state=PeerState.ACCEPTED, since_s=now_s, retry_at_s=retry_at_s, failures=failures
                )
                return None
            if peer.paired and incarnation != peer.incarnation and peer.state is PeerState.ACCEPTED:
                return None  # an incarnation that is neither paired nor asked for changes nothing (I6)
            # The incarnation that a request named stays in `wanted`, so that the next request for it is not special.
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
        """Makes room for one more peer by dropping the refused or lost one that is silent for longest.

        Returns why there is no room, or "".
        """
        if len(self._peers) < self._max_peers:
            return ""
        idle = _oldest(peer for peer in self._peers.values() if peer.state in (PeerState.REFUSED, PeerState.LOST))
        if idle is None:
            return (
                f"{self._engine!r} already has {len(self._peers)} peers, which is its limit: "
                f"raise side_channel.max_peers={self._max_peers}, or start more engines"
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
