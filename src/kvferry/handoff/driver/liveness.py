"""Which peers gave a sign of life lately, and which are gone for good. No I/O; time is an argument.

A peer that died in silence, with an id that no other engine will use again, would be kept for ever: no hand-off with it
fails, because there is none. So a peer that was silent for a quarter of `gone_after_s` is pinged; one that knows us
answers at once. A peer that was pinged three times, and was silent for the quarter after that, is gone. Pings are
counted, not only seconds: a process that was stopped for an hour pings first, like any other.

Life of a peer: added (and pinged at once), pinged up to three times while it is silent, back to zero at each sign of
life, then gone or forgotten.
"""

from collections.abc import Callable

from kvferry.ids import PeerName

__all__ = ["GONE_AFTER_S", "Liveness"]

GONE_AFTER_S = 60.0
"""A peer that was silent for this long (or two leases, if that is longer) is forgotten, within a quarter of that."""
_MAX_PINGS = 3


class Liveness:
    """One per driver. `ping(name)` sends the question."""

    def __init__(self, gone_after_s: float, ping: Callable[[PeerName], None]) -> None:
        self._every_s = gone_after_s / (_MAX_PINGS + 1)
        self._ping = ping
        self._alive: set[PeerName] = set()
        self._pings: dict[PeerName, int] = {}
        self.next_s = float("inf")
        """When `tick` next has something to do."""

    def __len__(self) -> int:
        return len(self._pings)

    def add(self, name: PeerName, now_s: float) -> None:
        """A peer was accepted: ping it at once, which also sets up the wire between us."""
        if not self._pings:
            self.next_s = now_s + self._every_s
        self._pings[name] = 0
        self._alive.add(name)
        self._ping(name)

    def message_came(self, name: PeerName) -> None:
        """A message came from this peer. Cheap: called for every message."""
        self._alive.add(name)

    def forget(self, name: PeerName) -> None:
        """The peer is gone."""
        self._pings.pop(name, None)
        self._alive.discard(name)
        if not self._pings:
            self.next_s = float("inf")

    def tick(self, now_s: float) -> list[PeerName]:
        """Pings the peers that were silent, and returns those that are gone."""
        alive, self._alive = self._alive, set()
        gone = []
        for name, pings in self._pings.items():
            if name in alive:
                self._pings[name] = 0
            elif pings == _MAX_PINGS:
                gone.append(name)
            else:
                self._pings[name] = pings + 1
                self._ping(name)
        self.next_s = now_s + self._every_s if self._pings else float("inf")
        return gone
