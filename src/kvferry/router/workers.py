"""The workers behind the router: what each says of itself, whether it is well, how busy it is, and which pairs fit.

Life of a worker: UNKNOWN (never answered) -> UP <-> DOWN (with the reason). A worker is UP again with its first good
answer, whatever its incarnation: a restart needs no more than that. `state` beside it is the worker's own word, for
example `draining`: it is well, and gets nothing new.

A worker is silent from the first health check that got no answer at all (any answer, or a refused connection, ends
that: where a process ended, its open connections end as well). Each further check that gets none, once it has been
silent for `hung_after_s`, ends the waits for it that have lasted as long: a stopped process, a lost network. The checks
decide, not a timer, so a router that stood still itself asks again before it gives up.
"""

import asyncio
import errno
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import aiohttp
import msgspec

from kvferry.http.records import WorkerInfo
from kvferry.router.pairing import why_not
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role

__all__ = ["Fleet", "Wait", "Worker"]

logger = logging.getLogger(__name__)


_NOBODY_THERE = frozenset({errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})
"""The host answers nothing. Others, as a refused connection or a name that is not found, say nothing of the worker."""


class Wait(Protocol):
    """Something of the router that waits for a worker's headers or bytes."""

    waiting_since_s: float | None
    """Loop time since when it waits for the next bytes; None: it doesn't at the moment."""

    def give_up(self, reason: str) -> None:
        """End the wait, as a failure of the worker with this reason. Never blocks; nothing if it has just ended."""
        ...


class Worker:
    """One worker, as the router sees it."""

    def __init__(self, url: str, wanted: Role) -> None:
        self.url = url.rstrip("/")
        self.wanted = wanted
        """What the operator says it is for: PREFILL or DECODE."""
        self.info: WorkerInfo | None = None
        self.down: str | None = "it has not answered yet"
        """Why it cannot be reached; None: it can."""
        self.silent_since_s: float | None = None
        """Loop time of the first health check without an answer; None: the last one had one."""
        self.num_open = 0
        self.num_failures = 0
        self.last_pick = 0
        self._waits: set[Wait] = set()

    @property
    def name(self) -> str:
        """The engine's id, and the address until that is known."""
        return self.info.engine if self.info is not None else self.url

    @property
    def why_unusable(self) -> str | None:
        """Why it gets no new request; None: it may."""
        if self.down is not None or self.info is None:
            return f"{self.name} ({self.url}) is down: {self.down}"
        if self.info.role not in (self.wanted, Role.BOTH):
            return (
                f"{self.name} ({self.url}) is a {self.info.role} worker and was given as --{self.wanted}: "
                f"give it as --{self.info.role}, or start it with --role {self.wanted}"
            )
        if self.info.state != "ready":
            return f"{self.name} ({self.url}) takes nothing new: {self.info.state}"
        return None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request as open for as long."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    @contextmanager
    def ending(self, wait: Wait) -> Iterator[None]:
        """Have this wait given up within the context if the worker hangs."""
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)

    def end_waits(self, since_s: float, reason: str) -> int:
        """Give up the waits that began at `since_s` (loop time) or before. Returns how many."""
        ended = [w for w in self._waits if w.waiting_since_s is not None and w.waiting_since_s <= since_s]
        for wait in ended:
            wait.give_up(reason)
        return len(ended)


