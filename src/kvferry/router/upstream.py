"""Requests to workers: one attempt, until its answer has begun."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from kvferry.router.answers import Answer, WorkerFailed
from kvferry.router.settings import RouterSettings
from kvferry.router.workers import Worker, reason_of

__all__ = ["Upstream"]

logger = logging.getLogger(__name__)

_ELSEWHERE = frozenset({429})
"""Client errors that another worker may not have."""


class Upstream:
    """The router's client end. One session for all workers: connections are kept."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session."""
        assert self._session is not None, "the router opens the session at start-up"
        return self._session

    async def start(self) -> None:
        """Open the session, on the running loop."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        # Bodies are passed on as they are: neither side's compression is undone.
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, skip_auto_headers=("Accept-Encoding", "User-Agent")
        )

    async def stop(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def post(
        self, worker: Worker, path: str, body: bytes, headers: Mapping[str, str], *, headers_within_s: float
    ) -> AsyncIterator[Answer]:
        """The answer's status and headers are here; its body is to be read. A 5xx, or a 429, is a WorkerFailed.

        Leaving the context before the whole body was read closes the connection, which aborts the request upstream.
        """
        with worker.busy():
            response = await self._begin(worker, worker.url + path, body, headers, headers_within_s)
            answer = Answer(worker, response, self._settings.between_bytes_timeout_s)
            try:
                with worker.ending(answer):
                    if answer.status >= 500 or answer.status in _ELSEWHERE:
                        raise await _refusal(worker, answer)
                    yield answer
            finally:
                answer.close()

    async def _begin(
        self, worker: Worker, url: str, body: bytes, headers: Mapping[str, str], within_s: float
    ) -> aiohttp.ClientResponse:
        # Pauses within the answer are timed where it is read.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s)
        limit = asyncio.timeout(within_s)
        wait = _Begin(limit)
        try:
            async with limit:
                with worker.ending(wait):
                    return await self.session.post(url, data=body, headers=headers, timeout=timeout)
        except TimeoutError as error:
            kind = isinstance(error, aiohttp.ConnectionTimeoutError)
            reason = "takes no connection" if kind else wait.reason or f"has not begun to answer in {within_s:g} s"
            raise WorkerFailed(worker, reason, reached=not kind, status=504) from error
        except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
            raise WorkerFailed(worker, reason_of(error), reached=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerFailed(worker, f"broke the connection: {reason_of(error)}", reached=True) from error


class _Begin:
    """The wait for status and headers. A `Wait` of its worker."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.reason = ""
        """Why it was given up before its limit."""
        self.waiting_since_s: float | None = asyncio.get_running_loop().time()
        self._limit = limit

    def give_up(self, reason: str) -> None:
        """End the wait now."""
        if not self._limit.expired():
            self.reason = reason
            self._limit.reschedule(asyncio.get_running_loop().time())


async def _refusal(worker: Worker, answer: Answer) -> WorkerFailed:
    body = await answer.read()
    status = 503 if answer.status in (429, 503) else 502
    return WorkerFailed(
        worker, f"answered {answer.status}: {_message_in(body)}", reached=True, status=status, answered=True
    )


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


def _message_in(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.MsgspecError:
        return repr(body[:200].decode("utf-8", "replace"))
