"""Whole workers in this process behind their HTTP servers: engine, connector, memory transport, real sockets.

The servers run on an event loop in a thread of their own, so a test talks to them with the blocking client of
tests/harness/client.py, and looks into the engines when nothing runs.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.ranks.executor import LocalExecutor
from kvferry.engines.mini.server.app import WorkerServer
from kvferry.engines.mini.settings import EngineSettings, ServerSettings
from kvferry.engines.mini.step import StepInput
from kvferry.engines.mini.worker import WorkerSettings, build_worker
from kvferry.handoff.orders import StepOrders
from kvferry.settings import FerrySettings, LeaseSettings, Role, TransferMode, TransferSettings
from kvferry.web.listen import Listener
from tests.harness.until import until

__all__ = ["ForwardCount", "LoopThread", "ServedWorker", "settle"]

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], within_s: float = 30.0) -> T:
        """Returns what `work` returns there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()


class ForwardCount:
    """Counts the tokens that an engine's executor is given to compute, without asking the engine's own books."""

    def __init__(self, engine: Engine) -> None:
        self.token_ids: list[int] = []
        executor = engine.executor
        assert isinstance(executor, LocalExecutor), "engines of one rank are counted"
        submit = executor.submit

        def counted(step: StepInput, orders: StepOrders) -> None:
            for chunk in step.chunks:
                assert len(chunk.token_ids) == chunk.stop - chunk.start
                self.token_ids += chunk.token_ids
            submit(step, orders)

        executor.submit = counted  # type: ignore[method-assign]

    def num_of(self, tokens: range) -> int:
        """How often a token in this range was computed so far."""
        return sum(token in tokens for token in self.token_ids)


class ServedWorker:
    """One worker and its server. `close` ends both."""

    def __init__(
        self,
        loop: LoopThread,
        engine: EngineSettings,
        *,
        mode: TransferMode = TransferMode.PULL,
        role: Role = Role.BOTH,
        engine_id: str | None = None,
        lease: LeaseSettings | None = None,
        deadline_s: float = 20.0,
    ) -> None:
        transfer = TransferSettings(mode=mode, transport="memory", staging_bytes=0, deadline_s=deadline_s)
        ferry = FerrySettings(transfer=transfer, lease=lease or LeaseSettings())
        self.worker = build_worker(WorkerSettings(engine=engine, ferry=ferry, role=role, engine_id=engine_id))
        self.engine = self.worker.engine
        self.forwards = ForwardCount(self.engine)
        settings = ServerSettings(
            model_name="tiny",
            max_model_len=self.engine.max_model_len,
            vocab_size=self.engine.model.config.vocab_size,
        )
        self._loop = loop
        self.server = WorkerServer(self.worker, self.engine.tokenizer, settings)
        self._listener = Listener(self.server.app, "127.0.0.1", 0, shutdown_s=0.5)
        loop.run(self._listener.start())
        self.url = self._listener.url

    @property
    def free(self) -> bool:
        """Whether nothing runs or waits, and no block is in use."""
        blocks = self.engine.blocks
        return not self.engine.has_work() and blocks.num_free == blocks.num_usable

    def close(self) -> None:
        """Ends the server and the worker."""
        self._loop.run(self._listener.stop())
        self.worker.close()


def settle(workers: Sequence[ServedWorker], within_s: float = 10.0) -> None:
    """Waits until all blocks of all workers are free."""
    until(lambda: all(worker.free for worker in workers), "every block is free", within_s=within_s)
