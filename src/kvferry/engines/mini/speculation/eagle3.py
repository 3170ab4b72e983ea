"""EAGLE-3 heads (arXiv 2503.01840) in the format of the `speculators` package.

A head is one layer whose attention reads the last token's embedding beside the hidden state. For the first draft the
hidden state comes from three layers of the target (`fc`), for deeper drafts from the head's own output. The head has a
smaller vocabulary: draft id `i` stands for the target's token id `i + d2t[i]`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from kvferry.engines.mini.models.config import ModelConfig, common_entries
from kvferry.engines.mini.models.families.base import Batch, Weights
from kvferry.engines.mini.models.families.layers import GatedMlp
from kvferry.engines.mini.models.families.llama import Attention, LlamaConfig
from kvferry.engines.mini.models.families.rope import rope_tables
from kvferry.engines.mini.models.parallel import Shard
from kvferry.errors import ConfigError

__all__ = ["Eagle3", "Eagle3Config", "expected_tensors", "read_eagle3"]

EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(LlamaConfig):
    """The config of a head. `vocab_size` is the target's."""

    draft_vocab: int
    aux_layers: tuple[int, ...]
    """The head reads the inputs of these layers of the target: hidden states after that many layers."""
    norm_before_residual: bool


def read_eagle3(raw: dict[str, Any], target: ModelConfig) -> Eagle3Config:
    """Reads config.json of a speculators checkpoint.

    Raises KeyError, TypeError and ValueError as families.base.Family.read does, and ConfigError for a head that was
    made for another target.
    """
    if raw.get("speculators_model_type") != "eagle3":
        raise ValueError(f"speculators_model_type is {raw.get('speculators_model_type')!r}, not 'eagle3'")
    layer = {**raw["transformer_layer_config"], "architectures": ["Eagle3"]}
    common = common_entries(layer)
    if common["num_layers"] != 1:
        raise ValueError(f"the head has {common['num_layers']} layers, and an EAGLE-3 head has one")
    if common["hidden"] != target.hidden:
        raise ConfigError(
            f"the head's hidden_size is {common['hidden']}, the target's {target.hidden}. Use a head that was trained "
            "for this model."
        )
    count = target.num_layers
    aux = tuple(map(int, raw.get("eagle_aux_hidden_state_layer_ids") or (2, count // 2, count - 3)))
    if not all(0 <= i <= count for i in aux):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids {aux} are not layers of a target with {count}")
    bias = bool(layer.get("attention_bias", False))
    return Eagle3Config(
        **{**common, "vocab_size": target.vocab_size},
        windows=(None,),
        intermediate=int(layer["intermediate_size"]),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(layer.get("mlp_bias", False)),
        qk_norm=False,
        draft_vocab=int(raw["draft_vocab_size"]),
        aux_layers=aux,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
    )


def expected_tensors(config: Eagle3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of every tensor that the head must have; an embedding of its own is optional."""
    hidden, inner = config.hidden, config.intermediate
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "fc.weight", (hidden, len(config.aux_layers) * hidden)
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        yield f"layers.0.{norm}.weight", (hidden,)
    yield "layers.0.self_attn.q_proj.weight", (query, 2 * hidden)
    yield "layers.0.self_attn.k_proj.weight", (key, 2 * hidden)
    yield "layers.0.self_attn.v_proj.weight", (key, 2 * hidden)
    yield "layers.0.self_attn.o_proj.weight", (hidden, query)
    yield "layers.0.mlp.gate_proj.weight", (inner, hidden)
    yield "layers.0.mlp.up_proj.weight", (inner, hidden)
    yield "layers.0.mlp.down_proj.weight", (hidden, inner)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (config.draft_vocab, hidden)
    yield "d2t", (config.draft_vocab,)


class Eagle3:
    """An EAGLE-3 head. Implements chain.Module."""

    def __init__(self, config: Eagle3Config, weights: Weights, shard: Shard, target: Weights) -> None:
        """`target` provides the embedding if the head has none."""
        self._width, self._eps = (config.hidden,), config.norm_eps
        self._norm_before_residual = config.norm_before_residual
        own = weights.has(EMBEDDING)
        self._embedding = weights.take(EMBEDDING) if own else target.take(f"model.{EMBEDDING}")
        self._fc = weights.linear("fc")
        self._hidden_norm = weights.take("layers.0.hidden_norm.weight")
        self._input_norm = weights.take("layers.0.input_layernorm.weight")
        bias = config.qkv_bias
        self._attention = Attention(
            weights,
            "layers.0.self_attn",
            "eagle.layers.0.attn",
            config,
            replace(shard, pp_rank=0, pp_size=1),
            qkv_bias=bias,
            output_bias=config.output_bias,
        )
        self._mlp_norm = weights.take("layers.0.post_attention_layernorm.weight")
        self._mlp = GatedMlp(weights, "layers.0.mlp", config.intermediate, shard, bias=config.mlp_bias)
        self._norm = weights.take("norm.weight")
        self._head = weights.linear("lm_head")
        offsets = weights.take("d2t", dtype=torch.int64)
        self._ids = offsets + torch.arange(len(offsets), device=offsets.device)
        bad = self._ids[(self._ids < 0) | (self._ids >= config.vocab_size)]
        if len(bad):
            raise ConfigError(
                f"{len(bad)} draft ids of the EAGLE-3 head stand for tokens (d2t: {int(bad[0])}) that the target, with "
                f"{config.vocab_size}, does not have. Copy the head again, or take one that was made for this target."
            )
        self._vocab_size = config.vocab_size
        self._table = rope_tables(config.rope, config.head_dim, config.max_positions, weights.dtype, weights.device)

    def lift(self, hidden: torch.Tensor) -> torch.Tensor:
        """Combines the hidden states of the auxiliary layers, [rows, layers * hidden], into one: [rows, hidden]."""
        return self._fc(hidden)

    def run(self, tokens: torch.Tensor, before: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Implements chain.Module."""
        width, eps = self._width, self._eps
        embedded = functional.rms_norm(functional.embedding(tokens, self._embedding), width, self._input_norm, eps)
        normed = functional.rms_norm(before, width, self._hidden_norm, eps)
        residual = normed if self._norm_before_residual else before
        cos, sin = (part[batch.positions].unsqueeze(1) for part in self._table)
        x = self._attention.plus(torch.cat([embedded, normed], dim=-1), residual, batch, (cos, sin))
        return self._mlp.plus(functional.rms_norm(x, width, self._mlp_norm, eps), x)

    def choose(self, out: torch.Tensor) -> torch.Tensor:
        """Implements chain.Module."""
        return self._ids[self._own_logits(out).argmax(dim=-1)]

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Implements chain.Module."""
        own = self._own_logits(out)
        return own.new_full((len(out), self._vocab_size), float("-inf")).index_copy_(1, self._ids, own)

    def _own_logits(self, out: torch.Tensor) -> torch.Tensor:
        return self._head(functional.rms_norm(out, self._width, self._norm, self._eps))