class Fleet:
    """All workers; asks each in turn how it is. Everything runs on the event loop."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], settings: RouterSettings) -> None:
        self.prefill = [Worker(url, Role.PREFILL) for url in prefill]
        self.decode = [Worker(url, Role.DECODE) for url in decode]
        self._settings = settings
        self._picks = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def workers(self) -> list[Worker]:
        """Prefill, then decode."""
        return [*self.prefill, *self.decode]

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Ask everyone once, then keep asking until `stop`."""
        await asyncio.gather(*(self.ask(session, worker) for worker in self.workers))
        self._tasks = [asyncio.create_task(self._keep_asking(session, worker)) for worker in self.workers]

    async def stop(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_asking(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._settings.health_every_s)
            await self.ask(session, worker)

    async def ask(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        """Learn what a worker says of itself. Never raises: a failure is the worker's state."""
        timeout = aiohttp.ClientTimeout(
            total=self._settings.health_timeout_s, sock_connect=self._settings.connect_timeout_s
        )
        silent = False
        try:
            async with session.get(f"{worker.url}/v1/kvferry", timeout=timeout) as response:
                body = await response.read()
                if response.status == 200:
                    self._mark_up(worker, msgspec.json.decode(body, type=WorkerInfo))
                else:
                    self.mark_down(worker, f"GET /v1/kvferry answered {response.status}: is it a kvferry worker?")
        except msgspec.MsgspecError as error:
            self.mark_down(worker, f"GET /v1/kvferry is not what a worker of this version says: {error}")
        except TimeoutError:
            silent = True
            self.mark_down(worker, f"no answer to GET /v1/kvferry in {self._settings.health_timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            silent = isinstance(error, OSError) and error.errno in _NOBODY_THERE
            self.mark_down(worker, reason_of(error))
        self._note_silence(worker, silent)

    def _note_silence(self, worker: Worker, silent: bool) -> None:
        """A health check has ended, with no answer at all if `silent`."""
        now_s = asyncio.get_running_loop().time()
        if not silent:
            worker.silent_since_s = None
        elif worker.silent_since_s is None:
            worker.silent_since_s = now_s
        elif (limit_s := self._settings.hung_after_s) and (for_s := now_s - worker.silent_since_s) >= limit_s:
            reason = f"has not answered its health checks for {for_s:.3g} s"
            if num_ended := worker.end_waits(now_s - limit_s, reason):
                logger.warning(
                    "worker hangs peer=%s url=%s ended=%d cause=%s", worker.name, worker.url, num_ended, reason
                )

    def _mark_up(self, worker: Worker, info: WorkerInfo) -> None:
        known = worker.info
        if worker.down is not None or known is None or known.incarnation != info.incarnation:
            logger.info("worker up peer=%s url=%s incarnation=%s", info.engine, worker.url, info.incarnation)
        elif known.state != info.state:
            logger.info("worker changed peer=%s state=%s", info.engine, info.state)
        worker.info, worker.down = info, None

    def mark_down(self, worker: Worker, reason: str) -> None:
        """It is not used until it answers again."""
        if worker.down is None:
            logger.warning("worker down peer=%s url=%s cause=%s", worker.name, worker.url, reason)
        worker.down = reason

    # ---- who serves ----

    def pick_decode(self, tried: set[Worker]) -> Worker | None:
        """The least busy one that was not tried."""
        return self._least_busy([w for w in self.decode if w not in tried and w.why_unusable is None])

    def pick_prefill(self, decode: Worker | None, tried: set[Worker]) -> Worker | None:
        """The least busy one that was not tried and fits decode, if decode matters."""
        usable = [w for w in self.prefill if w not in tried and w.why_unusable is None]
        return self._least_busy([w for w in usable if decode is None or self.why_not(w, decode) is None])

    def has_prefill(self, decode: Worker) -> bool:
        """Some prefill worker can serve beside this decode worker."""
        return any(w.why_unusable is None and self.why_not(w, decode) is None for w in self.prefill)

    def why_not(self, prefill: Worker, decode: Worker) -> str | None:
        """Why these two cannot serve a request together; None: they can."""
        if prefill.info is None or decode.info is None:
            return "one of them has not answered yet"
        return why_not(prefill.info, decode.info)

    def why_no_prefill(self, decode: Worker) -> str:
        """Why no prefill worker can serve beside this decode worker."""
        if not self.prefill:
            return "no prefill worker is configured"
        reasons = [
            worker.why_unusable or f"{worker.name} does not fit {decode.name}: {self.why_not(worker, decode)}"
            for worker in self.prefill
        ]
        return "; ".join(reasons)

    def _least_busy(self, candidates: list[Worker]) -> Worker | None:
        if not candidates:
            return None
        chosen = min(candidates, key=lambda worker: (worker.num_open, worker.last_pick))
        chosen.last_pick = next(self._picks)
        return chosen


def reason_of(error: BaseException) -> str:
    """One line for an error of the network."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.strerror or error.os_error}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
