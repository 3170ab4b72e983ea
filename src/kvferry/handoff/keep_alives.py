"""Grants that decode keeps alive while a request still waits in its queue (R25)."""

from collections.abc import Sequence

from kvferry.handoff.actions import Peer
from kvferry.handoff.leases import Heartbeats, Timers
from kvferry.ids import TransferId

__all__ = ["KeepAlives"]


class KeepAlives:
    """Each is renewed until it is ended, or until nobody has asked for it again for `keep_s`."""

    def __init__(self, beats: Heartbeats, keep_s: float) -> None:
        self._beats = beats
        self._keep_s = keep_s
        self._held: dict[TransferId, tuple[Sequence[Peer], float]] = {}
        self._timers: Timers[TransferId] = Timers()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, transfer: object) -> bool:
        return transfer in self._held

    def keep(self, transfer: TransferId, peers: Sequence[Peer], now_s: float) -> None:
        """Renew it from now on."""
        if transfer not in self._held:
            self._timers.set(transfer, now_s + self._keep_s)
        # Each time: a peer that was lost in between is forgotten by the heartbeats.
        for peer in peers:
            self._beats.add(peer, transfer, now_s)
        self._held[transfer] = (peers, now_s + self._keep_s)

    def end(self, transfer: TransferId) -> None:
        """Renew it no more, if it was held."""
        held = self._held.pop(transfer, None)
        if held is not None:
            self._timers.clear(transfer)
            for peer in held[0]:
                self._beats.remove(peer, transfer)

    def tick(self, now_s: float) -> None:
        """End those that nobody has asked for again."""
        for transfer in self._timers.pop_due(now_s):
            expires_s = self._held[transfer][1]
            if now_s >= expires_s:
                self.end(transfer)
            else:
                self._timers.set(transfer, expires_s)

    def next_s(self) -> float | None:
        """When `tick` has something to do."""
        return self._timers.next_s()
