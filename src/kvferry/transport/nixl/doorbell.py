"""Where a driver's thread sleeps, and how a peer wakes it when it has sent something.

Transports bring messages, and tell nobody that one has come: they must be polled for. Polling often costs a core that
decodes, polling rarely costs each hand-off several waits. So after each message the sender also sends one UDP datagram,
the *ring*, to the port that the receiver told it in a renewal. It holds the receiver's token and nothing else, and says
nothing but "look". A lost ring costs one pause; a forged one costs one look, and many forged ones close the bell
(it still rings others).

Rung are only peers that told a port, at the numeric address of their side channel. Everybody else is polled for.
"""

import contextlib
import ipaddress
import logging
import os
import select
import socket
import threading

from kvferry.clock import Clock
from kvferry.ids import PeerName

__all__ = ["Doorbell", "numeric"]

logger = logging.getLogger(__name__)

TOKEN_BYTES = 8
_MAX_FORGED = 1000
"""So many datagrams without the token close the bell: somebody wants us to be awake."""
_FINEST_S = 0.001
"""select.poll counts milliseconds."""
_MAX_DRAINED = 256
EXPECTING_S = 0.003
"""A message and its ring go different ways: so long we look often for one that was rung for."""


class Doorbell:
    """One a driver. `wake` on any thread, `close` when the driver's has ended, everything else on the driver's."""

    def __init__(self) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self.port = 0
        """What peers are told; 0: there is no bell."""
        self.heard = False
        """A ring has come, so rings do come through."""
        self._num_forged = 0
        self._soon = threading.Event()
        self._near: socket.socket | None = None
        self._far: socket.socket | None = None
        self._bell: socket.socket | None = None
        self._poll = select.poll()
        self._peers: dict[PeerName, tuple[str, int, bytes]] = {}
        self._rung_s: float | None = None

    def open(self, host: str) -> None:
        """Bind a port of `host`, a numeric address of this machine; where that is none, nobody can ring."""
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._poll.register(self._far, select.POLLIN)
        self._bell = self._bind(host)

    def _bind(self, host: str) -> socket.socket | None:
        if not (address := numeric(host)):
            return None
        bell = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        bell.setblocking(False)
        try:
            bell.bind((address, 0))
        except OSError as error:  # the side channel is another machine's, of a rank that runs elsewhere
            logger.debug("no doorbell host=%s cause=%s", host, error)
            bell.close()
            return None
        self._poll.register(bell, select.POLLIN)
        self.port = int(bell.getsockname()[1])
        return bell

    def wake(self) -> None:
        """The driver has something to do. From any thread; never blocks, and does nothing after `close`."""
        self._soon.set()
        if self._near is not None:
            with contextlib.suppress(OSError):  # full: it will wake; closed: nobody is left to wake
                self._near.send(b"\0")

    def learn(self, peer: PeerName, host: str, port: int, token: bytes) -> None:
        """Where a peer can be rung, by its own word; `host` is numeric, or "" for one that cannot."""
        if host and port:
            self._peers[peer] = (host, port, token)

    def forget(self, peer: PeerName) -> None:
        """It is not ours any more."""
        self._peers.pop(peer, None)

    def ring(self, peer: PeerName) -> None:
        """It has been sent something. Never blocks; a ring may be lost, and who told no bell is not rung."""
        known = self._peers.get(peer)
        if known is not None and self._bell is not None:
            host, port, token = known
            with contextlib.suppress(OSError):
                self._bell.sendto(token, (host, port))

    def all_ring(self, num_peers: int) -> bool:
        """Rings come through, and every one of our peers knows of rings."""
        return self.heard and len(self._peers) == num_peers > 0

    def arrived(self) -> None:
        """A message has come: most likely that for which somebody has rung."""
        self._rung_s = None

    def expecting(self, now_s: float) -> bool:
        """Somebody has rung a moment ago, and nothing has come since."""
        return self._rung_s is not None and now_s < self._rung_s + EXPECTING_S

    def wait(self, timeout_s: float, clock: Clock) -> None:
        """Sleep until `wake`, a ring, or for so long. Below a millisecond a ring does not wake: a look comes anyway."""
        if timeout_s < _FINEST_S:
            self._soon.wait(timeout_s)
            events = self._poll.poll(0) if self._soon.is_set() else []
        else:
            events = self._poll.poll(0 if self._soon.is_set() else timeout_s * 1e3)
        self._soon.clear()
        for descriptor, _ in events:
            if self._bell is not None and descriptor == self._bell.fileno():
                self._drain(self._bell, clock)
            elif self._far is not None:
                with contextlib.suppress(OSError):
                    self._far.recv(4096)

    def _drain(self, bell: socket.socket, clock: Clock) -> None:
        for _ in range(_MAX_DRAINED):
            try:
                token = bell.recv(TOKEN_BYTES + 1)
            except BlockingIOError:
                break
            except OSError as error:
                logger.debug("doorbell read failed cause=%s", error)
                break
            if token == self.token:
                self.heard, self._rung_s = True, clock.now_s()
            else:
                self._num_forged += 1
        if self._num_forged > _MAX_FORGED:
            logger.warning("doorbell closed port=%d: %d datagrams came without its token", self.port, self._num_forged)
            # Nobody looks at it any more. We still ring with it: peers that know our port sleep until we do.
            self._poll.unregister(bell)
            self.port, self.heard = 0, False

    def close(self) -> None:
        """No socket remains. Idempotent."""
        for one in (self._near, self._far, self._bell):
            if one is not None:
                one.close()
        self._near = self._far = self._bell = None


def numeric(host: str) -> str:
    """The address, if `host` is one that can be rung: no name, which would have to be looked up, and no wildcard."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    return "" if address.is_unspecified or address.is_multicast else str(address)
