"""A worker's answer as it is read: the limits on each wait, and the failures told apart.

A chunk of a stream costs no timer of its own: one timer a response stands for all its waits. When it rings too early,
because bytes came in between, it is set anew to the limit of the wait that runs by then.
"""

import asyncio
from collections.abc import Awaitable, Mapping

from kvferry.errors import PeerError
from kvferry.router.http1 import Connection
from kvferry.router.http1_parse import BadAnswer
from kvferry.router.workers import Worker, reason_of

__all__ = ["Answer", "WorkerFailed"]


class WorkerFailed(PeerError):
    """A worker did not answer as it should, and nothing of its answer has gone to the client."""

    def __init__(
        self, worker: Worker, reason: str, *, reached: bool, status: int = 502, answered: bool = False
    ) -> None:
        super().__init__(f"{worker.name} ({worker.url}) {reason}")
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
        self._timer: asyncio.TimerHandle | None = None

    @property
    def content_type(self) -> str:
        """Without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """The whole body. Raises WorkerFailed if it breaks off."""
        return await self._timed(self._connection.read())

    async def read_some(self) -> bytes:
        """The next bytes, as they come; empty at the end. Raises WorkerFailed if the stream breaks off."""
        return await self._timed(self._connection.read_some())

    def close(self) -> None:
        """No more waits. The connection is the upstream's to keep or to close."""
        if self._timer is not None:
            self._timer.cancel()

    def give_up(self, reason: str) -> None:
        """End the wait that runs, if one does, as WorkerFailed with this reason. On the event loop; never blocks."""
        if self.waiting_since_s is not None:
            failure = WorkerFailed(self._worker, reason, reached=True, status=504)
            self._connection.fail(failure)  # wakes the reader; what came before it is not lost

    async def _timed(self, reading: Awaitable[bytes]) -> bytes:
        self.waiting_since_s = now_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(now_s + self._pause_s, self._on_timer)
        try:
            return await reading
        except (BadAnswer, OSError) as error:
            raise WorkerFailed(self._worker, f"broke off its answer: {reason_of(error)}", reached=True) from error
        finally:
            self.waiting_since_s = None

    def _on_timer(self) -> None:
        self._timer = None
        if self.waiting_since_s is None:
            return  # nobody waits for the worker: the next wait sets it
        due_s = self.waiting_since_s + self._pause_s
        if self._loop.time() < due_s:
            self._timer = self._loop.call_at(due_s, self._on_timer)
        else:
            self.give_up(f"paused for {self._pause_s:g} s in its answer")
