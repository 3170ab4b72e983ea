"""Requests to workers: one attempt, its time limits, and its failures told apart."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from kvferry.errors import PeerError
from kvferry.router.settings import RouterSettings
from kvferry.router.workers import Worker, reason_of

__all__ = ["Upstream", "WorkerFailed"]

logger = logging.getLogger(__name__)

_ELSEWHERE = frozenset({429})
"""Client errors that another worker may not have."""


class WorkerFailed(PeerError):
    """A worker did not answer as it should, and nothing of its answer has gone to the client."""

    def __init__(
        self, worker: Worker, reason: str, *, reached: bool, status: int = 502, answered: bool = False
    ) -> None:
        super().__init__(f"{worker.name} ({worker.url}) {reason}")
        self.worker = worker
        self.reached = reached
        """It may have worked on the request."""
        self.answered = answered
        """It said itself that it failed: nothing of the request is left there."""
        self.status = status
        """What the client is told, if nobody else can help: 503 for overload, 504 for a time-out, else 502."""


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
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer's status and headers are here; its body is to be read. A 5xx, or a 429, is a WorkerFailed.

        Leaving the context before the whole body was read closes the connection, which aborts the request upstream.
        """
        # Pauses within the answer are timed where it is read.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s)
        with worker.busy():
            try:
                async with asyncio.timeout(headers_within_s):
                    response = await self.session.post(worker.url + path, data=body, headers=headers, timeout=timeout)
            except TimeoutError as error:
                kind = isinstance(error, aiohttp.ConnectionTimeoutError)
                reason = "takes no connection" if kind else f"has not begun to answer in {headers_within_s:g} s"
                raise WorkerFailed(worker, reason, reached=not kind, status=504) from error
            except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
                raise WorkerFailed(worker, reason_of(error), reached=False) from error
            except (aiohttp.ClientError, OSError) as error:
                raise WorkerFailed(worker, f"broke the connection: {reason_of(error)}", reached=True) from error
            try:
                if response.status >= 500 or response.status in _ELSEWHERE:
                    raise await self._refusal(worker, response)
                yield response
            finally:
                if response.content.at_eof():
                    response.release()
                else:
                    response.close()

    async def _refusal(self, worker: Worker, response: aiohttp.ClientResponse) -> WorkerFailed:
        body = await self.read(worker, response)
        status = 503 if response.status in (429, 503) else 502
        return WorkerFailed(
            worker, f"answered {response.status}: {_message_in(body)}", reached=True, status=status, answered=True
        )

    async def read(self, worker: Worker, response: aiohttp.ClientResponse) -> bytes:
        """The whole body. Raises WorkerFailed if it breaks off."""
        return await self._timed(worker, response.read())

    async def read_some(self, worker: Worker, response: aiohttp.ClientResponse) -> bytes:
        """The next bytes, as they come; empty at the end. Raises WorkerFailed if the stream breaks off."""
        return await self._timed(worker, response.content.readany())

    async def _timed(self, worker: Worker, reading: Coroutine[None, None, bytes]) -> bytes:
        limit_s = self._settings.between_bytes_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await reading
        except TimeoutError as error:
            reason = f"paused for {limit_s:g} s in its answer"
            raise WorkerFailed(worker, reason, reached=True, status=504) from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerFailed(worker, f"broke off its answer: {reason_of(error)}", reached=True) from error


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


def _message_in(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.MsgspecError:
        return repr(body[:200].decode("utf-8", "replace"))
