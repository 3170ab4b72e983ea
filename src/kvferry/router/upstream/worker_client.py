"""The client end of the router: sends one request to one worker, and waits until its answer has begun."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from kvferry.router.fleet.failures import WorkerFailed
from kvferry.router.fleet.outcomes import Outcome, outcome_of
from kvferry.router.fleet.worker import Worker
from kvferry.router.fleet.workers import reason_of
from kvferry.router.settings import RouterSettings
from kvferry.router.upstream.deadlines import Deadlines
from kvferry.router.upstream.http1 import Connection, Pool, Unreachable
from kvferry.router.upstream.http1_parse import BadAnswer
from kvferry.router.upstream.worker_answer import Answer
from kvferry.web.body_fields import Parts

__all__ = ["Upstream", "check_too_long"]

logger = logging.getLogger(__name__)

_VLLM_GIVES_NO_REASON = "Internal server error"
"""vLLM's whole text for a hand-off that failed: no connector can set another one."""
_VLLM_TOO_LONG = "maximum context length"
"""A part of vLLM's texts for a prompt that is too long, alone or with max_tokens; its error has no code of its own."""


class Upstream:
    """Sends requests to workers, over connections that it keeps."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._pool = Pool()
        self._deadlines = Deadlines()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session for rare requests: health checks, releases, and the dashboard's questions."""
        assert self._session is not None, "the router opens the session at start-up"
        return self._session

    async def start(self) -> None:
        """Opens the session on the running loop."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        # Bodies are passed on unchanged: the compression of either side is not undone.
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, skip_auto_headers=("Accept-Encoding", "User-Agent")
        )

    async def stop(self) -> None:
        """Closes every connection."""
        self._pool.stop()
        self._deadlines.stop()
        await asyncio.sleep(0)  # transports release their sockets in the loop's next iteration
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def post(
        self, worker: Worker, path: str, body: Parts, headers: Mapping[str, str], *, headers_within_s: float
    ) -> AsyncIterator[Answer]:
        """Sends a POST and yields the answer once its status and headers are here; the body is still to be read. Raises
        WorkerFailed for a 5xx or a 429.

        Leaving the context before the whole body was read closes the connection, which aborts the request upstream.
        """
        with worker.busy():
            connection = await self._connect(worker)
            answer = None
            try:
                num_bytes = sum(map(len, body))
                connection.send(self._pool.request_head(worker.url, path, num_bytes, headers), body)
                await self._begin(worker, connection, headers_within_s)
                answer = Answer(worker, connection, self._settings.between_bytes_timeout_s)
                self._deadlines.add(answer)
                with worker.ending(answer):
                    if answer.status >= 400 and outcome_of(answer.status, None) is not Outcome.REFUSED:
                        raise await _refusal(worker, answer)
                    yield answer
            finally:
                if answer is not None:
                    self._deadlines.discard(answer)
                self._pool.release(worker.url, connection)

    async def _connect(self, worker: Worker) -> Connection:
        limit_s = self._settings.connect_timeout_s
        try:
            return await self._pool.acquire(worker.url, limit_s)
        except TimeoutError as error:
            raise WorkerFailed(worker, "accepts no connection", Outcome.UNREACHABLE) from error
        except Unreachable as error:
            raise WorkerFailed(worker, str(error), Outcome.UNREACHABLE) from error

    async def _begin(self, worker: Worker, connection: Connection, within_s: float) -> None:
        """Waits for status and headers. `Answer` limits the pauses within the body."""
        wait = _Begin(worker, connection, within_s)
        self._deadlines.add(wait)
        try:
            with worker.ending(wait):
                await connection.head()
        except (BadAnswer, OSError) as error:
            raise WorkerFailed(worker, f"broke the connection: {reason_of(error)}", Outcome.DISCONNECTED) from error
        finally:
            self._deadlines.discard(wait)


class _Begin:
    """The wait for status and headers. A `Wait` of its worker."""

    def __init__(self, worker: Worker, connection: Connection, within_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        self.waiting_since_s: float | None = now_s
        self.due_s = now_s + within_s
        self._within_s = within_s
        self._worker = worker
        self._connection = connection

    def give_up(self, reason: str) -> None:
        """Ends the wait now."""
        self._connection.fail(WorkerFailed(self._worker, reason, Outcome.TIMED_OUT))

    def on_due(self) -> None:
        """Gives up, as `Deadlines` calls it once the time is over."""
        self.give_up(f"has not begun to answer in {self._within_s:g} s")


async def _refusal(worker: Worker, answer: Answer) -> WorkerFailed:
    body = await answer.read()
    message, code = _error_in(body)
    outcome = outcome_of(answer.status, code)
    if message == _VLLM_GIVES_NO_REASON and worker.info is not None and worker.info.kind == "vllm":
        message += " (vLLM gives no reason; its log does: 'request fails, by kv_load_failure_policy ... cause=')"
    if outcome is Outcome.REQUEST_FAILED:
        return WorkerFailed(worker, message, outcome)  # it is the client's answer
    return WorkerFailed(worker, f"answered {answer.status}: {message}", outcome)


async def check_too_long(worker: Worker, answer: Answer) -> None:
    """Raises WorkerFailed if this answer, a 400, says that the request is too long for the worker."""
    message, code = _error_in(await answer.read())
    if code == "context_length_exceeded" or _VLLM_TOO_LONG in message:
        raise WorkerFailed(worker, f"answered 400: {message}", Outcome.TOO_LONG)


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | int | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


def _error_in(body: bytes) -> tuple[str, str]:
    """Returns the message and the code of an error body; a message in any case."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.MsgspecError, RecursionError):
        error = _Error()
    message = error.message.strip()
    if not message:
        message = repr(body[:200].decode("utf-8", "replace")) if body.strip() else "it gave no reason"
    return message, str(error.code or "")
