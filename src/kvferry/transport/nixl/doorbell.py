"""Where a NIXL transport sleeps, and how a peer wakes it after it has sent something.

NIXL brings messages, and gives no sign that one has come: they must be polled for. Polling often costs a core that
decodes, polling rarely costs each hand-off several waits. So after each message the sender also sends one UDP datagram,
the *ring*, to the port that the receiver gave it (`WakeAddress`). It holds the receiver's token and nothing else, and
says only "look". A lost ring costs one pause; a forged one costs one look, and many forged ones close the bell (it
still rings others).

Only peers that gave a port at a numeric address are rung. All others have to poll.

Life of a bell: made, then `open` (it can be woken by its own process), then `listen` (peers can ring), then `close`.
"""

import contextlib
import ipaddress
import logging
import os
import select
import socket
import threading
from collections.abc import Collection

from kvferry.clock import Clock
from kvferry.ids import PeerName
from kvferry.transport.base import WakeAddress

__all__ = ["EXPECTING_S", "TOKEN_BYTES", "Doorbell", "numeric"]

logger = logging.getLogger(__name__)

TOKEN_BYTES = 8
_MAX_FORGED = 1000
"""This many datagrams without the token close the bell: a stranger wants to keep us awake."""
_FINEST_S = 0.001
"""select.poll counts milliseconds."""
_MAX_DRAINED = 256
EXPECTING_S = 0.003
"""A message and its ring go different ways: for this long after a ring we look often for the message."""


class Doorbell:
    """One per transport. `wake` may be called on any thread, `close` after the driver's has ended, the rest on its."""

    def __init__(self, clock: Clock) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self.port = 0
        """Where peers can ring; 0: they cannot."""
        self.rings_arrive = False
        """A ring has come, so rings get through to us."""
        self._clock = clock
        self._num_forged = 0
        self._woken = threading.Event()
        self._wake_sender: socket.socket | None = None
        self._wake_receiver: socket.socket | None = None
        self._bell: socket.socket | None = None
        self._poll = select.poll()
        self._peers: dict[PeerName, WakeAddress] = {}
        self._rung_at_s: float | None = None

    def open(self) -> None:
        """From now on `wake` ends a `wait`, however long."""
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._poll.register(self._wake_receiver, select.POLLIN)

    def listen(self, host: str) -> None:
        """Binds a port of `host`. If that is no numeric address of this machine, peers cannot ring."""
        if not (address := numeric(host)):
            return
        bell = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        bell.setblocking(False)
        try:
            bell.bind((address, 0))
        except OSError as error:  # the side channel is on another machine, as for a rank that runs elsewhere
            logger.debug("no doorbell host=%s cause=%s", host, error)
            bell.close()
            return
        self._poll.register(bell, select.POLLIN)
        self._bell = bell
        self.port = int(bell.getsockname()[1])

    def wake(self) -> None:
        """The driver has something to do. From any thread; never blocks, and does nothing after `close`."""
        self._woken.set()
        if self._wake_sender is not None:
            with contextlib.suppress(OSError):  # full: it will wake; closed: there is nothing to wake
                self._wake_sender.send(b"\0")

    def learn(self, peer: PeerName, address: WakeAddress) -> None:
        """Where a peer can be rung, by its own word. A host that is no numeric address cannot be."""
        if address.port and numeric(address.host):
            self._peers[peer] = address

    def forget(self, peer: PeerName) -> None:
        """The peer is not rung any more."""
        self._peers.pop(peer, None)

    def ring(self, peer: PeerName) -> None:
        """Wakes a peer that has been sent something, if it gave an address. Never blocks; a ring may be lost."""
        address = self._peers.get(peer)
        if address is not None and self._bell is not None:
            with contextlib.suppress(OSError):
                self._bell.sendto(address.token, (numeric(address.host), address.port))

    def all_ring(self, peers: Collection[PeerName]) -> bool:
        """True if rings get through to us, and each of these peers knows of rings (and there is one)."""
        return self.rings_arrive and bool(peers) and all(peer in self._peers for peer in peers)

    def message_came(self) -> None:
        """A message has come: most likely the one that a peer has rung for."""
        self._rung_at_s = None

    def expecting(self) -> bool:
        """True if a peer has rung a moment ago, and no message has come since."""
        return self._rung_at_s is not None and self._clock.now_s() < self._rung_at_s + EXPECTING_S

    def wait(self, timeout_s: float) -> None:
        """Sleeps until `wake`, a ring, or the timeout. A ring does not end a sleep of less than a millisecond."""
        if timeout_s < _FINEST_S:
            self._woken.wait(timeout_s)
            events = self._poll.poll(0) if self._woken.is_set() else []
        else:
            events = self._poll.poll(0 if self._woken.is_set() else timeout_s * 1e3)
        self._woken.clear()
        for descriptor, _ in events:
            if self._bell is not None and descriptor == self._bell.fileno():
                self._drain(self._bell)
            elif self._wake_receiver is not None:
                with contextlib.suppress(OSError):
                    self._wake_receiver.recv(4096)

    def _drain(self, bell: socket.socket) -> None:
        for _ in range(_MAX_DRAINED):
            try:
                token = bell.recv(TOKEN_BYTES + 1)
            except BlockingIOError:
                break
            except OSError as error:
                logger.debug("doorbell read failed cause=%s", error)
                break
            if token == self.token:
                self.rings_arrive, self._rung_at_s = True, self._clock.now_s()
            else:
                self._num_forged += 1
        if self._num_forged > _MAX_FORGED:
            logger.warning("doorbell closed port=%d: %d datagrams came without its token", self.port, self._num_forged)
            # We do not look at it any more. We still ring with it: peers that know our port sleep until we do.
            self._poll.unregister(bell)
            self.port, self.rings_arrive = 0, False

    def close(self) -> None:
        """Closes every socket. Idempotent."""
        for one in (self._wake_sender, self._wake_receiver, self._bell):
            if one is not None:
                one.close()
        self._wake_sender = self._wake_receiver = self._bell = None


def numeric(host: str) -> str:
    """Returns the address if `host` is one that can be rung: no name, which has to be looked up, and no wildcard."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    return "" if address.is_unspecified or address.is_multicast else str(address)
