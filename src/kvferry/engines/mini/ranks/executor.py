"""The port through which an engine reaches its ranks: one rank in this process, or many in processes of their own.

The engine submits the scheduler's plan (numbers only, see step.py) together with the orders of the connector's
scheduler half, and collects logits in the same order. Each rank carries out steps and orders in the order in which they
were submitted. So the next step may use a block that was given up while the step before is still in the pipeline, and
orders that follow a step find its KV stored.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.connector.base import StepOrders, StepReport, WorkerHalf
from kvferry.connector.worker import HandoffWorker, start_worker
from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.compute.runner import Runner
from kvferry.engines.mini.models.families.base import Network
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.speculation.chain import Drafter
from kvferry.engines.mini.speculation.draft_records import DraftInput, DraftOutput
from kvferry.engines.mini.step import StepInput
from kvferry.ids import EngineId, Incarnation
from kvferry.layout.description import CacheLayout
from kvferry.settings import FerrySettings
from kvferry.stats import HandoffStats

__all__ = ["ConnectorStart", "Executor", "LocalExecutor", "OnPeerLost", "Rank", "Stages", "StepOutcome"]

OnPeerLost = Callable[[EngineId, Incarnation, str], None]


@dataclass(frozen=True, slots=True)
class ConnectorStart:
    """What worker halves need to know about their engine."""

    engine: EngineId
    incarnation: Incarnation
    settings: FerrySettings


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of one step."""

    logits: torch.Tensor | None
    """The logits of the last `num_logits` tokens of each chunk, in the order of the chunks: [rows, vocab_size] in
    float32. None if no chunk asked for any."""


class Executor(Protocol):
    """Runs steps on the ranks of one engine. Called on the engine's thread only, except as stated below."""

    @property
    def num_blocks(self) -> int:
        """The number of cache blocks, the same on every rank. Block 0 must not be given to a request."""
        ...

    @property
    def depth(self) -> int:
        """How many steps should be in flight at once: one per pipeline stage. Their requests must be disjoint."""
        ...

    def submit(self, step: StepInput, orders: StepOrders) -> None:
        """Makes every rank copy and clear blocks, take its orders, and compute. Without chunks there is no outcome.

        What computing raises, `collect` raises: then the orders were carried out, and no chunk of the step is computed.
        """
        ...

    def collect(self) -> StepOutcome:
        """Returns the outcome of the oldest step with chunks that was not collected. Blocks. Raises RanksLost.

        An executor in this process raises what computing the step has raised, and lives.
        """
        ...

    def draft(self, order: DraftInput) -> DraftOutput:
        """Runs the drafter of the last stage after a step that was collected. Blocks. Raises RanksLost."""
        ...

    def reports(self) -> tuple[StepReport, ...]:
        """Returns the reports of the worker halves since the last call, each from one rank. Never blocks."""
        ...

    @property
    def has_reports(self) -> bool:
        """Whether `reports` would return something, or raise."""
        ...

    def on_report(self, callback: Callable[[], None]) -> None:
        """Sets what is called, on another thread, when `has_reports` has become true."""
        ...

    def close(self) -> None:
        """Ends the worker halves and everything else that belongs to the ranks. Idempotent."""
        ...

    # For the connector. `connect` is called on the engine's thread, everything else on any thread.

    @property
    def layouts(self) -> tuple[CacheLayout, ...]:
        """The layout of each rank's cache, in rank order."""
        ...

    @property
    def metadata(self) -> tuple[bytes, ...]:
        """The transport metadata of each rank, in rank order; available after `connect`."""
        ...

    def connect(self, connector: ConnectorStart, on_peer_lost: OnPeerLost) -> None:
        """Starts every rank's worker half. Blocks. Raises ConfigError if the transport is not available.

        `on_peer_lost` is called on another thread, and must not block.
        """
        ...

    def send(self, orders: StepOrders) -> None:
        """Passes orders to every worker half at once, outside of a step. Never blocks."""
        ...

    def drain(self) -> None:
        """Stops the start of new hand-offs on every rank; open ones go on. Never blocks."""
        ...

    @property
    def drained(self) -> bool:
        """Whether, after `drain`, no hand-off is open on any rank and `reports` has returned every end.

        May become true late; read it again until it is.
        """
        ...

    def rank_stats(self) -> tuple[HandoffStats, ...]:
        """Returns the latest known counters of each worker half, in rank order."""
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of each rank, in rank order."""
        ...


class Stages(Protocol):
    """Passes hidden states between the pipeline stages of one rank; comm.Stages implements it."""

    def receive(self, num_tokens: int) -> torch.Tensor:
        """Returns the hidden states [num_tokens, hidden] of the previous stage, for the same step. Blocks."""
        ...

    def send(self, hidden: torch.Tensor) -> None:
        """Sends hidden states to the next stage."""
        ...


class Rank:
    """One rank: its part of the network, its cache, and its worker half. Used by one thread."""

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        worker: WorkerHalf | None = None,
        *,
        shard: Shard | None = None,
        stages: Stages | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`stages` connects this rank to the other pipeline stages, if any. Only the last stage has a `drafter`."""
        self.cache = cache
        self.worker = worker
        self._shard = shard or Shard()
        self._stages = stages
        self._network = network
        self._runner = Runner(network, cache)
        self._drafter = drafter

    def execute(self, step: StepInput, orders: StepOrders) -> torch.Tensor | None:
        """Runs one step. Returns StepOutcome.logits on the last stage, and None on the others."""
        self.prepare(step, orders)
        return self.compute(step) if step.chunks else None

    def prepare(self, step: StepInput, orders: StepOrders) -> None:
        """Carries out all of a step but its chunks."""
        if self._drafter is not None:
            self._drafter.forget(step.forget)
        self.cache.copy(step.copies)
        self.cache.clear(step.clear)
        if self.worker is not None and orders:
            if orders.fetch or orders.offer:
                # Cleared blocks must be zero before bytes arrive in them, and offered blocks must be in memory.
                self.cache.wait_written()
            self.worker.start_step(orders)

    def compute(self, step: StepInput) -> torch.Tensor | None:
        """Computes the chunks of a step that is prepared. Returns as `execute`."""
        before = None
        if not self._shard.is_first:
            assert self._stages is not None, "a rank of an engine with several stages has Stages"
            before = self._stages.receive(sum(chunk.stop - chunk.start for chunk in step.chunks))
        hidden, logits = self._runner.run(step.chunks, before, last=self._shard.is_last)
        if not self._shard.is_last:
            assert self._stages is not None, "a rank of an engine with several stages has Stages"
            self._stages.send(hidden)
        if self._drafter is not None:
            aux_hidden: torch.Tensor | None = getattr(self._network, "aux_hidden", None)  # Llama.capture_hidden
            self._drafter.absorb(step.chunks, hidden if aux_hidden is None else aux_hidden)
        return logits

    def draft(self, order: DraftInput) -> DraftOutput:
        """Runs the drafter; see Executor.draft."""
        assert self._drafter is not None, "only engines whose drafter keeps KV ask ranks for drafts"
        return self._drafter.draft(order)


