"""Which part of a model one rank has, and how the ranks of a tensor-parallel group add up what each has computed.

Ranks are numbered stage by stage: index = pp_rank * tp_size + tp_rank. A pipeline stage has a run of layers; the first
ones have one more where they do not come out even. Inside a stage, heads and inner rows are dealt out in runs too.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

from kvferry.errors import ConfigError
from kvferry.layout.builders import Heads, head_range
from kvferry.layout.description import Rank

__all__ = ["Comm", "HeadShare", "Shard", "SoloComm", "check_parallel", "runs"]


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
class HeadShare:
    """Attention heads of one rank: query heads [start, stop), and the KV heads that they read.

    With one KV head all query heads read it; with more, each is read by the same number, in order.
    """

    start: int
    stop: int
    kv: Heads

    def __len__(self) -> int:
        return self.stop - self.start


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

    def split(self, extent: int, unit: int = 1) -> range:
        """This rank's run of `extent` rows (inner, experts, vocabulary), cut at multiples of `unit` only."""
        run = runs(extent // unit, self.tp_size)[self.tp_rank]
        return range(run.start * unit, extent if self.tp_rank == self.tp_size - 1 else run.stop * unit)

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShare:
        """This rank's attention heads. KV heads are split as layout.builders.head_range says, or replicated.

        Ranks that share one KV head share its query heads: each has a part of them.
        """
        kv = head_range(num_kv_heads, self.tp_rank, self.tp_size)
        shared = num_heads // num_kv_heads
        if self.tp_size <= num_kv_heads:
            return HeadShare(kv.start * shared, kv.stop * shared, kv)
        owners = [rank for rank in range(self.tp_size) if rank * num_kv_heads // self.tp_size == kv.start]
        part = runs(shared, len(owners))[owners.index(self.tp_rank)]
        return HeadShare(kv.start * shared + part.start, kv.start * shared + part.stop, kv)


def runs(extent: int, parts: int) -> tuple[range, ...]:
    """`extent` dealt out in runs, the first ones one longer where it does not come out even."""
    each, rest = divmod(extent, parts)
    starts = [part * each + min(part, rest) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def check_parallel(*, tp: int, pp: int, num_heads: int, num_kv_heads: int, num_layers: int) -> None:
    """Raises ConfigError where a model cannot be cut like this. Called before a process is started."""
    if pp > num_layers:
        raise ConfigError(
            f"pp={pp!r} stages, and the model has {num_layers} layers: some stages would have none. "
            f"Use --pp {num_layers} or fewer."
        )
    fits = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    if tp not in fits:
        raise ConfigError(
            f"tp={tp!r} does not divide the model's {num_heads} attention heads ({num_kv_heads} KV heads). "
            f"Use --tp with one of {', '.join(map(str, fits))}."
        )
