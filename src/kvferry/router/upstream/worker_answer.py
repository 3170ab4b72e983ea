"""Reads a worker's answer, limits each wait for it, and turns what goes wrong into WorkerFailed.

A chunk of a stream needs no timer of its own: see `deadlines`.
"""

import asyncio
import math
from collections.abc import Mapping

from kvferry.router.fleet.failures import WorkerFailed
from kvferry.router.fleet.outcomes import Outcome
from kvferry.router.fleet.worker import Worker
from kvferry.router.fleet.workers import reason_of
from kvferry.router.upstream.http1 import Connection
from kvferry.router.upstream.http1_parse import BadAnswer

__all__ = ["Answer"]


class Answer:
    """An answer whose status and headers are here; one task reads its body. It is a `Wait` of its worker: see
    `Worker.ending`."""

    def __init__(self, worker: Worker, connection: Connection, pause_s: float) -> None:
        """The connection must have the head of the answer. `pause_s` limits how long the worker may be silent within
        its body."""
        self.waiting_since_s: float | None = None
        self.status = connection.parser.status
        """The HTTP status."""
        self.headers: Mapping[str, str] = connection.parser.headers
        """The headers as the worker sent them, with names in lower case."""
        self._worker = worker
        self._connection = connection
        self._pause_s = pause_s
        self._loop = asyncio.get_running_loop()
        self._body: bytes | None = None

    @property
    def content_type(self) -> str:
        """The content type without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """Returns the whole body, also if it was read before. Raises WorkerFailed if it breaks off."""
        if self._body is not None:
            return self._body
        self.waiting_since_s = self._loop.time()
        try:
            while not self._connection.parser.complete:
                await self._connection.wait()
                self.waiting_since_s = self._loop.time()
        except (BadAnswer, OSError) as error:
            raise self._broke_off(error) from error
        finally:
            self.waiting_since_s = None
        self._body = self._connection.take()
        return self._body

    async def read_some(self) -> bytes:
        """Returns the next bytes as they come; empty at the end. Raises WorkerFailed if the stream breaks off."""
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
        """Ends the current wait, if there is one, with a WorkerFailed of this reason. Called on the event loop; never
        blocks."""
        if self.waiting_since_s is not None:
            failure = WorkerFailed(self._worker, reason, Outcome.TIMED_OUT)
            self._connection.fail(failure)  # wakes the reader; what came before it is not lost

    @property
    def due_s(self) -> float:
        """The loop time by which the next bytes must have come. Infinity while the router does not wait for the worker,
        as when the client is slow to take what is here."""
        return math.inf if self.waiting_since_s is None else self.waiting_since_s + self._pause_s

    def on_due(self) -> None:
        """Gives up, as `Deadlines` calls it: the worker has been silent for too long."""
        self.give_up(f"paused for {self._pause_s:g} s in its answer")

    def _broke_off(self, error: Exception) -> WorkerFailed:
        return WorkerFailed(self._worker, f"broke off its answer: {reason_of(error)}", Outcome.DISCONNECTED)
