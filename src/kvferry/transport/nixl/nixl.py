"""The NIXL transport: UCX over shared memory, TCP, RDMA and CUDA.

What NIXL promises, what it does not, and what was measured: docs/explanation/what-nixl-promises.md. In short:

- NIXL's own progress thread runs, with a delay, so that it sleeps in poll(2) until something happens (2 % of a core
  when idle). Without one, a peer's READ of our memory would not end while our own thread is busy.
- `post` does the whole copy over shared memory, with the interpreter lock released.
- The message of a transfer is sent by us after its last part has ended without an error: one post can be several NIXL
  transfers, and for a WRITE, ended means visible at the peer.
"""

import hashlib
import itertools
import logging
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.clock import Clock, MonotonicClock
from kvferry.errors import FerryError, PeerLost, TransferError
from kvferry.ids import PeerName
from kvferry.layout.blocks import Runs
from kvferry.layout.description import MemoryKind, Region
from kvferry.transport.base import LOOK_EVERY_S, Completion, Operation, Polled, Received, Ticket, WakeAddress
from kvferry.transport.nixl.doorbell import Doorbell
from kvferry.transport.nixl.ucx_environment import prepare_environment
from kvferry.transport.ordering import Inbox, Outbox
from kvferry.transport.run_checks import check_message, check_regions, check_runs

prepare_environment()  # before the library below is loaded: it reads its environment then

from kvferry.transport.nixl.nixl_errors import bindings, mapped  # noqa: E402

__all__ = ["NixlTransport"]

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 4 << 20
_SEAL = b"kvferry-nixl-1:"
_IN_FLIGHT_S = 0.0001
"""A transfer of ours is on the wire, and only a look shows that it has ended."""
_LOOK_ANYWAY_S = 0.05
"""A ring may be lost, or come long before its message."""
_EXPECTING_S = 0.0002
"""A peer has rung, and what it sent is on its way."""


@dataclass(slots=True, eq=False)
class _Part:
    """One NIXL transfer of a post."""

    handle: int
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Transfer:
    ticket: Ticket
    peer: PeerName
    parts: list[_Part]
    message: bytes
    error: str | None = None
    give_up_at_s: float | None = None
    """Set by `disconnect`: parts that have not ended by then are released."""


@dataclass(slots=True, eq=False)
class _Peer:
    regions: tuple[Region, ...]
    outbox: Outbox = field(default_factory=Outbox)


