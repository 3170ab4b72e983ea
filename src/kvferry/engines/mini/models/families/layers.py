"""The parts that networks of several families share, each split for one rank."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kvferry.engines.mini.models.config import ModelConfig
from kvferry.engines.mini.models.families.base import Weights
from kvferry.engines.mini.models.linear import Linear
from kvferry.engines.mini.models.parallel import Shard, runs
from kvferry.layout.builders import Heads, head_range

__all__ = [
    "MLP_NAMES",
    "Ends",
    "GatedMlp",
    "HeadShare",
    "add_output",
    "add_partial",
    "output",
    "rows_of",
    "split",
    "split_heads",
]

MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one rank: query heads [start, stop), and the KV heads that they read.

    Each KV head of the rank is read by the same number of its query heads, in order.
    """

    start: int
    stop: int
    kv: Heads

    def __len__(self) -> int:
        return self.stop - self.start


def split(extent: int, shard: Shard) -> range:
    """Returns this rank's run of `extent` rows or heads; the first ranks get one more if they do not divide evenly."""
    return runs(extent, shard.tp_size)[shard.tp_rank]


def split_heads(num_heads: int, num_kv_heads: int, shard: Shard) -> HeadShare:
    """Returns this rank's attention heads. layout.builders.head_range splits or replicates the KV heads.

    Ranks that hold the same KV head divide its query heads among them.
    """
    kv = head_range(num_kv_heads, shard.tp_rank, shard.tp_size)
    shared = num_heads // num_kv_heads
    if shard.tp_size <= num_kv_heads:
        return HeadShare(kv.start * shared, kv.stop * shared, kv)
    owners = [rank for rank in range(shard.tp_size) if rank * num_kv_heads // shard.tp_size == kv.start]
    part = runs(shared, len(owners))[owners.index(shard.tp_rank)]
    return HeadShare(kv.start * shared + part.start, kv.start * shared + part.stop, kv)


def rows_of(part: range | HeadShare | Heads, dim: int = 1) -> slice:
    """Returns the rows of a matrix that belong to a part: `dim` rows for each element of it."""
    return slice(part.start * dim, part.stop * dim)


def add_output(linear: Linear, x: torch.Tensor, residual: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Returns residual + linear(x), summed over all ranks, each of which has some of the columns."""
    if shard.tp_size == 1:
        return linear.plus(x, residual)
    return shard.comm.all_reduce(linear.plus(x, residual) if shard.tp_rank == 0 else linear(x))


def add_partial(partial: torch.Tensor, residual: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Returns residual + the sum of `partial` over all ranks."""
    return shard.comm.all_reduce(partial + residual if shard.tp_rank == 0 else partial)


def output(linear: Linear, x: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Returns linear(x), summed over all ranks, each of which has some of the columns."""
    return linear(x) if shard.tp_size == 1 else shard.comm.all_reduce(linear(x))


class GatedMlp:
    """The gated feed-forward network: down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        inner: int,
        shard: Shard,
        *,
        activation: str = "silu",
        bias: bool = False,
        names: tuple[str, str, str] = MLP_NAMES,
    ) -> None:
        """`names` are those of gate, up and down in the checkpoint."""
        rows = rows_of(split(inner, shard))
        self._shard = shard
        self._activation = activation
        self._gate = weights.linear(f"{name}.{names[0]}", rows=rows, bias=bias)
        self._up = weights.linear(f"{name}.{names[1]}", rows=rows, bias=bias)
        self._down = weights.linear(f"{name}.{names[2]}", cols=rows, bias=bias and shard.tp_rank == 0)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self._up.times(x, self._gate.activated(x, self._activation))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the result, summed over all ranks."""
        return output(self._down, self._inner(x), self._shard)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's summand."""
        return self._down(self._inner(x))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns residual + the result, summed over all ranks."""
        return add_output(self._down, self._inner(x), residual, self._shard)


class Ends:
    """What comes before the first layer and after the last one: embedding, final norm, head.

    Every rank that needs the embedding has all of it; the head is split by rows of the vocabulary.
    """

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        shard: Shard,
        *,
        prefix: str = "model",
        norm: str | None = "norm",
        head: str = "lm_head",
    ) -> None:
        self._shard = shard
        self._hidden = config.hidden
        self._eps = config.norm_eps
        self.embedding: torch.Tensor | None = None
        self.norm: torch.Tensor | None = None
        self.head: Linear | None = None
        if shard.is_first or (shard.is_last and config.tied_embeddings):
            self.embedding = weights.take(f"{prefix}.embed_tokens.weight")
        if shard.is_last:
            rows = rows_of(split(config.vocab_size, shard))
            if norm is not None:
                self.norm = weights.take(f"{prefix}.{norm}.weight")
            if config.tied_embeddings:
                assert self.embedding is not None, "the last stage has a tied embedding"
                self.head = Linear(self.embedding[rows])
            else:
                self.head = weights.linear(head, rows=rows)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns embeddings [tokens, hidden]."""
        assert self.embedding is not None, "only stages with an embedding embed"
        return functional.embedding(token_ids, self.embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [rows, vocab_size] in float32."""
        return self.project(functional.rms_norm(hidden, (self._hidden,), self.norm, self._eps))

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """Returns logits of hidden states that are already normalised."""
        assert self.head is not None, "only the last stage has a head"
        return self._shard.comm.all_gather(self.head(normed).float(), -1)
