"""Hand-offs that nobody will take: prefill is told, so that its blocks don't wait for the end of their lease.

It is only a courtesy: whatever becomes of the message, the lease ends the grant. So it is sent once, beside everything
else, and a failure is only noted.
"""

import asyncio
import logging

import aiohttp

from kvferry.router.fleet.workers import Worker, reason_of
from kvferry.router.upstream.attempts import Upstream

__all__ = ["RELEASE_PATH", "Releases"]

logger = logging.getLogger(__name__)

RELEASE_PATH = "/v1/kvferry/release"
_MAX_OPEN = 256
"""More at once are left to their leases: many clients hang up together when something else is wrong."""


class Releases:
    """One a router."""

    def __init__(self, upstream: Upstream, timeout_s: float) -> None:
        self._upstream = upstream
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._tasks: set[asyncio.Task[None]] = set()

    def release_soon(self, prefill: Worker, transfer_id: str, reason: str) -> None:
        """Tell this prefill worker that nobody will take this transfer. On the event loop; never blocks or raises."""
        if len(self._tasks) < _MAX_OPEN:
            task = asyncio.create_task(self._release(prefill, transfer_id, reason))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Give up what is still being sent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self, prefill: Worker, transfer_id: str, reason: str) -> None:
        body = {"transfer_id": transfer_id, "reason": reason}
        try:
            async with self._upstream.session.post(
                prefill.url + RELEASE_PATH, json=body, timeout=self._timeout
            ) as response:
                told = f"status {response.status}: {(await response.content.read(200))!r}"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            told = reason_of(error)
        logger.debug(
            "hand-off given up transfer=%s peer=%s cause=%s answer=%s", transfer_id, prefill.name, reason, told
        )
