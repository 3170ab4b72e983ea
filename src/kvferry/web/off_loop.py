"""Runs work that takes longer than an event loop may be held, such as tokenising a long prompt, on a few threads.

A call waits its turn in order of arrival. If its caller is cancelled while it waits, as when the client hangs up, it
never runs. One that runs ends by itself, because a thread cannot be interrupted; its result is dropped.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from kvferry.errors import Overloaded
from kvferry.web.api_errors import ApiError

__all__ = ["OffLoop"]

Result = TypeVar("Result")
_JOIN_S = 1.0


class OffLoop:
    """A few daemon threads, which start with the first call. Methods are called on one event loop."""

    def __init__(self, name: str, *, num_threads: int = 2, max_waiting: int = 1024) -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._calls: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._stopping = False

    async def run(self, function: Callable[[], Result]) -> Result:
        """Returns what `function` returns, or raises what it raises. Raises Overloaded if too many calls wait, and
        ApiError (503) if `stop` came first."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._changed:
            if self._stopping:
                raise _stopping()
            waiting = [call for call in self._calls if not call[0].done()]
            if len(waiting) >= self._max_waiting:
                raise Overloaded(f"{len(waiting)} requests wait to be read: try again later, or add a worker")
            self._calls = deque([*waiting, (future, function)])
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(
                    target=self._work, args=(loop,), name=f"{self._name}-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return await future

    async def stop(self) -> None:
        """Ends the threads. Calls that wait raise ApiError (503). One that still runs after a second is left to itself:
        it has no caller, and does not keep the process alive."""
        with self._changed:
            self._stopping = True
            waiting, self._calls = self._calls, deque()
            self._changed.notify_all()
        for future, _ in waiting:
            if not future.done():
                future.set_exception(_stopping())
        await asyncio.gather(*(asyncio.to_thread(thread.join, _JOIN_S) for thread in self._threads))

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            with self._changed:
                while not self._calls and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                future, function = self._calls.popleft()
            if future.done():  # its caller was cancelled
                continue
            try:
                result, error = function(), None
            except Exception as raised:  # noqa: BLE001  # the caller gets it, as it would without a thread
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed, so no caller waits
            del future, function, result, error  # an idle thread keeps no prompt alive


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _stopping() -> ApiError:
    return ApiError(503, "this server is stopping: send the request to another one", code="stopping", retry_after_s=1)
