"""Who computes a step: one rank in this process, or many ranks in processes of their own.

The engine submits what the scheduler planned (numbers only, see step.py) together with what the connector's scheduler
half says, and collects logits in the same order. Each rank does what it is told in the order in which it was told: so a
block that was given up may be used again by the next step, also while the step before is still on its way through the
pipeline, and orders that follow a step find its KV stored.
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
    """What worker halves need to know of their engine."""

    engine: EngineId
    incarnation: Incarnation
    settings: FerrySettings


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one computed step gave."""

    logits: torch.Tensor | None
    """[rows, vocab_size] in float32: the last `num_logits` tokens of each share, in the order of the shares; None where
    no share wanted any."""


class Executor(Protocol):
    """Called on the engine's thread only."""

    @property
    def num_blocks(self) -> int:
        """Cache blocks, the same on every rank; block 0 is not to be given away."""
        ...

    @property
    def depth(self) -> int:
        """Steps that are worth having on the way at once: one for each pipeline stage. Their requests are disjoint."""
        ...

    def submit(self, step: StepInput, orders: StepOrders) -> None:
        """Every rank clears, copies, takes its orders, and computes. A step without shares is not collected."""
        ...

    def collect(self) -> StepOutcome:
        """Of the oldest step with shares that was not collected. Blocks. Raises RanksLost if a rank has died."""
        ...

    def draft(self, order: DraftInput) -> DraftOutput:
        """What the last stage's drafter makes of a step that was collected. Blocks. Raises RanksLost."""
        ...

    def reports(self) -> tuple[StepReport, ...]:
        """What worker halves have ended since the last call, each report of one rank. Never blocks."""
        ...

    @property
    def has_reports(self) -> bool:
        """`reports` has something, or would raise."""
        ...

    def on_report(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on some other thread, when `has_reports` has become true. Where nobody calls: look."""
        ...

    def close(self) -> None:
        """End the worker halves and all that belongs to the ranks. Idempotent."""
        ...

    # What the connector needs. `connect` on the engine's thread; everything else on any.

    @property
    def layouts(self) -> tuple[CacheLayout, ...]:
        """Of the cache of every rank, in order."""
        ...

    @property
    def metadata(self) -> tuple[bytes, ...]:
        """Of the transport of every rank, in order; after `connect`."""
        ...

    def connect(self, connector: ConnectorStart, on_peer_lost: OnPeerLost) -> None:
        """Start every rank's worker half. Blocks. `on_peer_lost`: on another thread, must not block. Raises ConfigError
        for a transport that cannot be had."""
        ...

    def send(self, orders: StepOrders) -> None:
        """Every worker half receives these orders at once, without a step. Never blocks, as the next three."""
        ...

    def drain(self) -> None:
        """Begin nothing with a peer that is not open already."""
        ...

    @property
    def drained(self) -> bool:
        """After `drain`: no hand-off is open on any rank, and every end was fetched by `reports`. Ask until it is."""
        ...

    def rank_stats(self) -> tuple[HandoffStats, ...]:
        """Counters of every worker half, in order, as of a moment ago."""
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes of the ranks, in order."""
        ...


class Stages(Protocol):
    """The way from pipeline stage to pipeline stage, of one rank: see comm.Stages."""

    def receive(self, num_tokens: int) -> torch.Tensor:
        """Hidden states [num_tokens, hidden] of the stage before, of the same step. Blocks."""
        ...

    def send(self, hidden: torch.Tensor) -> None:
        """The same, to the stage behind."""
        ...


class Rank:
    """One rank: its part of the network, its cache, its worker half. On one thread."""

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
        """`stages`: the way to the pipeline stages before and behind, where there are several. `drafter`: of a rank of
        the last stage."""
        self.cache = cache
        self.worker = worker
        self._shard = shard or Shard()
        self._stages = stages
        self._network = network
        self._runner = Runner(network, cache)
        self._drafter = drafter

    def execute(self, step: StepInput, orders: StepOrders) -> torch.Tensor | None:
        """One step of this rank. What it returns, on the last stage: see StepOutcome.logits."""
        if self._drafter is not None:
            self._drafter.forget(step.forget)
        self.cache.copy(step.copies)
        self.cache.clear(step.clear)
        if self.worker is not None and orders:
            if orders.fetch or orders.offer:
                # What we cleared must not be cleared after it has arrived; what is offered must really be there.
                self.cache.wait_written()
            self.worker.start_step(orders)
        if not step.chunks:
            return None
        before = None
        if not self._shard.is_first:
            assert self._stages is not None, "a rank of several stages has a way to the others"
            before = self._stages.receive(sum(chunk.stop - chunk.start for chunk in step.chunks))
        hidden, logits = self._runner.run(step.chunks, before, last=self._shard.is_last)
        if not self._shard.is_last:
            assert self._stages is not None, "a rank of several stages has a way to the others"
            self._stages.send(hidden)
        if self._drafter is not None:
            aux_hidden: torch.Tensor | None = getattr(self._network, "aux_hidden", None)  # see Llama.capture_hidden
            self._drafter.absorb(step.chunks, hidden if aux_hidden is None else aux_hidden)
        return logits

    def draft(self, order: DraftInput) -> DraftOutput:
        """See Executor; on the last stage."""
        assert self._drafter is not None, "only engines whose drafter keeps KV ask ranks for drafts"
        return self._drafter.draft(order)


class LocalExecutor:
    """The whole model in this process: a step is computed when it is submitted."""

    def __init__(
        self, network: Network, cache: KVCache, worker: WorkerHalf | None = None, drafter: Drafter | None = None
    ) -> None:
        """`worker`: a worker half that the caller has made, instead of `connect`."""
        self.cache = cache
        self._worker = worker
        self._handoffs: HandoffWorker | None = None
        self._rank = Rank(network, cache, worker, drafter=drafter)
        self._outcomes: deque[StepOutcome] = deque()
        self._layouts: tuple[CacheLayout, ...] = ()
        self._wake: Callable[[], None] = lambda: None

    @property
    def num_blocks(self) -> int:
        """See Executor."""
        return self.cache.num_blocks

    @property
    def depth(self) -> int:
        """See Executor."""
        return 1

    def submit(self, step: StepInput, orders: StepOrders) -> None:
        """See Executor."""
        logits = self._rank.execute(step, orders)
        if step.chunks:
            self._outcomes.append(StepOutcome(logits))

    def collect(self) -> StepOutcome:
        """See Executor."""
        return self._outcomes.popleft()

    def draft(self, order: DraftInput) -> DraftOutput:
        """See Executor."""
        return self._rank.draft(order)

    def reports(self) -> tuple[StepReport, ...]:
        """See Executor."""
        report = self._worker.end_step() if self._worker is not None else None
        return (report,) if report else ()

    @property
    def has_reports(self) -> bool:
        """See Executor."""
        return self._handoffs is not None and self._handoffs.has_report

    def on_report(self, wake: Callable[[], None]) -> None:
        """See Executor."""
        self._wake = wake

    def _tell(self) -> None:
        """On the driver's thread, which calls it also where there is nothing but other numbers."""
        if self.has_reports:
            self._wake()

    def close(self) -> None:
        """See Executor."""
        if self._worker is not None:
            self._worker.close()

    @property
    def layouts(self) -> tuple[CacheLayout, ...]:
        """See Executor."""
        if not self._layouts:
            self._layouts = (self.cache.layout(),)
        return self._layouts

    @property
    def metadata(self) -> tuple[bytes, ...]:
        """See Executor."""
        return (self._connected().record.transport_metadata,)

    def connect(self, connector: ConnectorStart, on_peer_lost: OnPeerLost) -> None:
        """See Executor."""
        self._worker = self._rank.worker = self._handoffs = start_worker(
            self.cache.layout(),
            (self.cache.data,),
            engine=connector.engine,
            incarnation=connector.incarnation,
            settings=connector.settings,
            on_lost=on_peer_lost,
            on_report=self._tell,
        )

    def _connected(self) -> HandoffWorker:
        assert self._handoffs is not None, "connect() comes first"
        return self._handoffs

    def send(self, orders: StepOrders) -> None:
        """See Executor."""
        self._connected().start_step(orders)

    def drain(self) -> None:
        """See Executor."""
        self._connected().drain()

    @property
    def drained(self) -> bool:
        """See Executor."""
        return self._connected().drained

    def rank_stats(self) -> tuple[HandoffStats, ...]:
        """See Executor."""
        return (self._connected().stats(),)

    @property
    def pids(self) -> tuple[int, ...]:
        """See Executor."""
        return (os.getpid(),)
