"""Asks workers what they remember of requests. This is the only part of the time lines that does I/O."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable

import aiohttp
import msgspec

from kvferry.router.fleet.worker import Worker
from kvferry.router.observe.timeline import Timeline, WorkerPart
from kvferry.router.observe.timeline_clocks import ClockSample, WorkerClocks
from kvferry.web.stages import MAX_ASKED, TRACE_PATH, HandoffTotals, TraceAnswer

__all__ = ["Collector"]

logger = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_MAX_ANSWER_BYTES = 1 << 20
_MAX_PAIRS = 4096


class Collector:
    """Asks workers, and keeps their clocks and totals. There is one per router; it runs on the event loop."""

    def __init__(self) -> None:
        self.clocks = WorkerClocks()
        self.totals: dict[tuple[str, str], HandoffTotals] = {}
        """Maps (prefill, decode) to what the decode engine reports about the hand-offs that it received."""

    async def parts_of(
        self, session: aiohttp.ClientSession, workers: Iterable[Worker], line: Timeline
    ) -> list[WorkerPart]:
        """Returns what the workers of one request remember of it. Workers that do not answer, or that do not keep this
        (stock vLLM), are left out."""
        names = {str(event.fields["worker"]) for event in line.events if event.name.endswith(".sent")}
        request_id = line.text("request_id")
        asked = [worker for worker in workers if worker.name in names]
        found = await asyncio.gather(*(self.ask(session, worker, [request_id]) for worker in asked))
        return [part for parts in found for part in parts]

    async def ask(self, session: aiohttp.ClientSession, worker: Worker, ids: Collection[str]) -> list[WorkerPart]:
        """Asks one worker about requests, and takes its clock and totals. Never raises: what fails is left out."""
        query = [("request", one) for one in list(ids)[:MAX_ASKED]]
        sent_s = time.monotonic()
        try:
            async with session.get(worker.url + TRACE_PATH, params=query, timeout=_TIMEOUT) as response:
                begun_s = time.monotonic()
                body = await response.content.read(_MAX_ANSWER_BYTES)
                while not response.content.at_eof() and len(body) < _MAX_ANSWER_BYTES:
                    body += await response.content.readany()
                if response.status != 200:
                    return []
            answer = msgspec.json.decode(body, type=TraceAnswer)
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            logger.debug("no trace peer=%s cause=%r", worker.name, error)
            return []
        now_s = time.monotonic()
        engine, incarnation = answer.engine, answer.incarnation
        self.clocks.add(engine, incarnation, ClockSample.of(sent_s, answer.received_s, answer.now_s, begun_s))
        for prefill, totals in list(answer.handoffs.items())[:MAX_ASKED]:
            if (prefill, engine) in self.totals or len(self.totals) < _MAX_PAIRS:
                self.totals[prefill, engine] = totals
        best = self.clocks.best(engine, incarnation, now_s)
        assert best is not None, "a sample was added above"
        return [WorkerPart(engine, report, best.offset_s, best.error_at(now_s)) for report in answer.requests]
