"""The counters of an engine, and the snapshot of them that `Engine.stats` returns."""

from dataclasses import dataclass

from kvferry.engines.mini.scheduling.block_manager import num_runs
from kvferry.engines.mini.scheduling.request import Request
from kvferry.engines.mini.scheduling.scheduler import Scheduler
from kvferry.engines.mini.speculation.acceptance import Acceptance

__all__ = ["Counters", "EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started, and the current lengths of its queues."""

    steps: int
    running: int
    waiting: int
    waiting_for_kv: int
    preemptions: int
    blocks: int
    free_blocks: int
    held_blocks: int
    """References that hand-offs hold after their requests have ended."""
    prompt_tokens: int
    cached_tokens: int
    handed_over_tokens: int
    recomputed_tokens: int
    computed_again_tokens: int
    """Prompt tokens that were computed more often than once, because their request was preempted."""
    answer_tokens: int
    ranks: int
    """Number of rank processes."""
    revivals: int
    """How often ranks have died and new ones were started."""
    blocks_per_run: float
    """Average number of blocks per run of consecutive blocks in prompts: longer runs make hand-offs faster."""
    acceptance: Acceptance
    """How many drafts were accepted; all zeros without speculation."""


@dataclass(slots=True)
class Counters:
    """Counters since the engine started. They continue when new ranks are started."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    handed_over_tokens: int = 0
    recomputed_tokens: int = 0
    computed_again_tokens: int = 0
    answer_tokens: int = 0
    revivals: int = 0
    placed_blocks: int = 0
    placed_runs: int = 0

    def ended(self, request: Request, block_tokens: int) -> None:
        """Counts a request that has ended and still has its blocks."""
        account = request.account
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_tokens += account.cached
        self.handed_over_tokens += account.handed_over
        self.recomputed_tokens += account.recomputed
        self.computed_again_tokens += account.computed_again
        for held in request.blocks:
            prompt_blocks = held.ids[: -(-request.num_prompt_tokens // block_tokens) - held.first]
            self.placed_blocks += len(prompt_blocks)
            self.placed_runs += num_runs(prompt_blocks)

    def stats(self, scheduler: Scheduler, *, num_ranks: int, acceptance: Acceptance) -> EngineStats:
        """Returns a snapshot, with the current queues and blocks."""
        blocks = scheduler.blocks
        return EngineStats(
            steps=self.steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_for_kv=len(scheduler.waiting_for_kv),
            preemptions=scheduler.num_preemptions,
            blocks=blocks.num_usable,
            free_blocks=blocks.num_free,
            held_blocks=blocks.num_held,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            handed_over_tokens=self.handed_over_tokens,
            recomputed_tokens=self.recomputed_tokens,
            computed_again_tokens=self.computed_again_tokens,
            answer_tokens=self.answer_tokens,
            ranks=num_ranks,
            revivals=self.revivals,
            blocks_per_run=self.placed_blocks / self.placed_runs if self.placed_runs else 0.0,
            acceptance=acceptance,
        )
