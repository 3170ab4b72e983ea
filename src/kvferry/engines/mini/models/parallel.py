"""Which part of a model each rank has, and how the ranks of a tensor-parallel group add up their results.

Ranks are numbered stage by stage: index = pp_rank * tp_size + tp_rank. A pipeline stage has consecutive layers; the
first stages have one more if the layers do not divide evenly. families.layers splits heads and rows within a stage.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

from kvferry.layout.description import Rank

__all__ = ["Comm", "Shard", "SoloComm", "runs"]


class Comm(Protocol):
    """The tensor-parallel group of one rank. All its ranks make the same calls in the same order. Calls block."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the group. May change `x` in place and return it, so use only the returned tensor."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the parts of all ranks, joined along `dim` in rank order. Their lengths along `dim` may differ."""
        ...


class SoloComm:
    """A group of one rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns `x`."""
        return x


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's place in its engine. The default stands for a whole model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    comm: Comm = field(default_factory=SoloComm, compare=False)

    @property
    def index(self) -> int:
        """The index of the rank in its engine."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the engine."""
        return self.tp_size * self.pp_size

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, which receives token ids."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which returns logits."""
        return self.pp_rank == self.pp_size - 1

    @property
    def rank(self) -> Rank:
        """The record of this rank in the layout of its cache."""
        return Rank(self.index, self.tp_rank, self.tp_size, self.pp_rank, self.pp_size)

    def layers(self, num_layers: int) -> range:
        """Returns the layers of this stage."""
        return runs(num_layers, self.pp_size)[self.pp_rank]


def runs(extent: int, parts: int) -> tuple[range, ...]:
    """Splits `extent` into consecutive runs; the first ones are longer by one if it does not divide evenly."""
    each, rest = divmod(extent, parts)
    starts = [part * each + min(part, rest) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))
