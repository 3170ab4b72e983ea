"""Decode workers that are told of prefill workers before the first request names them.

The first hand-off of a pair waits for their handshake. So when a worker comes up, each decode worker that knows how
(`meet`) is told of each prefill worker that fits it: POST /v1/kvferry/meet. It is a courtesy: nothing waits for it, and
a request that comes first does the same by itself.
"""

import asyncio
import logging

import aiohttp

from kvferry.router.fleet.worker import Worker
from kvferry.router.fleet.workers import Fleet, reason_of
from kvferry.router.upstream.attempts import Upstream

__all__ = ["MEET_PATH", "Meetings"]

logger = logging.getLogger(__name__)

MEET_PATH = "/v1/kvferry/meet"
_MAX_OPEN = 64
_TIMEOUT_S = 5.0


class Meetings:
    """One a router. On the event loop."""

    def __init__(self, fleet: Fleet, upstream: Upstream) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._limit = asyncio.Semaphore(_MAX_OPEN)
        self._tasks: set[asyncio.Task[None]] = set()

    def on_up(self, worker: Worker) -> None:
        """A worker is there, or there again."""
        prefills = [worker] if worker in self._fleet.prefill else self._fleet.prefill
        decodes = self._fleet.decode if worker in self._fleet.prefill else [worker]
        for prefill in prefills:
            for decode in decodes:
                if decode.can("meet") and prefill.can("meet") and self._fleet.why_not(prefill, decode) is None:
                    task = asyncio.create_task(self._meet(prefill, decode))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Give up what is still being told."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _meet(self, prefill: Worker, decode: Worker) -> None:
        assert prefill.info is not None, "only workers that have answered meet"
        body = {
            "engine": prefill.info.engine,
            "incarnation": prefill.info.incarnation,
            "host": prefill.info.side_channel.host,
            "port": prefill.info.side_channel.port,
        }
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with self._limit:
            try:
                async with self._upstream.session.post(decode.url + MEET_PATH, json=body, timeout=timeout) as response:
                    told = f"status {response.status}: {(await response.content.read(200))!r}"
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                told = reason_of(error)
        logger.debug("pair told to meet prefill=%s decode=%s answer=%s", prefill.name, decode.name, told)
