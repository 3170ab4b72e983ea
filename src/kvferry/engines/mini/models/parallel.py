"""Which part of a model one rank has, and how the ranks of a tensor-parallel group add up what each has computed.

Ranks are numbered stage by stage: index = pp_rank * tp_size + tp_rank. A pipeline stage has a run of layers; the first
ones have one more where they do not come out even. How heads and rows are split inside a stage: families.parts.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

from kvferry.layout.description import Rank

__all__ = ["Comm", "Shard", "SoloComm", "runs"]


class Comm(Protocol):
    """The tensor-parallel group of one rank. Every rank of it makes the same calls in the same order; they block."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the group. May be `x` itself, changed in place: go on with what is returned."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The parts of all ranks, joined along `dim` in the order of the ranks. Parts may differ in length there."""
        ...


class SoloComm:
    """A group of one."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x`."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """`x`."""
        return x


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's place in its engine. The default is a whole model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    comm: Comm = field(default_factory=SoloComm, compare=False)

    @property
    def index(self) -> int:
        """Of the rank in its engine."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        """Of the engine."""
        return self.tp_size * self.pp_size

    @property
    def is_first(self) -> bool:
        """Token ids come in here."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Logits come out here."""
        return self.pp_rank == self.pp_size - 1

    @property
    def rank(self) -> Rank:
        """For the layout of this rank's cache."""
        return Rank(self.index, self.tp_rank, self.tp_size, self.pp_rank, self.pp_size)

    def layers(self, num_layers: int) -> range:
        """The layers of this stage."""
        return runs(num_layers, self.pp_size)[self.pp_rank]


def runs(extent: int, parts: int) -> tuple[range, ...]:
    """`extent` dealt out in runs, the first ones one longer where it does not come out even."""
    each, rest = divmod(extent, parts)
    starts = [part * each + min(part, rest) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))
