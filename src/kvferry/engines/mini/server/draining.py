"""A worker that is told to stop: it ends what it has begun, takes nothing new, and then its process may end.

SERVING -> DRAINING   `begin`: SIGTERM or POST /v1/kvferry/drain. New requests get 503; open ones go on.
        -> SETTLING   no answer is open. The worker is told: what peers ask for anew is refused, grants that nobody
                      claims end soon, those that somebody holds end by confirmation or with their lease.
        -> ENDED      no hand-off is open and no block is held; or the time is over. `wait_ended` returns.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from kvferry.engines.mini.server.engine_thread import EngineThread
from kvferry.errors import FerryError

__all__ = ["Draining", "Drains"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05


class Drains(Protocol):
    """What a worker has for it."""

    def drain(self) -> None:
        """Begin no hand-off with a peer that is not open already. From any thread; never blocks."""
        ...

    @property
    def drained(self) -> bool:
        """After `drain`: nothing of a hand-off is left. Read on the engine thread."""
        ...


class Draining:
    """One a server. On the event loop."""

    def __init__(
        self, engine: EngineThread, worker: Drains, *, num_answering: Callable[[], int], timeout_s: float
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._num_answering = num_answering
        self._timeout_s = timeout_s
        self._begun = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Nothing new is taken."""
        return self._begun.is_set()

    def begin(self, reason: str) -> None:
        """Take nothing new from now on. Idempotent; never blocks."""
        if not self.begun:
            logger.info("draining cause=%s open=%d timeout_s=%g", reason, self._num_answering(), self._timeout_s)
            self._begun.set()

    async def wait_ended(self) -> None:
        """Wait until a drain was begun, and has ended or taken `timeout_s`. Never raises for what is left."""
        await self._begun.wait()
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._end()
        except TimeoutError:
            logger.warning(
                "drain timed out, what is open is cut off open=%d after_s=%g", self._num_answering(), self._timeout_s
            )
            await self._engine.stop()  # whose clients are told so, while there is somebody to tell them
        except FerryError as error:
            logger.warning("drain ends cause=%s", error)  # the engine has died: nothing will end any more
        else:
            logger.info("drained after_s=%.3f", time.monotonic() - began_s)

    async def _end(self) -> None:
        while self._num_answering():
            await asyncio.sleep(_LOOK_EVERY_S)
        # Not before: a request in progress may yet be claimed for the first time, and must be served then.
        self._worker.drain()
        while not await self._engine.call(lambda: self._worker.drained):
            await asyncio.sleep(_LOOK_EVERY_S)
