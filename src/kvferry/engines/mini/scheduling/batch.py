"""What the scheduler decides for one step: which tokens are computed, and what happens to blocks before that."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvferry.engines.mini.scheduling.block_manager import BlockHash
from kvferry.engines.mini.scheduling.request import Request

__all__ = ["BlockChanges", "ScheduledChunk", "StepPlan"]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, stop) of a request, to be computed in one step."""

    request: Request
    start: int
    stop: int
    drafts: tuple[int, ...] = ()
    """The chunk's last tokens, which are drafts: the step verifies them."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute."""
        return [*self.request.tokens[self.start : self.stop], *self.drafts]

    @property
    def num_logits(self) -> int:
        """For how many of the chunk's last tokens logits are needed: the last known token, and each draft."""
        return 1 + len(self.drafts) if self.stop >= len(self.request.tokens) else 0


@dataclass(slots=True)
class BlockChanges:
    """What a step does to blocks before it computes. Copies are made first, then fresh blocks are cleared."""

    fresh: list[int] = field(default_factory=list)
    """Newly allocated blocks, to be cleared before anything is written to them."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy, as (from, to)."""
    snapshots: list[tuple[int, BlockHash, int]] = field(default_factory=list)
    """Copies of states, as (block, hash, group). They enter the prefix cache when the plan is made."""
    pins: list[int] = field(default_factory=list)
    """Blocks that a copy reads. The plan holds a reference to each, so that it does not give them away itself."""


@dataclass(slots=True)
class StepPlan:
    """Everything that one step does."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    """What to compute: chunks of one token first, then longer ones."""
    changes: BlockChanges = field(default_factory=BlockChanges)
    """What happens to blocks before that."""
    adopted: list[Request] = field(default_factory=list)
    """Requests with nothing to compute: their whole prompt was in our prefix cache, and prefill chose the first
    token."""
    complete: list[Request] = field(default_factory=list)
    """Prefill requests with nothing to compute: every token that will be handed over was in our prefix cache."""
    refused: list[tuple[Request, str]] = field(default_factory=list)
    """Requests that the connector refused, each with a message for the client."""
    broken: list[tuple[Request, Exception]] = field(default_factory=list)
    """Requests that cannot be planned, and what was raised for them."""

    def record_stages(self, waiting_for_kv: Iterable[Request], now_s: float) -> None:
        """Records when a request is first computed, and when it first waits for KV."""
        for chunk in self.chunks:
            if chunk.request.stages.computing_s is None:
                chunk.request.stages = replace(chunk.request.stages, computing_s=now_s)
        for request in waiting_for_kv:
            if request.stages.reserved_s is None:
                request.stages = replace(request.stages, reserved_s=now_s)
