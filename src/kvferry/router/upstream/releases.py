"""Tells prefill workers about hand-offs that no decode worker will take, so that their blocks are freed before the
lease ends.

This only saves time: the lease ends the grant whatever becomes of the message. So it is sent once, in the background,
and a failure is only logged.
"""

import asyncio
import logging

import aiohttp

from kvferry.router.fleet.worker import Worker
from kvferry.router.fleet.workers import reason_of
from kvferry.router.upstream.worker_client import Upstream

__all__ = ["RELEASE_PATH", "Releases"]

logger = logging.getLogger(__name__)

RELEASE_PATH = "/v1/kvferry/release"
_MAX_OPEN = 256
"""Beyond this many at once, hand-offs are left to their leases: many clients hang up together if something else is
wrong."""


class Releases:
    """Sends the messages. There is one per router."""

    def __init__(self, upstream: Upstream, timeout_s: float) -> None:
        self._upstream = upstream
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._tasks: set[asyncio.Task[None]] = set()

    def release_soon(self, prefill: Worker, transfer_id: str, reason: str) -> None:
        """Tells this prefill worker that the transfer will not be taken. Called on the event loop; never blocks or
        raises."""
        if len(self._tasks) < _MAX_OPEN:
            task = asyncio.create_task(self._release(prefill, transfer_id, reason))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancels the messages that are still being sent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self, prefill: Worker, transfer_id: str, reason: str) -> None:
        body = {"transfer_id": transfer_id, "reason": reason}
        try:
            async with self._upstream.session.post(
                prefill.url + RELEASE_PATH, json=body, timeout=self._timeout
            ) as response:
                answer = f"status {response.status}: {(await response.content.read(200))!r}"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            answer = reason_of(error)
        logger.debug(
            "hand-off given up transfer=%s peer=%s cause=%s answer=%s", transfer_id, prefill.name, reason, answer
        )