class NixlTransport:
    """One rank's end over NIXL. Implements kvferry.transport.base.Transport.

    `settle_s`: how long `disconnect` lets transfers with that peer run on before it releases them. A transfer that is
    released is reported with an error, but if the peer only slept, its bytes may still land: keep such blocks in
    quarantine, as for any vanished peer.

    `progress_delay_us`: NIXL's progress thread wakes when something arrives, and after this time at the latest. Each
    time it wakes during a copy of ours it spins until the copy is done, so it should be rare.
    """

    def __init__(
        self,
        agent_name: PeerName,
        *,
        settle_s: float = 2.0,
        progress_delay_us: int = 5000,
        backend: str = "UCX",
        clock: Clock | None = None,
    ) -> None:
        self.name = "nixl"
        self.agent_name = agent_name
        self._settle_s = settle_s
        self._progress_delay_us = progress_delay_us
        self._backend = backend
        self._clock = clock if clock is not None else MonotonicClock()
        # `close` may come from another thread than the driver's; NIXL is then never called by two at once.
        self._lock = threading.Lock()
        self._agent: Any = None
        self._registered: list[Any] = []
        self._regions: tuple[Region, ...] = ()
        self._owners: tuple[object, ...] = ()
        self._peers: dict[PeerName, _Peer] = {}
        self._leaving: set[PeerName] = set()
        """Disconnected peers whose transfers have not all ended; NIXL has not forgotten them yet."""
        self._transfers: list[_Transfer] = []
        self._inbox = Inbox()
        self._tickets = itertools.count(1)
        self._poll_error = ""
        self._bell = Doorbell(self._clock)

    def register(self, regions: Sequence[Region], owners: Sequence[object]) -> None:
        """Implements Transport.register. Starts the agent. Raises ConfigError if UCX cannot do this kind of memory."""
        with self._lock:
            if self._agent is not None:
                raise TransferError(f"{self.agent_name!r} has registered its memory already: make another transport")
            check_regions(regions)
            config = bindings.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = self._progress_delay_us
            config.useListenThread = False
            config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
            with mapped(f"start an agent with the {self._backend} backend"):
                agent = bindings.nixlAgent(self.agent_name, config)
                agent.createBackend(self._backend, {})
            self._agent = agent
            self._bell.open()
            for kind in MemoryKind:
                # Once each, however many layers share it (R21).
                unique = dict.fromkeys(region for region in regions if region.kind is kind)
                if unique:
                    rows = np.array([(r.address, r.num_bytes, r.device) for r in unique], dtype=np.uint64)
                    descriptors = bindings.nixlRegDList(_segment(kind), rows)
                    with mapped(f"register {len(unique)} {kind.value} regions, {int(rows[:, 1].sum())} bytes"):
                        agent.registerMem(descriptors)
                    self._registered.append(descriptors)
            self._regions = tuple(regions)
            self._owners = tuple(owners)
            logger.debug("agent started agent=%s regions=%d", self.agent_name, len(regions))

    def metadata(self) -> bytes:
        """Implements Transport.metadata."""
        with self._lock, mapped("describe this agent"):
            return _sealed(bytes(self._must_be_open().getLocalMD()))

    def connect(self, peer: PeerName, metadata: bytes, regions: Sequence[Region]) -> None:
        """Implements Transport.connect. For metadata of another peer: TransferError, and nothing is left behind."""
        with self._lock:
            agent = self._must_be_open()
            if peer in self._peers:
                raise TransferError(f"peer {peer!r} is connected already: disconnect it first")
            blob = _opened(metadata, peer)
            # Under the name of a peer that we know, it would replace what NIXL knows of that one.
            if not blob.startswith(_opening(bytes(agent.getLocalMD()), self.agent_name, peer)):
                raise TransferError(f"the metadata of peer {peer!r} is of another agent")
            if peer in self._leaving:
                self._let_go_of(peer)
            try:
                with mapped(f"load the metadata of peer {peer!r}"):
                    agent.loadRemoteMD(blob)
            except FerryError as error:
                self._invalidate(peer)  # what it had loaded until then
                raise TransferError(str(error)) from error
            self._peers[peer] = _Peer(tuple(regions))
            self._inbox.admit(peer)
            logger.info("peer connected agent=%s peer=%s regions=%d", self.agent_name, peer, len(regions))

    def disconnect(self, peer: PeerName) -> None:
        """Implements Transport.disconnect. Transfers with the peer may run on for `settle_s`."""
        with self._lock:
            if self._peers.pop(peer, None) is None:
                return
            self._inbox.forget(peer)
            self._bell.forget(peer)
            give_up_at_s = self._clock.now_s() + self._settle_s
            open_transfers = [transfer for transfer in self._transfers if transfer.peer == peer]
            for transfer in open_transfers:
                transfer.error = transfer.error or f"peer {peer!r} was disconnected"
                transfer.give_up_at_s = give_up_at_s
            if open_transfers:
                self._leaving.add(peer)
            else:
                self._invalidate(peer)
            logger.info("peer disconnected agent=%s peer=%s open=%d", self.agent_name, peer, len(open_transfers))

    def post(self, peer: PeerName, operation: Operation, runs: Sequence[Runs], message: bytes = b"") -> Ticket:
        """Implements Transport.post."""
        with self._lock:
            agent = self._must_be_open()
            known = self._must_be_connected(peer)
            check_message(message)
            check_runs(operation, runs, self._regions, known.regions, peer)
            transfer = _Transfer(Ticket(next(self._tickets)), peer, [], message)
            try:
                with mapped(f"prepare a {operation.value} with peer {peer!r}"):
                    for local, remote in self._descriptors(operation, runs, known):
                        handle = agent.createXferReq(_operation(operation), local, remote, peer)
                        transfer.parts.append(_Part(handle))
            except FerryError:
                self._release(transfer)
                raise
            self._start(transfer, operation)
            self._transfers.append(transfer)
            return transfer.ticket

    def send(self, peer: PeerName, message: bytes) -> None:
        """Implements Transport.send."""
        with self._lock:
            self._must_be_open()
            known = self._must_be_connected(peer)
            check_message(message)
            self._send(peer, known, message)

    def poll(self) -> Polled:
        """Implements Transport.poll."""
        with self._lock:
            if self._agent is None:
                return Polled()
            self._receive()
            completions = []
            now_s = self._clock.now_s() if self._leaving else 0.0
            for transfer in self._transfers[:]:
                if self._has_ended(transfer, now_s):
                    self._transfers.remove(transfer)
                    completions.append(self._complete(transfer))
            messages = tuple(Received(peer, body) for peer, body in self._inbox.take())
            if messages:
                self._bell.message_came()
            return Polled(tuple(completions), messages)

    def wait(self, timeout_s: float, *, look_every_s: float = LOOK_EVERY_S) -> None:
        """Implements Transport.wait. NIXL gives no sign that something has come, so peers ring (doorbell.py)."""
        if self._transfers:
            timeout_s = min(timeout_s, _IN_FLIGHT_S)
        elif self._bell.expecting():
            timeout_s = min(timeout_s, _EXPECTING_S)
        else:
            all_ring = self._bell.all_ring(self._peers)
            timeout_s = min(timeout_s, _LOOK_ANYWAY_S if all_ring else look_every_s)
        self._bell.wait(timeout_s)

    def wake(self) -> None:
        """Implements Transport.wake."""
        self._bell.wake()

    def listen(self, host: str) -> WakeAddress | None:
        """Implements Transport.listen."""
        self._bell.listen(host)
        return WakeAddress(host, self._bell.port, self._bell.token) if self._bell.port else None

    def set_wake_address(self, peer: PeerName, address: WakeAddress) -> None:
        """Implements Transport.set_wake_address."""
        if peer in self._peers:
            self._bell.learn(peer, address)

    def close(self) -> None:
        """Implements Transport.close. Waits for a copy that another thread is posting."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                for transfer in self._transfers:
                    self._release(transfer, agent)
                for peer in (*self._peers, *self._leaving):
                    self._invalidate(peer, agent)
                for descriptors in self._registered:
                    try:
                        with mapped("deregister memory"):
                            agent.deregisterMem(descriptors)
                    except FerryError as error:
                        logger.warning("deregistration failed agent=%s cause=%s", self.agent_name, error)
                logger.debug("agent closed agent=%s", self.agent_name)
            self._transfers.clear()
            self._peers.clear()
            self._leaving.clear()
            self._registered.clear()
            del agent  # the last reference: its destructor joins the progress thread
            # Only now: while a registration lives, freed memory would give "done" and wrong bytes.
            self._owners = ()
            self._regions = ()
            self._bell.close()

    def _descriptors(self, operation: Operation, runs: Sequence[Runs], known: _Peer) -> list[tuple[Any, Any]]:
        """Returns local and remote descriptor lists: one pair for each pair of memory kinds that occurs."""
        reads = operation is Operation.READ
        rows: dict[tuple[MemoryKind, MemoryKind], tuple[list[Any], list[Any]]] = {}
        for piece in runs:
            if len(piece) == 0:
                continue
            here = (piece.destination_region, piece.destination) if reads else (piece.source_region, piece.source)
            there = (piece.source_region, piece.source) if reads else (piece.destination_region, piece.destination)
            local, remote = self._regions[here[0]], known.regions[there[0]]
            local_rows, remote_rows = rows.setdefault((local.kind, remote.kind), ([], []))
            local_rows.append(_rows(local, here[1], piece.length))
            remote_rows.append(_rows(remote, there[1], piece.length))
        return [
            (
                bindings.nixlXferDList(_segment(local_kind), _joined(local_rows)),
                bindings.nixlXferDList(_segment(remote_kind), _joined(remote_rows)),
            )
            for (local_kind, remote_kind), (local_rows, remote_rows) in rows.items()
        ]

    def _start(self, transfer: _Transfer, operation: Operation) -> None:
        """Posts all parts. A part that cannot start fails the transfer; it raises only if nothing has started."""
        for index, part in enumerate(transfer.parts):
            try:
                with mapped(f"start a {operation.value} with peer {transfer.peer!r}"):
                    status = self._agent.postXferReq(part.handle)
                part.ended = status != bindings.NIXL_IN_PROG
                if status not in (bindings.NIXL_IN_PROG, bindings.NIXL_SUCCESS):
                    transfer.error = f"NIXL ended a {operation.value} with peer {transfer.peer!r} with {status}"
            except FerryError as error:
                if index == 0:
                    self._release(transfer)
                    raise
                transfer.error = str(error)
                for unstarted in transfer.parts[index:]:
                    unstarted.ended = True
                return

    def _has_ended(self, transfer: _Transfer, now_s: float) -> bool:
        for part in transfer.parts:
            if part.ended:
                continue
            try:
                with mapped(f"finish a transfer with peer {transfer.peer!r}"):
                    status = self._agent.getXferStatus(part.handle)
                part.ended = status != bindings.NIXL_IN_PROG
                if status not in (bindings.NIXL_IN_PROG, bindings.NIXL_SUCCESS):
                    transfer.error = transfer.error or f"NIXL ended a transfer with {transfer.peer!r} with {status}"
            except FerryError as error:
                part.ended = True
                transfer.error = transfer.error or str(error)
        if all(part.ended for part in transfer.parts):
            return True
        return transfer.give_up_at_s is not None and now_s >= transfer.give_up_at_s

    def _complete(self, transfer: _Transfer) -> Completion:
        self._release(transfer)
        if transfer.peer in self._leaving and all(other.peer != transfer.peer for other in self._transfers):
            self._leaving.discard(transfer.peer)
            self._invalidate(transfer.peer)
        known = self._peers.get(transfer.peer)
        if transfer.message and transfer.error is None and known is not None:
            try:
                self._send(transfer.peer, known, transfer.message)
            except FerryError as error:
                # The bytes are there and valid. If the peer does not learn of it, its lease ends.
                logger.warning("message after a transfer was lost peer=%s cause=%s", transfer.peer, error)
        return Completion(transfer.ticket, transfer.error)

    def _send(self, peer: PeerName, known: _Peer, message: bytes) -> None:
        with mapped(f"send a message to peer {peer!r}"):
            self._agent.genNotif(peer, known.outbox.frame(message))
        self._bell.ring(peer)

    def _receive(self) -> None:
        try:
            with mapped("receive messages"):
                arrived: dict[str, list[bytes]] = self._agent.getNotifs({})
            self._poll_error = ""
        except FerryError as error:
            if str(error) != self._poll_error:
                logger.warning("poll failed agent=%s cause=%s", self.agent_name, error)
            self._poll_error = str(error)
            return
        for sender, bodies in arrived.items():
            for body in bodies:
                self._inbox.put(PeerName(sender), body)
        for peer in self._inbox.take_restarted():
            if peer in self._peers:
                self._peers[peer].outbox = Outbox()

    def _let_go_of(self, peer: PeerName) -> None:
        """The peer comes back while transfers of its last connection still run: ends them now."""
        for transfer in self._transfers:
            if transfer.peer == peer:
                self._release(transfer)
                transfer.parts.clear()
        self._leaving.discard(peer)
        self._invalidate(peer)

    def _release(self, transfer: _Transfer, agent: Any = None) -> None:
        for part in transfer.parts:
            try:
                with mapped(f"release a transfer with peer {transfer.peer!r}"):
                    (agent or self._agent).releaseXferReq(part.handle)
            except FerryError as error:
                logger.debug("release failed peer=%s cause=%s", transfer.peer, error)
        transfer.parts.clear()

    def _invalidate(self, peer: PeerName, agent: Any = None) -> None:
        try:
            with mapped(f"forget peer {peer!r}"):
                (agent or self._agent).invalidateRemoteMD(peer)
        except FerryError as error:
            logger.debug("forgetting failed peer=%s cause=%s", peer, error)

    def _must_be_open(self) -> Any:
        if self._agent is None:
            raise TransferError(f"the transport of {self.agent_name!r} is closed, or has no memory registered yet")
        return self._agent

    def _must_be_connected(self, peer: PeerName) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            raise PeerLost(f"peer {peer!r} is not connected")
        return known


def _sealed(blob: bytes) -> bytes:
    """Returns NIXL's metadata with a checksum before it.

    NIXL keeps half of a truncated blob, and then refuses the whole one for ever. So damage must be found first.
    """
    return _SEAL + hashlib.sha256(blob).digest() + blob


def _opened(metadata: bytes, peer: PeerName) -> bytes:
    if len(metadata) > MAX_METADATA_BYTES:
        raise TransferError(f"peer {peer!r} sent {len(metadata)} bytes of metadata; {MAX_METADATA_BYTES} are allowed")
    head = len(_SEAL) + hashlib.sha256().digest_size
    blob = metadata[head:]
    if metadata[:head] != _SEAL + hashlib.sha256(blob).digest():
        raise TransferError(f"the metadata of peer {peer!r} is damaged, or not of the nixl transport")
    return blob


def _opening(own_metadata: bytes, own_name: PeerName, peer: PeerName) -> bytes:
    """Returns how the metadata of `peer` must begin, from how ours does: a tag, the length of the name, the name."""
    name, other = own_name.encode(), peer.encode()
    tag, found, _ = own_metadata.partition(struct.pack("<Q", len(name)) + name)
    assert found, "NIXL's metadata opens with the name of the agent"
    return tag + struct.pack("<Q", len(other)) + other


def _segment(kind: MemoryKind) -> Any:
    return bindings.DRAM_SEG if kind is MemoryKind.DRAM else bindings.VRAM_SEG


def _operation(operation: Operation) -> Any:
    return bindings.NIXL_READ if operation is Operation.READ else bindings.NIXL_WRITE


def _rows(region: Region, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns an N x 3 array, as NIXL copies it: address, length, device."""
    rows = np.empty((len(offsets), 3), dtype=np.int64)
    np.add(offsets, region.address, out=rows[:, 0])
    rows[:, 1] = lengths
    rows[:, 2] = region.device
    return rows


def _joined(rows: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return rows[0] if len(rows) == 1 else np.concatenate(rows)
