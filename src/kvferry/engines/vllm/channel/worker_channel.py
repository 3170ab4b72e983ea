"""A line of our own between vLLM's scheduler and a worker, past the engine's steps: an idle engine takes none.

Down go orders, at once: peers that were accepted or are gone, and, where no stream must be kept in order, what else the
scheduler half has to say. Up goes what a worker has to report. The worker binds a socket in a folder that only its user
may enter, and its address travels in its RankInfo; the socket is gone from there as soon as the scheduler is connected.
Where it cannot be reached (a worker on another host, a path that is too long), everything travels with the engine's
steps.
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


class _Told(msgspec.Struct, array_like=True):
    report: StepReport | None
    lost: PeerGone | None


_orders: msgspec.msgpack.Decoder[StepOrders] = msgspec.msgpack.Decoder(StepOrders)
_told: msgspec.msgpack.Decoder[_Told] = msgspec.msgpack.Decoder(_Told)


class WorkerChannel:
    """The worker's end. `hear` is called with all orders that come, on a thread of ours or in `catch_up`."""

    def __init__(self, hear: Callable[[StepOrders], None]) -> None:
        """Binds, and waits for the scheduler on a thread of its own. Never raises: see `address`."""
        self._hear = hear
        self._reading = threading.Lock()
        self._connection: Connection | None = None
        self._there = poll()
        self.address = ""
        """For the scheduler; empty: there is none."""
        self._folder = ""
        try:
            # Not the folder that multiprocessing makes: that one is removed at the exit of an interpreter, and vLLM's
            # workers are killed.
            self._folder = tempfile.mkdtemp(prefix="kvferry-line-")
            listener = Listener(os.path.join(self._folder, "worker"), family="AF_UNIX", backlog=1)
        except OSError as error:
            self._remove_folder()
            logger.info("no line between scheduler and worker cause=%s", error)
            return
        self.address = str(listener.address)
        self._thread = threading.Thread(target=self._run, args=(listener,), name="kvferry-line", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """The scheduler has come."""
        return self._connection is not None

    def catch_up(self) -> None:
        """Hear at once what was sent before now: orders that come with a step may follow on it."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(*_ENDS):
                self._read(connection)

    def tell(self, news: StepReport | PeerGone) -> bool:
        """The scheduler hears it at once. False: nobody is there. One thread at a time; blocks only for a scheduler
        that stands still.
        """
        connection = self._connection
        if connection is None:
            return False
        told = _Told(None, news) if isinstance(news, PeerGone) else _Told(news, None)
        try:
            connection.send_bytes(msgspec.msgpack.encode(told))
        except _ENDS:
            return False
        return True

    def close(self) -> None:
        """No socket, no thread remains. Idempotent."""
        if not self.address:
            return
        if self._connection is None:
            with contextlib.suppress(*_ENDS):
                Client(self.address, family="AF_UNIX").close()  # the thread waits for a scheduler that never came
        else:
            _hang_up(self._connection)
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
            logger.debug("the line to the scheduler has ended")

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)

    def _read(self, connection: Connection) -> None:
        """All that is there. One thread at a time, so that orders are heard in the order in which they were sent."""
        with self._reading:
            while self._there.poll(0):  # Connection.poll makes a selector each time: once a step, that is a lot
                self._hear(_orders.decode(connection.recv_bytes()))


class SchedulerChannel:
    """The scheduler's end. `hear` is called on a thread of ours with what the worker tells."""

    def __init__(self, address: str, hear: Callable[[StepReport | PeerGone], None]) -> None:
        """Raises OSError where nobody can be reached."""
        if not address:
            raise OSError("a worker has none")
        self._connection = Client(address, family="AF_UNIX")
        self._sending = threading.Lock()
        self._hear = hear
        self._thread = threading.Thread(target=self._run, name="kvferry-line", daemon=True)
        self._thread.start()

    def send(self, orders: StepOrders) -> None:
        """Once it returns, a `catch_up` of the worker hears it. Blocks only for a worker that stands still."""
        with self._sending, contextlib.suppress(*_ENDS):  # a worker that is gone has taken its engine with it
            self._connection.send_bytes(msgspec.msgpack.encode(orders))

    def close(self) -> None:
        """No socket, no thread remains. Idempotent."""
        _hang_up(self._connection)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            with self._connection:
                while True:
                    told = _told.decode(self._connection.recv_bytes())
                    if (news := told.report or told.lost) is not None:
                        self._hear(news)
        except _ENDS:
            logger.debug("the line to a worker has ended")


def _hang_up(connection: Connection) -> None:
    """Both ends find that it is over. A descriptor that a thread still reads from must not be closed under it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
