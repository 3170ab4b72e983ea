"""Draining a worker: it finishes what it has begun and takes nothing new, and then its process may end.

SERVING -> DRAINING   `begin`, by SIGTERM or POST /v1/kvferry/drain. New requests get 503; open ones continue.
        -> SETTLING   no answer is open. The worker refuses new hand-offs; grants that no peer claims end soon, and
                      claimed ones end by confirmation or with their lease.
        -> ENDED      no hand-off is open and no block is held, or the time is over. `wait_ended` returns.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvferry.engines.mini.server.engine_thread import EngineThread
from kvferry.web.drain import Drain

__all__ = ["Draining", "Drains"]

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


class Draining(Drain):
    """The drain of one worker."""

    def __init__(
        self, engine: EngineThread, worker: Drains, *, num_answering: Callable[[], int], timeout_s: float
    ) -> None:
        super().__init__(timeout_s)
        self._engine = engine
        self._worker = worker
        self._num_answering = num_answering

    @property
    def num_open(self) -> int:
        """Implements Drain.num_open."""
        return self._num_answering()

    async def _cut_off(self) -> None:
        await self._engine.stop()  # its clients get an error while the server can still send one

    async def _finish(self) -> None:
        while self._num_answering():
            await asyncio.sleep(_LOOK_EVERY_S)
        # Not earlier: the KV of an open request may yet be claimed for the first time, and must be served then.
        self._worker.drain()
        while not await self._engine.call(lambda: self._worker.drained):
            await asyncio.sleep(_LOOK_EVERY_S)
