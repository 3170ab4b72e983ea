"""The thread that runs the engine. All access to the engine happens there; outputs are passed to the event loop.

Loop of the thread: run commands (add, abort, calls) -> step -> pass the step's outputs to the event loop, in one call.
Without work it waits for a command. While steps return nothing at once, because only hand-offs are pending, it waits 1
ms between steps, and 10 ms after half a second of that.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from kvferry.engines.mini.api import Failure, GenerateRequest, Output, failure_text
from kvferry.errors import FerryError
from kvferry.ids import RequestId
from kvferry.web.api_errors import ApiError

__all__ = ["EngineLike", "EngineThread", "Sink", "WakesItself"]

logger = logging.getLogger(__name__)

Sink = Callable[[Output | FerryError], None]
"""Receives a request's outputs on the event loop. An error, or an Output with finish_reason, is the last."""
T = TypeVar("T")

_LONG_PAUSES_AFTER = 500
"""After this many idle steps in a row, pauses are longer."""
_LONG_PAUSE_FACTOR = 10


class EngineLike(Protocol):
    """What the server needs of an engine. Called on the engine thread only."""

    def add(self, request: GenerateRequest) -> None:
        """Queues a request. Raises RequestError or Overloaded if it cannot be taken."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Ends a request. Unknown ids are ignored."""
        ...

    def step(self) -> Sequence[Output]:
        """Runs one step and returns what it added to requests.

        An exception that one request causes ends that request only. An exception from here is the end of the engine.
        """
        ...

    @property
    def suspects(self) -> Collection[RequestId]:
        """After `step` has raised: the requests that it was computing, one of which may be the cause."""
        ...

    def has_work(self) -> bool:
        """Returns whether `step` has anything to do: requests run or wait, or hand-offs are open."""
        ...


@runtime_checkable
class WakesItself(Protocol):
    """An engine that can get work without a call from the server: its ranks send reports."""

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, on another thread, whenever `has_work` becomes true without a call to this engine."""
        ...


class EngineThread:
    """Runs an engine from `start` to `stop`. Methods are called on the event loop."""

    def __init__(self, engine: EngineLike, *, poll_s: float = 0.001) -> None:
        self._engine = engine
        self._poll_s = poll_s
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._sinks: dict[RequestId, Sink] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)
        self.failure: str | None = None
        """Why the engine has failed; None: it has not."""
        self.on_failure: Callable[[str], None] = lambda reason: None
        """Called with that reason on the event loop."""
        if isinstance(engine, WakesItself):
            engine.on_wake(self._wake.set)

    def start(self) -> None:
        """Starts the thread. Called once, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the current step. Open requests get an error. Idempotent."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._fail_all(ApiError(503, "this worker is stopping: send the request to another one", code="stopping"))

    @property
    def num_open(self) -> int:
        """The number of sequences that have not ended."""
        return len(self._sinks)

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Passes a request to the engine. A refusal reaches the sink as an error."""
        if self.failure is not None:
            raise self._dead()
        assert request.request_id not in self._sinks, "the server gives every sequence an id of its own"
        self._sinks[request.request_id] = sink
        self._command(lambda: self._add(request))

    def abort(self, request_id: RequestId) -> None:
        """Ends a request. Its sink is not called any more."""
        if self._sinks.pop(request_id, None) is not None:
            self._command(lambda: self._engine.abort(request_id))

    def later(self, function: Callable[[], None]) -> None:
        """Runs `function` on the engine thread between two steps; not at all if the engine has ended."""
        if self.failure is None and not self._stopping:
            self._command(function)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on the engine thread between two steps and returns its result."""
        if self.failure is not None or self._stopping:
            raise self._dead()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(action: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                action(value)

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                logger.exception("a call on the engine thread failed")
                self._on_loop(settle, future.set_exception, error)
            else:
                self._on_loop(settle, future.set_result, result)

        self._command(run)
        return await future

    # ---- on the engine thread ----

    def _run(self) -> None:
        num_idle = 0
        try:
            while not self._stopping:
                self._wake.clear()
                while self._commands:
                    self._run_command(self._commands.popleft())
                if not self._engine.has_work():
                    self._wake.wait()
                    continue
                began_s = time.monotonic()
                outputs = self._engine.step()
                if outputs:
                    self._on_loop(self._deliver, outputs)
                elif time.monotonic() - began_s < self._poll_s:
                    # A step that computed nothing ends at once: only hand-offs are pending. If that lasts (a grant that
                    # no peer claims until its lease ends), a thousand steps per second would be a waste.
                    num_idle += 1
                    long = num_idle >= _LONG_PAUSES_AFTER
                    self._wake.wait(self._poll_s * (_LONG_PAUSE_FACTOR if long else 1))
                    continue
                num_idle = 0
        except Exception as error:
            logger.exception("the engine has failed, this worker cannot serve requests any more")
            self._on_loop(self._fail, f"{type(error).__name__}: {error}", frozenset(self._engine.suspects))

    def _run_command(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:
            logger.exception("a command about one request has failed")  # its client has left, or has the refusal

    def _add(self, request: GenerateRequest) -> None:
        try:
            self._engine.add(request)
        except FerryError as error:
            self._on_loop(self._refuse, request.request_id, error)
        except Exception as error:
            logger.exception("a request cannot be taken request=%s", request.request_id)
            failed = ApiError(500, failure_text(error), code=Failure.REQUEST_FAILED.value)
            self._on_loop(self._refuse, request.request_id, failed)

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None, "the engine thread runs after start()"
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("the event loop is closed: outputs are dropped")

    # ---- on the event loop ----

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            last = output.finish_reason is not None
            sink = self._sinks.pop(output.request_id, None) if last else self._sinks.get(output.request_id)
            if sink is not None:
                sink(output)

    def _refuse(self, request_id: RequestId, error: FerryError) -> None:
        sink = self._sinks.pop(request_id, None)
        if sink is not None:
            sink(error)

    def _fail(self, reason: str, suspects: Collection[RequestId]) -> None:
        self.failure = reason
        crashed = ApiError(
            503,
            f"the engine of this worker has ended in a step that computed this request ({reason}): send it once more, "
            "to another worker",
            code=Failure.ENGINE_CRASHED.value,
        )
        for request_id in suspects:
            self._refuse(request_id, crashed)
        self._fail_all(self._dead())
        self.on_failure(reason)

    def _fail_all(self, error: FerryError) -> None:
        sinks, self._sinks = list(self._sinks.values()), {}
        for sink in sinks:
            sink(error)

    def _dead(self) -> ApiError:
        reason = self.failure or "it is stopping"
        return ApiError(
            503,
            f"the engine of this worker has ended ({reason}): send the request to another worker, and start this one "
            "again",
            code="engine_dead",
            retry_after_s=1,
        )
