"""The drain of any server: it takes nothing new, finishes what it has begun, and cuts off what takes too long."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod

from kvferry.errors import FerryError

__all__ = ["Drain"]

logger = logging.getLogger(__name__)


class Drain(ABC):
    """The drain of one server. It is used on the event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._begun = asyncio.Event()

    @property
    def begun(self) -> bool:
        """True once a drain has begun: no new requests are taken."""
        return self._begun.is_set()

    @property
    @abstractmethod
    def num_open(self) -> int:
        """The number of requests that are open."""

    @abstractmethod
    async def _finish(self) -> None:
        """Returns when nothing is open. Raises FerryError if nothing that is open will end any more."""

    @abstractmethod
    async def _cut_off(self) -> None:
        """Ends what is still open after `timeout_s`, with an error to its clients."""

    def begin(self, reason: str) -> None:
        """Stops taking new requests. Idempotent; never blocks."""
        if not self.begun:
            logger.info("draining cause=%s open=%d timeout_s=%g", reason, self.num_open, self._timeout_s)
            self._begun.set()

    async def wait_ended(self) -> None:
        """Waits until a drain has begun, and has ended or taken `timeout_s`. Never raises for what is left open."""
        await self._begun.wait()
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._finish()
        except TimeoutError:
            logger.warning(
                "drain timed out, open requests are cut off open=%d after_s=%g", self.num_open, self._timeout_s
            )
            await self._cut_off()
        except FerryError as error:
            logger.warning("drain ends cause=%s", error)
        else:
            logger.info("drained after_s=%.3f", time.monotonic() - began_s)
