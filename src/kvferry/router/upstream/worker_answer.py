"""A worker's answer as it is read: the limits on each wait, and the failures told apart.

A chunk of a stream costs no timer of its own: see deadlines.
"""

import asyncio
import math
from collections.abc import Mapping

from kvferry.errors import PeerError
from kvferry.router.fleet.workers import Worker, reason_of
from kvferry.router.upstream.http1 import Connection
from kvferry.router.upstream.http1_parse import BadAnswer

__all__ = ["Answer", "WorkerFailed"]


class WorkerFailed(PeerError):
    """A worker did not answer as it should, and nothing of its answer has gone to the client."""

    def __init__(
        self, worker: Worker, reason: str, *, reached: bool, status: int = 502, answered: bool = False
    ) -> None:
        super().__init__(f"{worker.name} ({worker.url}) {reason.strip() or 'has failed, and nothing says why'}")
        self.worker = worker
        self.reached = reached
        """It may have worked on the request."""
        self.answered = answered
        """It said itself that it failed: nothing of the request is left there."""
        self.status = status
        """What the client is told, if nobody else can help: 503 for overload, 504 for a time-out, else 502."""


class Answer:
    """Status and headers are here; the body is to be read, by one task. A `Wait` of its worker: see `Worker.waits`."""

    def __init__(self, worker: Worker, connection: Connection, pause_s: float) -> None:
        """The connection has the head of the answer. `pause_s`: the worker must not be silent for longer within it."""
        self.waiting_since_s: float | None = None
        self.status = connection.parser.status
        """Of HTTP."""
        self.headers: Mapping[str, str] = connection.parser.headers
        """As the worker sent them, names in lower case."""
        self._worker = worker
        self._connection = connection
        self._pause_s = pause_s
        self._loop = asyncio.get_running_loop()

    @property
    def content_type(self) -> str:
        """Without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """The whole body. Raises WorkerFailed if it breaks off."""
        self.waiting_since_s = self._loop.time()
        try:
            while not self._connection.parser.complete:
                await self._connection.wait()
                self.waiting_since_s = self._loop.time()
        except (BadAnswer, OSError) as error:
            raise self._broke_off(error) from error
        finally:
            self.waiting_since_s = None
        return self._connection.take()

    async def read_some(self) -> bytes:
        """The next bytes, as they come; empty at the end. Raises WorkerFailed if the stream breaks off."""
        parser = self._connection.parser
        if not parser.parts:
            self.waiting_since_s = self._loop.time()
            try:
                while not parser.parts:
                    if parser.complete:
                        return b""
                    await self._connection.wait()
            except (BadAnswer, OSError) as error:
                raise self._broke_off(error) from error
            finally:
                self.waiting_since_s = None
        return self._connection.take()

    def give_up(self, reason: str) -> None:
        """End the wait that runs, if one does, as WorkerFailed with this reason. On the event loop; never blocks."""
        if self.waiting_since_s is not None:
            failure = WorkerFailed(self._worker, reason, reached=True, status=504)
            self._connection.fail(failure)  # wakes the reader; what came before it is not lost

    @property
    def due_s(self) -> float:
        """See Deadlines: while the client is slow to take what is here, nobody waits for the worker."""
        return math.inf if self.waiting_since_s is None else self.waiting_since_s + self._pause_s

    def on_due(self) -> None:
        """It is silent."""
        self.give_up(f"paused for {self._pause_s:g} s in its answer")

    def _broke_off(self, error: Exception) -> WorkerFailed:
        return WorkerFailed(self._worker, f"broke off its answer: {reason_of(error)}", reached=True)
