"""What an engine counts, and the record that it shows."""

from dataclasses import dataclass

from kvferry.engines.mini.scheduling.block_manager import num_runs
from kvferry.engines.mini.scheduling.request import Request
from kvferry.engines.mini.scheduling.scheduler import Scheduler
from kvferry.engines.mini.speculation.acceptance import Acceptance

__all__ = ["Counters", "EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the queues as they are."""

    steps: int
    running: int
    waiting: int
    waiting_for_kv: int
    preemptions: int
    blocks: int
    free_blocks: int
    held_blocks: int
    """References that hand-offs hold after their requests have gone."""
    prompt_tokens: int
    cached_tokens: int
    handed_over_tokens: int
    answer_tokens: int
    ranks: int
    """Processes that compute."""
    revivals: int
    """How often ranks have died and were started anew."""
    blocks_per_run: float
    """How many neighbouring blocks of a prompt lay on average in one run: the longer, the faster its hand-off."""
    acceptance: Acceptance
    """How many drafts stood; all zeros without speculation."""


@dataclass(slots=True)
class Counters:
    """Since the start of the engine; they go on when its ranks are started anew."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    handed_over_tokens: int = 0
    answer_tokens: int = 0
    revivals: int = 0
    placed_blocks: int = 0
    placed_runs: int = 0

    def ended(self, request: Request, block_tokens: int) -> None:
        """A request has ended; it still has its blocks."""
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_tokens += request.num_cached
        self.handed_over_tokens += request.num_handed_over
        for held in request.blocks:
            prompt_blocks = held.ids[: -(-request.num_prompt_tokens // block_tokens) - held.first]
            self.placed_blocks += len(prompt_blocks)
            self.placed_runs += num_runs(prompt_blocks)

    def stats(self, scheduler: Scheduler, *, num_ranks: int, acceptance: Acceptance) -> EngineStats:
        """With the queues and blocks as they are."""
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
            answer_tokens=self.answer_tokens,
            ranks=num_ranks,
            revivals=self.revivals,
            blocks_per_run=self.placed_blocks / self.placed_runs if self.placed_runs else 0.0,
            acceptance=acceptance,
        )
