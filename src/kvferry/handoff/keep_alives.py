"""Grants that decode keeps alive while a request still waits in its queue (R25)."""

from collections.abc import Sequence

from kvferry.handoff.actions import Peer
from kvferry.handoff.leases import Heartbeats, Timers
from kvferry.ids import TransferId

__all__ = ["KeepAlives"]


class KeepAlives:
    """Each grant is renewed until it is ended, or until the engine has not asked for it again for `keep_s`."""

    def __init__(self, heartbeats: Heartbeats, keep_s: float) -> None:
        self._heartbeats = heartbeats
        self._keep_s = keep_s
        self._kept: dict[TransferId, tuple[Sequence[Peer], float]] = {}
        self._timers: Timers[TransferId] = Timers()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, transfer: object) -> bool:
        return transfer in self._kept

    def keep(self, transfer: TransferId, peers: Sequence[Peer], now_s: float) -> None:
        """Renew it from now on."""
        if transfer not in self._kept:
            self._timers.set(transfer, now_s + self._keep_s)
        # Each time: a peer that was lost in between is forgotten by the heartbeats.
        for peer in peers:
            self._heartbeats.add(peer, transfer, now_s)
        self._kept[transfer] = (peers, now_s + self._keep_s)

    def end(self, transfer: TransferId) -> None:
        """Renew it no more, if it was kept."""
        kept = self._kept.pop(transfer, None)
        if kept is not None:
            self._timers.clear(transfer)
            for peer in kept[0]:
                self._heartbeats.remove(peer, transfer)

    def tick(self, now_s: float) -> None:
        """Ends those that the engine has not asked for again."""
        for transfer in self._timers.pop_due(now_s):
            expires_s = self._kept[transfer][1]
            if now_s >= expires_s:
                self.end(transfer)
            else:
                self._timers.set(transfer, expires_s)

    def next_s(self) -> float | None:
        """Returns when `tick` next has something to do."""
        return self._timers.next_s()
