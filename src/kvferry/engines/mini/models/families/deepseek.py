"""DeepSeek-V2 and V3: multi-head latent attention, and a mixture of experts after the first layers.

The cache keeps one short latent per token for all heads, and a rotary part beside it; the keys and values of each head
are matrices times the latent (arXiv 2405.04434, section 2.1). Here those matrices are applied to queries and results
instead, so the cache is read as it is: one key for all heads. Every tensor-parallel rank keeps the same latent; the
heads are split.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kvferry.engines.mini.models.cache_spec import LayerCache
from kvferry.engines.mini.models.config import ModelConfig, Rope, common_entries
from kvferry.engines.mini.models.families.base import Batch, Weights
from kvferry.engines.mini.models.families.experts import Experts
from kvferry.engines.mini.models.families.layers import Ends, GatedMlp, add_output, add_partial, rows_of, split
from kvferry.engines.mini.models.families.rope import Rotary, rotate, yarn_scale
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.linear import Linear
from kvferry.engines.mini.models.parallel import Shard

__all__ = ["DeepSeek", "DeepSeekConfig", "LatentAttention", "build", "caches", "expected_tensors", "read"]

LATENT_EPS = 1e-6
"""The epsilon of the norms of the latents; config.json does not contain it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekConfig(ModelConfig):
    """The record of DeepSeek-V2 and V3. `head_dim` is the width of latent and rotary part; `num_kv_heads` is 1."""

    intermediate: int
    query_rank: int | None
    latent: int
    plain_dim: int
    """The number of elements of a head's query and key that are not rotated."""
    rotary_dim: int
    value_dim: int
    interleaved: bool
    """Whether the two elements of a rotated pair are adjacent in the checkpoint."""
    attention_scale: float
    bias: bool
    num_dense: int
    """How many of the first layers have no experts."""
    num_experts: int
    num_selected: int
    num_shared: int
    expert_inner: int
    num_groups: int
    num_groups_selected: int
    """How many of the groups a token's experts come from; equal to `num_groups`: from all of them."""
    sigmoid_gate: bool
    """V3's router: sigmoid, with a bias that counts for the selection only; False: V2's softmax."""
    norm_weights: bool
    weights_scale: float


