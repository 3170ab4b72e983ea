"""Who computes a step: one rank in this process, or many ranks in processes of their own.

The engine submits what the scheduler planned (numbers only, see specs.py) together with what the connector's scheduler
half says, and collects logits in the same order. Each rank does what it is told in the order in which it was told: so a
block that was given up may be used again by the next step, also while the step before is still on its way through the
pipeline, and orders that follow a step find its KV stored.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.connector.base import StepOrders, StepReport, WorkerHalf
from kvferry.engines.mini.cache import KVCache
from kvferry.engines.mini.families.base import Network
from kvferry.engines.mini.runner import Runner
from kvferry.engines.mini.specs import ShareInput, StepInput

__all__ = ["Executor", "LocalExecutor", "Rank", "StepOutcome"]


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

    def reports(self) -> tuple[StepReport, ...]:
        """What worker halves have ended since the last call, each report of one rank. Never blocks."""
        ...

    def close(self) -> None:
        """End the worker halves and all that belongs to the ranks. Idempotent."""
        ...


class Rank:
    """One rank: its part of the network, its cache, its worker half. On one thread."""

    def __init__(self, network: Network, cache: KVCache, worker: WorkerHalf | None = None) -> None:
        self.cache = cache
        self.worker = worker
        self._runner = Runner(network, cache)

    def execute(self, step: StepInput, orders: StepOrders) -> torch.Tensor | None:
        """One step of this rank. What it returns: see StepOutcome.logits."""
        self.cache.clear(step.clear)
        if self.worker is not None and orders:
            if orders.want or orders.offer:
                # What we cleared must not be cleared after it has arrived; what is offered must really be there.
                self.cache.wait_written()
            self.worker.start_step(orders)
        return self._runner.run([_Work(share) for share in step.shares]) if step.shares else None


@dataclass(frozen=True, slots=True)
class _Work:
    """A share as the runner wants it: one cache group."""

    share: ShareInput

    @property
    def start(self) -> int:
        return self.share.start

    @property
    def stop(self) -> int:
        return self.share.stop

    @property
    def token_ids(self) -> Sequence[int]:
        return self.share.token_ids

    @property
    def block_ids(self) -> Sequence[int]:
        return self.share.tables[0].block_ids

    @property
    def wants_logits(self) -> bool:
        return self.share.num_logits > 0


class LocalExecutor:
    """The whole model in this process: a step is computed when it is submitted."""

    def __init__(self, network: Network, cache: KVCache, worker: WorkerHalf | None = None) -> None:
        self.cache = cache
        self._worker = worker
        self._rank = Rank(network, cache, worker)
        self._outcomes: deque[StepOutcome] = deque()

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
        if step.shares:
            self._outcomes.append(StepOutcome(logits))

    def collect(self) -> StepOutcome:
        """See Executor."""
        return self._outcomes.popleft()

    def reports(self) -> tuple[StepReport, ...]:
        """See Executor."""
        report = self._worker.end_step() if self._worker is not None else None
        return (report,) if report else ()

    def close(self) -> None:
        """See Executor."""
        if self._worker is not None:
            self._worker.close()
