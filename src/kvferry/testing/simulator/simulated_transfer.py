"""Transfers that take simulated time."""

from dataclasses import dataclass

from kvferry.handoff.actions import Post
from kvferry.testing.simulator.rank import RankEngine, SimRank
from kvferry.testing.simulator.simulated_memory import MAX_RANKS
from kvferry.transport.base import Operation

__all__ = ["Transfer"]


@dataclass(slots=True, eq=False)
class Transfer:
    """A posted transfer: its copies happen at any time between its start and its end."""

    rank: SimRank
    post: Post
    peer: RankEngine
    pairs: list[tuple[int, int]]
    """The source block and the destination block of each token."""
    over: bool = False

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Moves these tokens now."""
        ours, theirs = self.rank, self.post.peer.rank
        if self.post.operation is Operation.READ:
            source, target = self.peer.memory.cells[theirs], ours.engine.memory.cells[ours.index]
            for from_, to in pairs:
                target[to * MAX_RANKS + theirs] = source[from_ * MAX_RANKS]
        else:
            source, target = ours.engine.memory.cells[ours.index], self.peer.memory.cells[theirs]
            for from_, to in pairs:
                target[to * MAX_RANKS + ours.index] = source[from_ * MAX_RANKS]
