"""A channel between vLLM's scheduler and one worker that does not wait for the engine's steps; an idle engine has none.

Orders go down at once: peers that were accepted or are gone and, if no stream must be kept in order, all other orders
of the scheduler half. Reports come up. The worker binds a socket in a folder that only its user may enter, and its
address
travels in its RankInfo; the socket disappears from the folder as soon as the scheduler is connected. If the worker
cannot be reached (it is on another host, or the path is too long), everything travels with the engine's steps.
"""

import contextlib
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from select import POLLIN, poll

import msgspec

from kvferry.connector.base import PeerGone, StepOrders, StepReport

__all__ = ["SchedulerChannel", "WorkerChannel"]

logger = logging.getLogger(__name__)

_ENDS = (OSError, EOFError)
_JOIN_S = 2.0


class _WorkerMessage(msgspec.Struct, array_like=True):
    report: StepReport | None
    lost: PeerGone | None


_orders: msgspec.msgpack.Decoder[StepOrders] = msgspec.msgpack.Decoder(StepOrders)
_worker_messages: msgspec.msgpack.Decoder[_WorkerMessage] = msgspec.msgpack.Decoder(_WorkerMessage)


class WorkerChannel:
    """The worker's end. `on_orders` is called with all orders that arrive, on a thread of its own or in `catch_up`."""

    def __init__(self, on_orders: Callable[[StepOrders], None]) -> None:
        """Binds, and waits for the scheduler on a thread of its own. Never raises; `address` is empty after an
        error.
        """
        self._on_orders = on_orders
        self._reading = threading.Lock()
        self._connection: Connection | None = None
        self._there = poll()
        self.address = ""
        """The address for the scheduler; empty if there is none."""
        self._folder = ""
        try:
            # Not the folder that multiprocessing makes: that one is removed at the exit of an interpreter, and vLLM's
            # workers are killed.
            self._folder = tempfile.mkdtemp(prefix="kvferry-channel-")
            listener = Listener(os.path.join(self._folder, "worker"), family="AF_UNIX", backlog=1)
        except OSError as error:
            self._remove_folder()
            logger.info("no channel between scheduler and worker cause=%s", error)
            return
        self.address = str(listener.address)
        self._thread = threading.Thread(target=self._run, args=(listener,), name="kvferry-channel", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether the scheduler has connected."""
        return self._connection is not None

    def catch_up(self) -> None:
        """Reads at once what was sent before now, because orders that come with a step may depend on it."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(*_ENDS):
                self._read(connection)

    def send(self, report: StepReport | PeerGone) -> bool:
        """Sends a report to the scheduler at once. Returns False if it is not connected.

        One thread at a time; blocks only while the scheduler does not read.
        """
        connection = self._connection
        if connection is None:
            return False
        message = _WorkerMessage(None, report) if isinstance(report, PeerGone) else _WorkerMessage(report, None)
        try:
            connection.send_bytes(msgspec.msgpack.encode(message))
        except _ENDS:
            return False
        return True

    def close(self) -> None:
        """Closes the socket and ends the thread. Idempotent."""
        if not self.address:
            return
        if self._connection is None:
            with contextlib.suppress(*_ENDS):
                Client(self.address, family="AF_UNIX").close()  # the thread waits for a scheduler that never came
        else:
            _shut_down(self._connection)
        self._thread.join(_JOIN_S)

    def _run(self, listener: Listener) -> None:
        try:
            try:
                with listener:
                    connection = listener.accept()
            finally:
                self._remove_folder()
            self._there.register(connection, POLLIN)
            self._connection = connection
            with connection:
                while True:
                    connection.poll(None)
                    self._read(connection)
        except _ENDS:
            logger.debug("the channel to the scheduler has ended")

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)

    def _read(self, connection: Connection) -> None:
        """Reads everything that is there; one thread at a time, so that orders keep the order in which they were
        sent.
        """
        with self._reading:
            while self._there.poll(0):  # Connection.poll makes a selector at each call, too slow for every step
                self._on_orders(_orders.decode(connection.recv_bytes()))


class SchedulerChannel:
    """The scheduler's end. `on_report` is called on a thread of its own with what the worker reports."""

    def __init__(self, address: str, on_report: Callable[[StepReport | PeerGone], None]) -> None:
        """Connects to the worker. Raises OSError if it cannot be reached."""
        if not address:
            raise OSError("a worker has no channel")
        self._connection = Client(address, family="AF_UNIX")
        self._sending = threading.Lock()
        self._on_report = on_report
        self._thread = threading.Thread(target=self._run, name="kvferry-channel", daemon=True)
        self._thread.start()

    def send(self, orders: StepOrders) -> None:
        """Sends orders; once it returns, `catch_up` of the worker reads them. Blocks only while the worker does not
        read.
        """
        with self._sending, contextlib.suppress(*_ENDS):  # a worker that is gone has taken its engine with it
            self._connection.send_bytes(msgspec.msgpack.encode(orders))

    def close(self) -> None:
        """Closes the socket and ends the thread. Idempotent."""
        _shut_down(self._connection)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            with self._connection:
                while True:
                    message = _worker_messages.decode(self._connection.recv_bytes())
                    if (report := message.report or message.lost) is not None:
                        self._on_report(report)
        except _ENDS:
            logger.debug("the channel to a worker has ended")


def _shut_down(connection: Connection) -> None:
    """Ends the connection for both ends. A descriptor from which a thread still reads must not be closed under it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
