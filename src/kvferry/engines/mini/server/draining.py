"""Draining a worker: it finishes what it has begun and takes nothing new, and then its process may end.

SERVING -> DRAINING   `begin`, by SIGTERM or POST /v1/kvferry/drain. New requests get 503; open ones continue.
        -> SETTLING   no answer is open. The worker refuses new hand-offs; grants that no peer claims end soon, and
                      claimed ones end by confirmation or with their lease.
        -> ENDED      no hand-off is open and no block is held, or the time is over. `wait_ended` returns.
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
    """What draining needs of a worker."""

    def drain(self) -> None:
        """Begins no new hand-off from now on. Called from any thread; never blocks."""
        ...

    @property
    def drained(self) -> bool:
        """Whether, after `drain`, no hand-off is left. Read on the engine thread."""
        ...


class Draining:
    """The drain of one server. Used on the event loop."""

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
        """Whether a drain has begun: no new requests are taken."""
        return self._begun.is_set()

    def begin(self, reason: str) -> None:
        """Stops taking new requests. Idempotent; never blocks."""
        if not self.begun:
            logger.info("draining cause=%s open=%d timeout_s=%g", reason, self._num_answering(), self._timeout_s)
            self._begun.set()

    async def wait_ended(self) -> None:
        """Waits until a drain has begun, and has ended or taken `timeout_s`. Never raises for what is left open."""
        await self._begun.wait()
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._end()
        except TimeoutError:
            logger.warning(
                "drain timed out, open requests are cut off open=%d after_s=%g", self._num_answering(), self._timeout_s
            )
            await self._engine.stop()  # its clients get an error while the server can still send one
        except FerryError as error:
            logger.warning("drain ends cause=%s", error)  # the engine has failed: nothing will finish any more
        else:
            logger.info("drained after_s=%.3f", time.monotonic() - began_s)

    async def _end(self) -> None:
        while self._num_answering():
            await asyncio.sleep(_LOOK_EVERY_S)
        # Not earlier: the KV of an open request may yet be claimed for the first time, and must be served then.
        self._worker.drain()
        while not await self._engine.call(lambda: self._worker.drained):
            await asyncio.sleep(_LOOK_EVERY_S)
