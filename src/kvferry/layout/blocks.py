"""Block tables with positions, token ranges, and the byte runs that plans consist of."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["BlockTable", "Runs", "TokenRange"]

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Absolute token positions [start, stop) of one request."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks that hold one request's tokens in one cache group, in order, from an absolute position on.

    Block i holds the `block_tokens` tokens from first_token + i * block_tokens on. The table of a STATE group has one
    id, and `first_token` is the n of "the state after token n". Window groups leave out absent leading blocks; then
    `first_token` is the position of the first block that is present.
    """

    group: int
    first_token: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs between two regions: three int64 arrays of the same length. Offsets count from the region's start."""

    source_region: int
    destination_region: int
    source: Offsets
    destination: Offsets
    length: Offsets

    def __len__(self) -> int:
        return len(self.length)

    @property
    def num_bytes(self) -> int:
        """The sum of the lengths of all runs."""
        return int(self.length.sum())
