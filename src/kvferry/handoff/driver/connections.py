"""Connections to the ranks of accepted peers, and when to try again after one was lost.

Life of a connection:

1. KNOWN      a peer engine was accepted: `add`. It is connected at once, because a transport keeps the messages of a
              peer until we connect to it.
2. CONNECTED  messages and posts go through the transport.
3. AWAY       lost, or given up. What is sent goes nowhere, until it is connected again: after 1 s, 2 s, 4 s ... 30 s.
4. REMOVED    the peer engine is gone.
"""

import logging
from collections.abc import Iterable

from kvferry.clock import Clock
from kvferry.errors import PeerLost, TransferError
from kvferry.handoff.driver.links import Link
from kvferry.ids import PeerName
from kvferry.transport.base import Transport, WakeAddress

__all__ = ["Connections"]

logger = logging.getLogger(__name__)

_RETRY_S, _MAX_RETRY_S = 1.0, 30.0


class Connections:
    """One per driver. `links` has every rank of every accepted peer."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport = transport
        self._clock = clock
        self.links: dict[PeerName, Link] = {}
        self._connected: set[PeerName] = set()
        self._away: dict[PeerName, tuple[float, float]] = {}
        """When to connect a lost peer again, and how long that pause is."""
        self._wake_addresses: dict[PeerName, WakeAddress] = {}

    @property
    def num_connected(self) -> int:
        """The number of connected peer ranks."""
        return len(self._connected)

    @property
    def num_away(self) -> int:
        """The number of lost peer ranks that will be connected again."""
        return len(self._away)

    def is_connected(self, name: PeerName) -> bool:
        """True if messages can be sent now."""
        return name in self._connected

    def add(self, links: Iterable[Link]) -> None:
        """Peers were accepted, or their links have changed. Nothing is connected yet."""
        self.links.update({link.name: link for link in links})

    def remove(self, name: PeerName) -> None:
        """The peer is gone, and was disconnected; nothing of it is kept."""
        del self.links[name]
        self._away.pop(name, None)
        self._wake_addresses.pop(name, None)

    def connect(self, name: PeerName) -> bool:
        """Connects if need be. False: the peer is away, and what is sent to it goes nowhere.

        Raises PeerLost or TransferError if the transport cannot connect.
        """
        if name in self._connected:
            return True
        now_s = self._clock.now_s()
        link = self.links.get(name)
        if link is None or now_s < self._away.get(name, (now_s, 0.0))[0]:
            return False
        self._connect(link)
        return True

    def connect_now(self, name: PeerName) -> None:
        """Connects a peer whether or not its pause is over. One that cannot be connected is tried again later."""
        try:
            self._connect(self.links[name])
        except (PeerLost, TransferError) as error:
            logger.info("peer not connected peer=%s cause=%s", name, error)
            self.stay_away(name)

    def _connect(self, link: Link) -> None:
        self._transport.connect(link.name, link.metadata, link.regions)
        self._connected.add(link.name)
        if (address := self._wake_addresses.get(link.name)) is not None:
            self._transport.set_wake_address(link.name, address)

    def disconnect(self, name: PeerName) -> None:
        """Gives the connection up; an accepted peer is connected again after a pause."""
        if name in self.links and name not in self._away:
            self.stay_away(name)
        if name in self._connected:
            self._connected.discard(name)
            self._transport.disconnect(name)

    def stay_away(self, name: PeerName) -> None:
        """Connects to this peer no sooner than after a pause, twice as long as the last one."""
        pause_s = min(_MAX_RETRY_S, 2 * self._away.get(name, (0.0, _RETRY_S / 2))[1])
        self._away[name] = (self._clock.now_s() + pause_s, pause_s)

    def message_came(self, name: PeerName) -> None:
        """A message came from this peer, so it may be connected at once."""
        self._away.pop(name, None)

    def retry(self, now_s: float) -> None:
        """Connects again to lost peers whose pause is over: they may live, and their messages wait for us."""
        for name, (at_s, _) in list(self._away.items()):
            if now_s >= at_s and name not in self._connected:
                self.stay_away(name)
                self.connect_now(name)

    def learn_wake_address(self, name: PeerName, port: int, token: bytes) -> None:
        """A peer said where it wants to be woken after each message."""
        if port and (link := self.links.get(name)) is not None:
            self._wake_addresses[name] = address = WakeAddress(link.host, port, token)
            if name in self._connected:
                self._transport.set_wake_address(name, address)
