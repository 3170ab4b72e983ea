"""The Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3. One pass over a flat batch of tokens.

The batch is the tokens of several requests, concatenated: decoding requests first (one token each), then pieces of
prompts. Everything but attention treats all tokens alike. Attention reads each request's past from the paged cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from kvferry.engines.mini.models.cache_spec import LayerCache
from kvferry.engines.mini.models.config import ModelConfig, common_entries
from kvferry.engines.mini.models.families.base import Batch, Weights
from kvferry.engines.mini.models.families.layers import Ends, GatedMlp, add_output, output, rows_of, split_heads
from kvferry.engines.mini.models.families.rope import Rotary, rotate
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.parallel import Shard

__all__ = ["Attention", "Llama", "LlamaConfig", "Mlp", "build", "caches", "expected_tensors", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A decoder of the Llama family."""

    intermediate: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def read(raw: dict[str, Any]) -> LlamaConfig:
    """Reads config.json into the record of this family (base.Family)."""
    common = common_entries(raw)
    architecture = common["architecture"]
    qwen2 = architecture == "Qwen2ForCausalLM"
    bias = bool(raw.get("attention_bias", False))
    return LlamaConfig(
        **common,
        windows=_windows(raw, architecture, common["num_layers"]),
        intermediate=int(raw["intermediate_size"]),
        qkv_bias=qwen2 or bias,
        output_bias=bias and not qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _windows(raw: dict[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None or raw.get("use_sliding_window") is False:
        return (None,) * num_layers
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        return (int(window),) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if i >= raw.get("max_window_layers", 28) else "" for i in range(num_layers)]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def expected_tensors(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of every tensor of a checkpoint (base.Family)."""
    hidden, inner = config.hidden, config.intermediate
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        for part, rows, cols, bias in (
            ("self_attn.q_proj", query, hidden, config.qkv_bias),
            ("self_attn.k_proj", key, hidden, config.qkv_bias),
            ("self_attn.v_proj", key, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, query, config.output_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            yield f"{layer}.{part}.weight", (rows, cols)
            if bias:
                yield f"{layer}.{part}.bias", (rows,)
        if config.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (config.head_dim,)


def caches(config: ModelConfig, shard: Shard, kv: KvFormat) -> tuple[LayerCache, ...]:
    """Returns what the layers of one rank keep in the cache (base.Family)."""
    held = split_heads(config.num_heads, config.num_kv_heads, shard).kv
    heads = (held.extent, held.start, held.stop)
    return tuple(
        kv.attention(f"layers.{i}.attn", heads, config.head_dim, config.windows[i])
        for i in shard.layers(config.num_layers)
    )


def build(config: LlamaConfig, weights: Weights, shard: Shard) -> "Llama":
    """Builds the network of one rank (base.Family)."""
    return Llama(config, weights, shard)


class Attention:
    """One layer's attention. Query, key and value are one matrix; queries and keys may be normalised and rotated."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        layer: str,
        config: ModelConfig,
        shard: Shard,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        qk_norm_offset: float = 0.0,
        scale: float | None = None,
    ) -> None:
        dim = config.head_dim
        query = split_heads(config.num_heads, config.num_kv_heads, shard)
        kv = query.kv
        self._layer, self._shard, self._scale = layer, shard, scale
        self._dim, self._eps = dim, config.norm_eps
        self._num_heads, self._num_rotated = len(query), len(query) + len(kv)
        self._qkv = weights.linear(
            *(f"{name}.{part}_proj" for part in "qkv"),
            rows=[rows_of(query, dim), rows_of(kv, dim), rows_of(kv, dim)],
            bias=qkv_bias,
        )
        self._output = weights.linear(
            f"{name}.o_proj", cols=rows_of(query, dim), bias=output_bias and shard.tp_rank == 0
        )
        self._norms: torch.Tensor | None = None
        if qk_norm:
            dtype = torch.float32 if qk_norm_offset else weights.dtype
            q, k = (weights.take(f"{name}.{x}_norm.weight", dtype=dtype) + qk_norm_offset for x in "qk")
            self._norms = torch.cat([q.expand(len(query), -1), k.expand(len(kv), -1)])

    def plus(
        self, x: torch.Tensor, residual: torch.Tensor, batch: Batch, table: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Returns residual + attention(x). `table`: cosine and sine of the positions; None: nothing is rotated."""
        return add_output(self._output, self._mixed(x, batch, table), residual, self._shard)

    def __call__(self, x: torch.Tensor, batch: Batch, table: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """Returns attention(x) alone."""
        return output(self._output, self._mixed(x, batch, table), self._shard)

    def _mixed(self, x: torch.Tensor, batch: Batch, table: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        qkv = self._qkv(x).view(len(x), -1, self._dim)
        rotated = qkv[:, : self._num_rotated]  # queries and keys
        if self._norms is not None:
            normed = functional.rms_norm(rotated.to(self._norms.dtype), (self._dim,), None, self._eps)
            rotated = (normed * self._norms).to(rotated.dtype)
        if table is not None:
            rotated = rotate(rotated, *table)
        return batch.attend(
            self._layer,
            rotated[:, : self._num_heads],
            rotated[:, self._num_heads :],
            qkv[:, self._num_rotated :],
            scale=self._scale,
        )


class Mlp(Protocol):
    """The second half of a layer."""

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns residual + mlp(x)."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    attention: Attention
    mlp_norm: torch.Tensor
    mlp: Mlp


class Llama:
    """Implements base.Network."""

    def __init__(
        self, config: LlamaConfig, weights: Weights, shard: Shard, *, mlp: Callable[[int], Mlp] | None = None
    ) -> None:
        """`mlp` makes the second half of a layer, for families with a different one."""
        self.config = config
        self._make_mlp = mlp or (
            lambda i: GatedMlp(weights, f"model.layers.{i}.mlp", config.intermediate, shard, bias=config.mlp_bias)
        )
        self.dtype = weights.dtype
        self._ends = Ends(weights, config, shard)
        self._first = shard.is_first
        self._layers = [self._layer(weights, i, shard) for i in shard.layers(config.num_layers)]
        self._rope = Rotary(config.rope, config.head_dim, config.max_positions, weights.dtype, weights.device)
        self.embed, self.logits = self._ends.embed, self._ends.logits
        self._captured_layers: tuple[int, ...] = ()
        self.aux_hidden: torch.Tensor | None = None

    def capture_hidden(self, layers: Sequence[int]) -> None:
        """Makes `forward` leave the inputs of these layers in `aux_hidden` [tokens, layers * hidden], for a drafter.

        A layer number equal to the number of layers stands for the output of the last layer.
        """
        self._captured_layers = tuple(layers)

    def _layer(self, weights: Weights, i: int, shard: Shard) -> _Layer:
        config, name = self.config, f"model.layers.{i}"
        return _Layer(
            attention_norm=weights.take(f"{name}.input_layernorm.weight"),
            attention=Attention(
                weights,
                f"{name}.self_attn",
                f"layers.{i}.attn",
                config,
                shard,
                qkv_bias=config.qkv_bias,
                output_bias=config.output_bias,
                qk_norm=config.qk_norm,
            ),
            mlp_norm=weights.take(f"{name}.post_attention_layernorm.weight"),
            mlp=self._make_mlp(i),
        )

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the hidden states after this stage (base.Network)."""
        eps, width = self.config.norm_eps, (self.config.hidden,)
        table = self._rope(batch.positions)
        if self._first:
            x = self.embed(x)
        captured: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self._layers):
            if i in self._captured_layers:
                captured[i] = x
            x = layer.attention.plus(functional.rms_norm(x, width, layer.attention_norm, eps), x, batch, table)
            x = layer.mlp.plus(functional.rms_norm(x, width, layer.mlp_norm, eps), x)
        if self._captured_layers:
            captured[len(self._layers)] = x
            self.aux_hidden = torch.cat([captured[i] for i in self._captured_layers], dim=-1)
        return x
