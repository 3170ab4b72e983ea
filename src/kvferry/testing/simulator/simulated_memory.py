"""The blocks of a simulated engine, which know their content. Here, one block holds one token."""

__all__ = ["GARBAGE", "MAX_RANKS", "Memory", "Violation"]

MAX_RANKS = 8
GARBAGE = -1
"""What a freed block holds."""


class Violation(Exception):
    """Raised if an invariant does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Memory:
    """The blocks of one engine: for each rank and block, the tag of its content.

    On a decode engine, each block of a rank has one slot per prefill rank that it gets bytes from.
    """

    def __init__(self, num_ranks: int, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.num_blocks = num_blocks
        self.cells = [[GARBAGE] * (num_blocks * MAX_RANKS) for _ in range(num_ranks)]

    def alloc(self, count: int) -> tuple[int, ...] | None:
        """Allocates the most recently freed blocks, so that blocks are reused as early as possible."""
        if count > len(self.free):
            return None
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return tuple(reversed(taken))

    def release(self, blocks: tuple[int, ...]) -> None:
        """Frees blocks, and destroys their content at once."""
        for block in blocks:
            if block in self.free:
                raise Violation("I4", f"block {block} was freed twice")
            self.free.append(block)
        for cells in self.cells:
            for block in blocks:
                cells[block * MAX_RANKS : (block + 1) * MAX_RANKS] = [GARBAGE] * MAX_RANKS