class LocalExecutor:
    """Runs the whole model in this process: a step is computed when it is submitted. Implements Executor."""

    def __init__(
        self, network: Network, cache: KVCache, worker: WorkerHalf | None = None, drafter: Drafter | None = None
    ) -> None:
        """`worker` is a worker half made by the caller, for engines that do not call `connect`."""
        self.cache = cache
        self._worker = worker
        self._handoffs: HandoffWorker | None = None
        self._rank = Rank(network, cache, worker, drafter=drafter)
        self._outcomes: deque[StepOutcome | Exception] = deque()
        self._layouts: tuple[CacheLayout, ...] = ()
        self._report_callback: Callable[[], None] = lambda: None

    @property
    def num_blocks(self) -> int:
        """Implements Executor."""
        return self.cache.num_blocks

    @property
    def depth(self) -> int:
        """Implements Executor."""
        return 1

    def submit(self, step: StepInput, orders: StepOrders) -> None:
        """Implements Executor."""
        self._rank.prepare(step, orders)
        if step.chunks:
            try:
                self._outcomes.append(StepOutcome(self._rank.compute(step)))
            except Exception as error:  # noqa: BLE001  # `collect` raises it
                self._outcomes.append(error)

    def collect(self) -> StepOutcome:
        """Implements Executor."""
        outcome = self._outcomes.popleft()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def draft(self, order: DraftInput) -> DraftOutput:
        """Implements Executor."""
        return self._rank.draft(order)

    def reports(self) -> tuple[StepReport, ...]:
        """Implements Executor."""
        report = self._worker.end_step() if self._worker is not None else None
        return (report,) if report else ()

    @property
    def has_reports(self) -> bool:
        """Implements Executor."""
        return self._handoffs is not None and self._handoffs.has_report

    def on_report(self, callback: Callable[[], None]) -> None:
        """Implements Executor."""
        self._report_callback = callback

    def _on_worker_report(self) -> None:
        """Called on the driver's thread, also when only counters have changed."""
        if self.has_reports:
            self._report_callback()

    def close(self) -> None:
        """Implements Executor."""
        if self._worker is not None:
            self._worker.close()

    @property
    def layouts(self) -> tuple[CacheLayout, ...]:
        """Implements Executor."""
        if not self._layouts:
            self._layouts = (self.cache.layout(),)
        return self._layouts

    @property
    def metadata(self) -> tuple[bytes, ...]:
        """Implements Executor."""
        return (self._connected().record.transport_metadata,)

    def connect(self, connector: ConnectorStart, on_peer_lost: OnPeerLost) -> None:
        """Implements Executor."""
        self._worker = self._rank.worker = self._handoffs = start_worker(
            self.cache.layout(),
            (self.cache.data,),
            engine=connector.engine,
            incarnation=connector.incarnation,
            settings=connector.settings,
            on_lost=on_peer_lost,
            on_report=self._on_worker_report,
        )

    def _connected(self) -> HandoffWorker:
        assert self._handoffs is not None, "the engine calls connect() first"
        return self._handoffs

    def send(self, orders: StepOrders) -> None:
        """Implements Executor."""
        self._connected().start_step(orders)

    def drain(self) -> None:
        """Implements Executor."""
        self._connected().drain()

    @property
    def drained(self) -> bool:
        """Implements Executor."""
        return self._connected().drained

    def rank_stats(self) -> tuple[HandoffStats, ...]:
        """Implements Executor."""
        return (self._connected().stats(),)

    @property
    def pids(self) -> tuple[int, ...]:
        """Implements Executor."""
        return (os.getpid(),)
