"""Gemma 3, text only: most layers have a sliding window, every sixth has full attention.

It differs from Llama in this: norms come before and after both halves of a layer, and their weights are stored less
one; queries and keys are normalised; there are two bases of the rotary embedding; embeddings are multiplied by the root
of their width; the activation is GELU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kvferry.engines.mini.models.config import ModelConfig, Rope, common_entries, read_rope
from kvferry.engines.mini.models.families.base import Batch, Weights
from kvferry.engines.mini.models.families.layers import Ends, GatedMlp
from kvferry.engines.mini.models.families.llama import Attention, caches
from kvferry.engines.mini.models.families.rope import Rotary
from kvferry.engines.mini.models.parallel import Shard

__all__ = ["Gemma3", "Gemma3Config", "build", "caches", "expected_tensors", "read"]

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """The record of Gemma 3. `rope` is that of the layers with full attention."""

    intermediate: int
    local_rope: Rope
    """The rotary embedding of the layers with a window."""
    attention_scale: float
    bias: bool
    logit_cap: float | None
    """Logits become cap * tanh(logit / cap); None: they stay as they are."""


def read(raw: dict[str, Any]) -> Gemma3Config:
    """Reads config.json into the record of this family (base.Family)."""
    for entry in ("use_bidirectional_attention", "attn_logit_softcapping"):
        if raw.get(entry):
            raise ValueError(f"{entry}={raw[entry]!r} is not supported: it must be absent")
    if raw.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_activation={raw['hidden_activation']!r} is not supported: only gelu_pytorch_tanh")
    both = (
        {kind: raw["rope_parameters"].get(kind) for kind in ("full_attention", "sliding_attention")}
        if ("full_attention" in (raw.get("rope_parameters") or {}))
        else {"full_attention": raw.get("rope_scaling"), "sliding_attention": None}
    )
    positions = {"max_position_embeddings": raw["max_position_embeddings"]}
    theta = {"full_attention": raw.get("rope_theta", 1e6), "sliding_attention": raw.get("rope_local_base_freq", 1e4)}
    ropes = {k: read_rope({**positions, "rope_theta": theta[k], "rope_parameters": both[k]}) for k in theta}
    common = common_entries({"tie_word_embeddings": True, "head_dim": 256, **raw, "rope_parameters": None})
    return Gemma3Config(
        **{**common, "rope": ropes["full_attention"]},
        local_rope=ropes["sliding_attention"],
        windows=_windows(raw, common["num_layers"]),
        intermediate=int(raw["intermediate_size"]),
        attention_scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        bias=bool(raw.get("attention_bias", False)),
        logit_cap=float(raw["final_logit_softcapping"]) if raw.get("final_logit_softcapping") else None,
    )


def _windows(raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    kinds = raw.get("layer_types")
    if kinds is None:
        every = int(raw.get("sliding_window_pattern", 6))
        kinds = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(num_layers)]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    window = int(raw["sliding_window"])
    if window < 1:
        raise ValueError(f"sliding_window={window!r} must be at least 1")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def expected_tensors(config: Gemma3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of every tensor of a checkpoint (base.Family)."""
    hidden, inner = config.hidden, config.intermediate
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        for norm in NORMS:
            yield f"{layer}.{norm}.weight", (hidden,)
        for part, rows, cols in (
            ("q_proj", query, hidden),
            ("k_proj", key, hidden),
            ("v_proj", key, hidden),
            ("o_proj", hidden, query),
        ):
            yield f"{layer}.self_attn.{part}.weight", (rows, cols)
            if config.bias:
                yield f"{layer}.self_attn.{part}.bias", (rows,)
        for norm in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{norm}.weight", (config.head_dim,)
        for part, rows, cols in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"{layer}.mlp.{part}_proj.weight", (rows, cols)


def build(config: Gemma3Config, weights: Weights, shard: Shard) -> "Gemma3":
    """Builds the network of one rank (base.Family)."""
    return Gemma3(config, weights, shard)


@dataclass(frozen=True, slots=True)
class _Layer:
    norms: tuple[torch.Tensor, ...]
    """The weights of the norms, in the order of NORMS."""
    attention: Attention
    mlp: GatedMlp
    local: bool


class Gemma3:
    """Implements base.Network."""

    def __init__(self, config: Gemma3Config, weights: Weights, shard: Shard) -> None:
        self.config = config
        self.dtype = weights.dtype
        self._ends = Ends(weights, config, shard, norm=None)
        self._first = shard.is_first
        # Rounded to the dtype as transformers rounds it.
        self._embedding_scale = torch.tensor(config.hidden**0.5, dtype=weights.dtype).item()
        self._norm = _one_more(weights, "model.norm") if shard.is_last else None
        self._layers = [self._layer(weights, i, shard) for i in shard.layers(config.num_layers)]
        self._rope, self._local_rope = (
            Rotary(rope, config.head_dim, config.max_positions, weights.dtype, weights.device)
            for rope in (config.rope, config.local_rope)
        )

    def _layer(self, weights: Weights, i: int, shard: Shard) -> _Layer:
        config, name = self.config, f"model.layers.{i}"
        attention = Attention(
            weights,
            f"{name}.self_attn",
            f"layers.{i}.attn",
            config,
            shard,
            qkv_bias=config.bias,
            output_bias=config.bias,
            qk_norm=True,
            qk_norm_offset=1.0,
            scale=config.attention_scale,
        )
        return _Layer(
            norms=tuple(_one_more(weights, f"{name}.{norm}") for norm in NORMS),
            attention=attention,
            mlp=GatedMlp(weights, f"{name}.mlp", config.intermediate, shard, activation="gelu_tanh"),
            local=config.windows[i] is not None,
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns embeddings [tokens, hidden] (base.Network)."""
        return self._ends.embed(token_ids) * self._embedding_scale

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the hidden states after this stage (base.Network)."""
        full, local = self._rope(batch.positions), self._local_rope(batch.positions)
        if self._first:
            x = self.embed(x)
        for layer in self._layers:
            before, after, before_mlp, after_mlp = layer.norms
            mixed = layer.attention(self._normed(x, before), batch, local if layer.local else full)
            x = x + self._normed(mixed, after)
            x = x + self._normed(layer.mlp(self._normed(x, before_mlp)), after_mlp)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [rows, vocab_size] in float32 (base.Network)."""
        assert self._norm is not None, "only the last stage has a head"
        logits = self._ends.project(self._normed(hidden, self._norm))
        cap = self.config.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Computed in float32, weight included, so that one plus a small number is not rounded to the model's dtype.
        return functional.rms_norm(x.float(), weight.shape, weight, self.config.norm_eps).to(x.dtype)


def _one_more(weights: Weights, name: str) -> torch.Tensor:
    return weights.take(f"{name}.weight", dtype=torch.float32) + 1.0