def read(raw: dict[str, Any]) -> DeepSeekConfig:
    """Reads config.json into the record of this family (base.Family)."""
    v3 = raw["architectures"][0] == "DeepseekV3ForCausalLM"
    method = raw.get("topk_method") or ("noaux_tc" if v3 else "greedy")
    if method not in (("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")):
        raise ValueError(f"topk_method={method!r} is not supported")
    if int(raw.get("moe_layer_freq") or 1) != 1:
        raise ValueError(f"moe_layer_freq={raw['moe_layer_freq']!r} is not supported: only 1")
    latent, rotary, plain = (int(raw[name]) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    common = common_entries(raw) | {"num_kv_heads": 1, "head_dim": latent + rotary}
    grouped = v3 or method == "group_limited_greedy"
    groups = int(raw.get("n_group") or 1) if grouped else 1
    config = DeepSeekConfig(
        **common,
        windows=(None,) * common["num_layers"],
        intermediate=int(raw["intermediate_size"]),
        query_rank=int(raw["q_lora_rank"]) if raw.get("q_lora_rank") else None,
        latent=latent,
        plain_dim=plain,
        rotary_dim=rotary,
        value_dim=int(raw["v_head_dim"]),
        interleaved=bool(raw.get("rope_interleave", True)),
        attention_scale=_scale(common["rope"], plain + rotary),
        bias=bool(raw.get("attention_bias", False)),
        num_dense=int(raw.get("first_k_dense_replace", 3 if v3 else 0)),
        num_experts=int(raw["n_routed_experts"]),
        num_selected=int(raw["num_experts_per_tok"]),
        num_shared=int(raw.get("n_shared_experts") or 0),
        expert_inner=int(raw["moe_intermediate_size"]),
        num_groups=groups,
        num_groups_selected=int(raw.get("topk_group") or 1) if grouped else 1,
        sigmoid_gate=v3,
        norm_weights=v3 and bool(raw.get("norm_topk_prob", True)),
        weights_scale=float(raw.get("routed_scaling_factor", 1.0)),
    )
    if config.num_experts % groups or config.num_groups_selected > groups:
        raise ValueError(
            f"n_group={groups} does not fit n_routed_experts={config.num_experts}, topk_group={raw.get('topk_group')!r}"
        )
    if config.num_selected > config.num_experts // groups * config.num_groups_selected:
        raise ValueError(f"num_experts_per_tok={config.num_selected} is more than topk_group holds")
    return config


def _scale(rope: Rope, dim: int) -> float:
    """Returns the factor for the scores. With `mscale_all_dim` it has YaRN's scale twice: for queries and for keys."""
    whole = float(rope.options.get("mscale_all_dim") or 0)
    longer = yarn_scale(float(rope.options["factor"]), whole) if rope.kind != "default" and whole else 1.0
    return float(dim**-0.5) * longer * longer


def expected_tensors(config: DeepSeekConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of every tensor of a checkpoint (base.Family)."""
    hidden = config.hidden
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield from _attention_tensors(config, f"{layer}.self_attn")
        if i < config.num_dense:
            yield from _mlp_tensors(f"{layer}.mlp", hidden, config.intermediate)
            continue
        yield f"{layer}.mlp.gate.weight", (config.num_experts, hidden)
        if config.sigmoid_gate:
            yield f"{layer}.mlp.gate.e_score_correction_bias", (config.num_experts,)
        for expert in range(config.num_experts):
            yield from _mlp_tensors(f"{layer}.mlp.experts.{expert}", hidden, config.expert_inner)
        if config.num_shared:
            yield from _mlp_tensors(f"{layer}.mlp.shared_experts", hidden, config.expert_inner * config.num_shared)


def _attention_tensors(config: DeepSeekConfig, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, rank = config.hidden, config.num_heads, config.query_rank
    query = heads * (config.plain_dim + config.rotary_dim)
    if rank is None:
        yield f"{name}.q_proj.weight", (query, hidden)
    else:
        yield f"{name}.q_a_proj.weight", (rank, hidden)
        yield f"{name}.q_a_layernorm.weight", (rank,)
        yield f"{name}.q_b_proj.weight", (query, rank)
    yield f"{name}.kv_a_proj_with_mqa.weight", (config.head_dim, hidden)
    yield f"{name}.kv_a_layernorm.weight", (config.latent,)
    yield f"{name}.kv_b_proj.weight", (heads * (config.plain_dim + config.value_dim), config.latent)
    yield f"{name}.o_proj.weight", (hidden, heads * config.value_dim)
    if config.bias:
        if rank is not None:
            yield f"{name}.q_a_proj.bias", (rank,)
        yield f"{name}.kv_a_proj_with_mqa.bias", (config.head_dim,)
        yield f"{name}.o_proj.bias", (hidden,)


def _mlp_tensors(name: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (inner, hidden)
    yield f"{name}.up_proj.weight", (inner, hidden)
    yield f"{name}.down_proj.weight", (hidden, inner)


def caches(config: DeepSeekConfig, shard: Shard, kv: KvFormat) -> tuple[LayerCache, ...]:
    """Returns what the layers of one rank keep in the cache (base.Family)."""
    return tuple(kv.latent(f"layers.{i}.attn", config.head_dim) for i in shard.layers(config.num_layers))


def build(config: DeepSeekConfig, weights: Weights, shard: Shard) -> "DeepSeek":
    """Builds the network of one rank (base.Family)."""
    return DeepSeek(config, weights, shard)


class LatentAttention:
    """The attention of one layer."""

    def __init__(self, config: DeepSeekConfig, weights: Weights, name: str, layer: str, shard: Shard) -> None:
        self._config, self._layer, self._shard = config, layer, shard
        heads = split(config.num_heads, shard)
        self._num_heads = len(heads)
        plain, value, latent = config.plain_dim, config.value_dim, config.latent
        rows = rows_of(heads, plain + config.rotary_dim)
        self._down: Linear | None = None
        if config.query_rank is not None:
            self._down = weights.linear(f"{name}.q_a_proj", bias=config.bias)
            self._query_norm = weights.take(f"{name}.q_a_layernorm.weight")
        # The two elements of a rotated pair are moved half a head apart, once here instead of in each step.
        query = weights.take(f"{name}.q_proj.weight" if self._down is None else f"{name}.q_b_proj.weight", rows=rows)
        by_head = query.view(len(heads), plain + config.rotary_dim, -1)
        self._query = Linear(torch.cat([by_head[:, :plain], self._separated(by_head[:, plain:], 1)], 1).flatten(0, 1))
        made = weights.take(f"{name}.kv_a_proj_with_mqa.weight")
        bias = weights.take(f"{name}.kv_a_proj_with_mqa.bias") if config.bias else None
        self._latent = Linear(
            torch.cat([made[:latent], self._separated(made[latent:], 0)]),
            None if bias is None else torch.cat([bias[:latent], self._separated(bias[latent:], 0)]),
        )
        self._latent_norm = weights.take(f"{name}.kv_a_layernorm.weight")
        up = weights.take(f"{name}.kv_b_proj.weight", rows=rows_of(heads, plain + value))
        up = up.view(len(heads), plain + value, latent)
        self._keys = up[:, :plain].contiguous()
        """The matrices that make keys of a latent: [heads, plain_dim, latent]."""
        self._values = up[:, plain:].transpose(1, 2).contiguous()
        """The matrices that make values of a latent: [heads, latent, value_dim]."""
        self._output = weights.linear(
            f"{name}.o_proj", cols=rows_of(heads, value), bias=config.bias and shard.tp_rank == 0
        )

    def _separated(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if not self._config.interleaved:
            return x
        order = torch.arange(x.shape[dim], device=x.device).view(-1, 2).T.flatten()
        return x.index_select(dim, order)

    def plus(
        self, x: torch.Tensor, residual: torch.Tensor, batch: Batch, table: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Returns residual + attention(x)."""
        config, num_tokens = self._config, len(x)
        low = x
        if self._down is not None:
            low = functional.rms_norm(self._down(x), self._query_norm.shape, self._query_norm, LATENT_EPS)
        query = self._query(low).view(num_tokens, self._num_heads, -1)
        plain, rotary = query[..., : config.plain_dim], query[..., config.plain_dim :]
        made = self._latent(x)
        latent = functional.rms_norm(made[:, : config.latent], self._latent_norm.shape, self._latent_norm, LATENT_EPS)
        rotated = rotate(torch.cat([rotary, made[:, None, config.latent :]], 1), *table)
        absorbed = torch.bmm(plain.transpose(0, 1), self._keys).transpose(0, 1)
        mixed = batch.attend_latent(
            self._layer,
            torch.cat([absorbed, rotated[:, :-1]], -1),
            torch.cat([latent, rotated[:, -1]], -1),
            value_dim=config.latent,
            scale=config.attention_scale,
        )
        values = torch.bmm(mixed.transpose(0, 1), self._values).transpose(0, 1)
        return add_output(self._output, values.reshape(num_tokens, -1), residual, self._shard)


class _Mixture:
    """The experts with their router, and the shared experts that every token goes through."""

    def __init__(self, config: DeepSeekConfig, weights: Weights, name: str, shard: Shard) -> None:
        self._config, self._shard = config, shard
        self._gate = weights.take(f"{name}.gate.weight", dtype=torch.float32)
        self._bias: torch.Tensor | None = None
        if config.sigmoid_gate:
            self._bias = weights.take(f"{name}.gate.e_score_correction_bias", dtype=torch.float32)
        self._experts = Experts(weights, f"{name}.experts", config.num_experts, config.expert_inner, shard)
        self._shared: GatedMlp | None = None
        if config.num_shared:
            self._shared = GatedMlp(weights, f"{name}.shared_experts", config.expert_inner * config.num_shared, shard)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns residual + mixture(x)."""
        partial = self._experts.partial(x, *self._select(x))
        if self._shared is not None:
            partial = partial + self._shared.partial(x)
        return add_partial(partial, residual, self._shard)

    def _select(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the selected experts and their weights, [tokens, num_selected] each."""
        config = self._config
        logits = functional.linear(x.float(), self._gate)
        scores = logits.sigmoid() if config.sigmoid_gate else logits.softmax(-1)
        ranking = scores if self._bias is None else scores + self._bias
        if config.num_groups_selected < config.num_groups:
            groups = ranking.view(len(x), config.num_groups, -1)
            # V3 ranks groups by the sum of their two best experts, V2 by the best one.
            best = groups.topk(2, -1).values.sum(-1) if config.sigmoid_gate else groups.amax(-1)
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept.scatter_(1, best.topk(config.num_groups_selected, -1).indices, True)
            ranking = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
        selected = ranking.topk(config.num_selected, -1).indices
        expert_weights = scores.gather(1, selected)
        if config.norm_weights:
            expert_weights = expert_weights / (expert_weights.sum(-1, keepdim=True) + 1e-20)
        return selected, expert_weights * config.weights_scale


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    attention: LatentAttention
    mlp_norm: torch.Tensor
    mlp: GatedMlp | _Mixture


class DeepSeek:
    """Implements base.Network."""

    def __init__(self, config: DeepSeekConfig, weights: Weights, shard: Shard) -> None:
        self.config = config
        self.dtype = weights.dtype
        self._ends = Ends(weights, config, shard)
        self._first = shard.is_first
        self._layers = [self._layer(weights, i, shard) for i in shard.layers(config.num_layers)]
        self._rope = Rotary(config.rope, config.rotary_dim, config.max_positions, weights.dtype, weights.device)
        self.embed, self.logits = self._ends.embed, self._ends.logits

    def _layer(self, weights: Weights, i: int, shard: Shard) -> _Layer:
        config, name = self.config, f"model.layers.{i}"
        return _Layer(
            attention_norm=weights.take(f"{name}.input_layernorm.weight"),
            attention=LatentAttention(config, weights, f"{name}.self_attn", f"layers.{i}.attn", shard),
            mlp_norm=weights.take(f"{name}.post_attention_layernorm.weight"),
            mlp=GatedMlp(weights, f"{name}.mlp", config.intermediate, shard)
            if i < config.num_dense
            else _Mixture(config, weights, f"{name}.mlp", shard),
        )

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the hidden states after this stage (base.Network)."""
        eps, width = self.config.norm_eps, (self.config.hidden,)
        table = self._rope(batch.positions)
        if self._first:
            x = self.embed(x)
        for layer in self._layers:
            x = layer.attention.plus(functional.rms_norm(x, width, layer.attention_norm, eps), x, batch, table)
            x = layer.mlp.plus(functional.rms_norm(x, width, layer.mlp_norm, eps), x)
        return x
