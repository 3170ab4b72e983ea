"""What a family, its network, and what the network is given look like."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvferry.engines.mini.models.cache_spec import LayerCache
from kvferry.engines.mini.models.config import ModelConfig
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.linear import Linear
from kvferry.engines.mini.models.parallel import Shard

__all__ = ["Batch", "Family", "Network", "Sequences", "Weights"]


@dataclass(frozen=True, slots=True)
class Sequences:
    """The batch by request, for layers that keep a state: which rows, which state."""

    num_decoding: int
    """So many requests come first, with one token each."""

    starts: tuple[int, ...]
    """Row of each request's first token, of all requests."""

    stops: tuple[int, ...]
    """One behind each request's last row."""

    slots: torch.Tensor
    """[requests] Which state is each one's: an index into the first axis of `Batch.state`. All zeros at token 0."""


class Batch(Protocol):
    """The tokens of one step, in one long row, and their past. Made by the runner, used by every layer.

    Layers are named as the cache names them: `layers.3.attn`.
    """

    @property
    def positions(self) -> torch.Tensor:
        """[tokens] of each token in its request."""
        ...

    def attend(
        self,
        layer: str,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Store keys and values [tokens, kv_heads, dim]; what queries [tokens, heads, dim] see in the layer's window,
        themselves included: [tokens, heads * dim]. `scale`: of the scores; None: 1 / sqrt(dim)."""
        ...

    def attend_latent(
        self, layer: str, queries: torch.Tensor, latents: torch.Tensor, *, value_dim: int, scale: float
    ) -> torch.Tensor:
        """Multi-head latent attention: store latents [tokens, dim]; [tokens, heads, value_dim] of what queries [tokens,
        heads, dim] see, where the latents are keys, and their first `value_dim` elements values, of every head."""
        ...

    def sequences(self, layer: str) -> Sequences:
        """The batch by request, for a layer that keeps a state."""
        ...

    def state(self, layer: str, part: str) -> torch.Tensor:
        """[slots, ...] One part of the states of a layer, to be read and written in place at the batch's slots only."""
        ...


class Network(Protocol):
    """The layers of one rank: a tensor-parallel share of one pipeline stage. Holds no state of any request."""

    config: ModelConfig
    dtype: torch.dtype
    """Of the computation."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]. On the first stage, and on the last one where it shares the matrix with the head."""
        ...

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Hidden states [tokens, hidden] behind this stage, before the last norm. `x`: token ids [tokens] on the first
        stage, what the stage before returned on the others."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size] in float32, of some rows of what `forward` returned. On the last stage."""
        ...


class Weights(Protocol):
    """A checkpoint's tensors, read when asked for, on the right device and in the model's dtype."""

    dtype: torch.dtype
    device: torch.device

    def take(
        self, name: str, *, rows: slice | None = None, cols: slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A tensor of its own, or that part of its first and second axis."""
        ...

    def linear(
        self,
        *names: str,
        rows: slice | Sequence[slice | None] | None = None,
        cols: slice | None = None,
        bias: bool = False,
    ) -> Linear:
        """Matrices `name.weight`, one under the other, with their `name.bias`. `rows`: of each."""
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor."""
        ...


class Family(Protocol):
    """A module of this package."""

    def read(self, raw: dict[str, Any]) -> ModelConfig:
        """config.json as the family's record. KeyError, TypeError and ValueError become UnknownModel with the file."""
        ...

    def expected_tensors(self, config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor that a checkpoint of this config must have."""
        ...

    def caches(self, config: Any, shard: Shard, kv: KvFormat) -> tuple[LayerCache, ...]:
        """What the layers of one rank keep, in their order. Of the whole model for Shard(); no weights are needed."""
        ...

    def build(self, config: Any, weights: Weights, shard: Shard) -> Network:
        """The network of one rank. Raises ConfigError where the model cannot be split that way."""
        ...
