"""Blocks that know their content, and transfers that take time. One block holds one token here."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.handoff.actions import Post
from kvferry.transport.base import Operation

if TYPE_CHECKING:
    from kvferry.testing.simulator.rank import SimRank
    from kvferry.testing.simulator.simulated_engine import SimEngine

__all__ = ["GARBAGE", "MAX_RANKS", "Memory", "Transfer", "Violation"]

MAX_RANKS = 8
GARBAGE = -1
"""What a freed block holds."""


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Memory:
    """The blocks of one engine: for each rank and block, the tag of what it holds.

    On a decode engine a block of a rank has a slot for what comes from each prefill rank.
    """

    def __init__(self, num_ranks: int, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.num_blocks = num_blocks
        self.cells = [[GARBAGE] * (num_blocks * MAX_RANKS) for _ in range(num_ranks)]

    def alloc(self, count: int) -> tuple[int, ...] | None:
        """Blocks, taken from the most recently freed ones: reuse comes as early as it can."""
        if count > len(self.free):
            return None
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return tuple(reversed(taken))

    def release(self, blocks: tuple[int, ...]) -> None:
        """Give blocks back; what they held is gone at once."""
        for block in blocks:
            if block in self.free:
                raise Violation("I4", f"block {block} was freed twice")
            self.free.append(block)
        for cells in self.cells:
            for block in blocks:
                cells[block * MAX_RANKS : (block + 1) * MAX_RANKS] = [GARBAGE] * MAX_RANKS


@dataclass(slots=True, eq=False)
class Transfer:
    """A posted transfer: its copies happen at any time between its start and its end."""

    rank: "SimRank"
    post: Post
    peer: "SimEngine"
    pairs: list[tuple[int, int]]
    """Source and destination block of each token."""
    over: bool = False
    error: str | None = None
    halves: list[tuple[int, int]] = field(default_factory=list)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Move these tokens now."""
        ours, theirs = self.rank, self.post.peer.rank
        if self.post.operation is Operation.READ:
            source, target = self.peer.memory.cells[theirs], ours.engine.memory.cells[ours.index]
            for from_, to in pairs:
                target[to * MAX_RANKS + theirs] = source[from_ * MAX_RANKS]
        else:
            source, target = ours.engine.memory.cells[ours.index], self.peer.memory.cells[theirs]
            for from_, to in pairs:
                target[to * MAX_RANKS + ours.index] = source[from_ * MAX_RANKS]
