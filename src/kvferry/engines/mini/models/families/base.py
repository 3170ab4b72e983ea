"""The protocols of a model family: the family itself, its network, and what the network is given."""

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
    """The rows and the state of each request of a batch, for layers that keep a recurrent state."""

    num_decoding: int
    """How many requests, the first ones of the batch, have one token each."""

    starts: tuple[int, ...]
    """The row of each request's first token."""

    stops: tuple[int, ...]
    """The row after each request's last token."""

    state_blocks: torch.Tensor
    """[requests] The block of each request's state, an index of `Batch.state`. A new request has zeros there."""


class Batch(Protocol):
    """The tokens of one step, concatenated over all requests, and their past. Made by the runner, used by every layer.

    Layers are named as in the cache, such as `layers.3.attn`.
    """

    @property
    def positions(self) -> torch.Tensor:
        """[tokens] The position of each token in its request."""
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
        """Stores keys and values [tokens, kv_heads, dim], and returns attention over them: [tokens, heads * dim].

        Queries [tokens, heads, dim] attend to the tokens in the layer's window, their own included. Scores are
        multiplied by `scale`; None: 1 / sqrt(dim).
        """
        ...

    def attend_latent(
        self, layer: str, queries: torch.Tensor, latents: torch.Tensor, *, value_dim: int, scale: float
    ) -> torch.Tensor:
        """Stores latents [tokens, dim], and returns multi-head latent attention: [tokens, heads, value_dim].

        For every head, the latents are the keys of queries [tokens, heads, dim], and their first `value_dim` elements
        are the values.
        """
        ...

    def sequences(self, layer: str) -> Sequences:
        """Returns the rows and states of the requests, for a layer that keeps a state."""
        ...

    def state(self, layer: str, part: str) -> torch.Tensor:
        """Returns one part of a layer's states [num_blocks, ...]. Read and write it in place, at `state_blocks`."""
        ...


class Network(Protocol):
    """The layers of one rank: its tensor-parallel part of one pipeline stage. Keeps no state of any request."""

    config: ModelConfig
    dtype: torch.dtype
    """The dtype of the computation."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns embeddings [tokens, hidden]. For the first stage, and for the last one if its head uses them."""
        ...

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the hidden states [tokens, hidden] after this stage, before the final norm.

        `x` is token ids [tokens] on the first stage, and what the previous stage returned on the others.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [rows, vocab_size] in float32 of some rows that `forward` returned. For the last stage."""
        ...


class Weights(Protocol):
    """The tensors of a checkpoint, each read when it is taken, on the rank's device and in the model's dtype."""

    dtype: torch.dtype
    device: torch.device

    def take(
        self, name: str, *, rows: slice | None = None, cols: slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Returns a copy of a tensor, or of the given ranges of its first and second axis."""
        ...

    def linear(
        self,
        *names: str,
        rows: slice | Sequence[slice | None] | None = None,
        cols: slice | None = None,
        bias: bool = False,
    ) -> Linear:
        """Returns the matrices `name.weight`, stacked by rows, with their `name.bias`. `rows` may differ for each."""
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor."""
        ...


class Family(Protocol):
    """The functions of a module of this package."""

    def read(self, raw: dict[str, Any]) -> ModelConfig:
        """Reads config.json. The caller turns KeyError, TypeError and ValueError into UnknownModel with the path."""
        ...

    def expected_tensors(self, config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the name and shape of every tensor that a checkpoint of this config must have."""
        ...

    def caches(self, config: Any, shard: Shard, kv: KvFormat) -> tuple[LayerCache, ...]:
        """Returns what the layers of one rank keep, in order; Shard() stands for the whole model. Reads no weights."""
        ...

    def build(self, config: Any, weights: Weights, shard: Shard) -> Network:
        """Builds the network of one rank. Raises ConfigError if the model cannot be split that way."""
        ...
