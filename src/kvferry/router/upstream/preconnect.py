"""Tells decode workers about prefill workers before the first request names them, so that they connect early.

The first hand-off of a pair waits for the pair's handshake. So when a worker comes up, the router tells each decode
worker with the ability `meet` about each prefill worker that fits it: POST /v1/kvferry/meet. This only saves time:
nothing waits for it, and a request that comes earlier starts the handshake itself.
"""

import asyncio
import logging

import aiohttp

from kvferry.router.fleet.worker import Worker
from kvferry.router.fleet.workers import Fleet, reason_of
from kvferry.router.upstream.worker_client import Upstream

__all__ = ["PRECONNECT_PATH", "Preconnect"]

logger = logging.getLogger(__name__)

PRECONNECT_PATH = "/v1/kvferry/meet"
_MAX_OPEN = 64
_TIMEOUT_S = 5.0


class Preconnect:
    """Sends the messages. There is one per router; it runs on the event loop."""

    def __init__(self, fleet: Fleet, upstream: Upstream) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._limit = asyncio.Semaphore(_MAX_OPEN)
        self._tasks: set[asyncio.Task[None]] = set()

    def on_up(self, worker: Worker) -> None:
        """Tells decode workers about a pair's prefill worker after either of the two has come up."""
        prefills = [worker] if worker in self._fleet.prefill else self._fleet.prefill
        decodes = self._fleet.decode if worker in self._fleet.prefill else [worker]
        for prefill in prefills:
            for decode in decodes:
                if not (decode.can("meet") and prefill.can("meet")):
                    continue
                if self._fleet.mismatch_reason(prefill, decode) is None:
                    task = asyncio.create_task(self._tell_decode(prefill, decode))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancels the messages that are still being sent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell_decode(self, prefill: Worker, decode: Worker) -> None:
        assert prefill.info is not None, "a worker that is up has answered"
        body = {
            "engine": prefill.info.engine,
            "incarnation": prefill.info.incarnation,
            "host": prefill.info.side_channel.host,
            "port": prefill.info.side_channel.port,
        }
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with self._limit:
            try:
                session, url = self._upstream.session, decode.url + PRECONNECT_PATH
                async with session.post(url, json=body, timeout=timeout) as response:
                    answer = f"status {response.status}: {(await response.content.read(200))!r}"
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                answer = reason_of(error)
        logger.debug("pair preconnected prefill=%s decode=%s answer=%s", prefill.name, decode.name, answer)
