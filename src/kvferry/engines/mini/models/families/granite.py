"""Granite 4 hybrids (GraniteMoeHybrid): layers of Mamba-2 (arXiv 2405.21060), and a few of attention.

A Mamba-2 layer keeps one state per request instead of one key and one value per token: the last inputs of its
convolution, and a matrix for each head. Tensor-parallel ranks divide the heads, and with them the groups of heads that
share B and C; groups are replicated if there are more ranks than groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kvferry.engines.mini.models.cache_spec import CachePart, LayerCache
from kvferry.engines.mini.models.config import ModelConfig, common_entries
from kvferry.engines.mini.models.families.base import Batch, Weights
from kvferry.engines.mini.models.families.layers import Ends, output, rows_of, split, split_heads
from kvferry.engines.mini.models.families.llama import Attention
from kvferry.engines.mini.models.families.mamba2 import convolve, convolve_steps, scan, scan_steps
from kvferry.engines.mini.models.families.rope import Rotary
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.parallel import Shard
from kvferry.errors import ConfigError
from kvferry.layout.builders import Heads, head_range, mamba2_parts
from kvferry.layout.description import CacheKind

__all__ = ["Granite", "GraniteConfig", "Mamba2", "Mamba2Shape", "build", "caches", "expected_tensors", "read"]

STATE_PARTS = ("conv.x", "conv.b", "conv.c", "ssm")


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """The sizes of a Mamba-2 layer."""

    heads: int
    head_dim: int
    groups: int
    """The number of groups of heads; the heads of a group share B and C."""
    state: int
    """The number of columns of B, of C, and of each head's matrix."""
    taps: int
    """The number of inputs of the convolution."""

    @property
    def inner(self) -> int:
        """The number of channels of all heads."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """The number of channels of B, and of C."""
        return self.groups * self.state

    def parts(self, shard: Shard) -> tuple[CachePart, ...]:
        """Returns what a layer keeps per request on one rank. It is float32, whatever dtype the model computes in."""
        made = mamba2_parts(
            heads=self.heads,
            head_dim=self.head_dim,
            groups=self.groups,
            state=self.state,
            conv_width=self.taps,
            tp_rank=shard.tp_rank,
            tp_size=shard.tp_size,
        )
        return tuple(CachePart(part.part, torch.float32, "fp32", part.axes) for part in made)

    def check(self, shard: Shard) -> None:
        """Raises ConfigError if heads and groups cannot be divided among the ranks together."""
        tp = shard.tp_size
        if self.heads % tp or (self.groups % tp and tp % self.groups):
            divisors = [n for n in range(1, self.heads + 1) if not self.heads % n]
            fits = [n for n in divisors if not self.groups % n or not n % self.groups]
            raise ConfigError(
                f"tp={tp!r} does not divide the model's {self.heads} Mamba heads in {self.groups} groups. "
                f"Use --tp with one of {', '.join(map(str, fits))}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(ModelConfig):
    """The record of a Granite 4 hybrid without experts."""

    kinds: tuple[str, ...]
    """The kind of each layer: `full` or `mamba2`."""
    intermediate: int
    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_divisor: float
    rotary: bool
    """Whether positions rotate queries and keys."""
    mamba: Mamba2Shape
    conv_bias: bool
    proj_bias: bool
    attention_bias: bool

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer (ModelConfig)."""
        return self.kinds


def read(raw: dict[str, Any]) -> GraniteConfig:
    """Reads config.json into the record of this family (base.Family)."""
    common = common_entries(raw)
    names = raw.get("layer_types") or raw["layers_block_type"]
    kinds = tuple("full" if name in ("attention", "full_attention") else "mamba2" for name in names)
    if len(kinds) != common["num_layers"]:
        raise ValueError(f"layer_types has {len(kinds)} entries for {common['num_layers']} layers")
    if raw.get("num_local_experts"):
        raise ValueError(f"num_local_experts={raw['num_local_experts']!r}: hybrids with experts are not supported")
    heads, inner = int(raw["mamba_n_heads"]), int(raw["mamba_expand"]) * common["hidden"]
    return GraniteConfig(
        **common,
        windows=(None,) * common["num_layers"],
        kinds=kinds,
        intermediate=int(raw["shared_intermediate_size"]),
        embedding_multiplier=float(raw.get("embedding_multiplier", 1)),
        residual_multiplier=float(raw.get("residual_multiplier", 1)),
        attention_multiplier=float(raw.get("attention_multiplier", 1)),
        logits_divisor=float(raw.get("logits_scaling", 1)),
        rotary=raw.get("position_embedding_type") == "rope",
        mamba=Mamba2Shape(
            heads=heads,
            head_dim=inner // heads,
            groups=int(raw["mamba_n_groups"]),
            state=int(raw["mamba_d_state"]),
            taps=int(raw["mamba_d_conv"]),
        ),
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        proj_bias=bool(raw.get("mamba_proj_bias", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
    )


def expected_tensors(config: GraniteConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of every tensor of a checkpoint (base.Family)."""
    hidden = config.hidden
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for i, kind in enumerate(config.kinds):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.shared_mlp.input_linear.weight", (2 * config.intermediate, hidden)
        yield f"{layer}.shared_mlp.output_linear.weight", (hidden, config.intermediate)
        yield from _attention_tensors(config, layer) if kind == "full" else _mamba_tensors(config, layer)


def _attention_tensors(config: GraniteConfig, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for part, rows, cols in (
        ("q_proj", query, config.hidden),
        ("k_proj", key, config.hidden),
        ("v_proj", key, config.hidden),
        ("o_proj", config.hidden, query),
    ):
        yield f"{layer}.self_attn.{part}.weight", (rows, cols)
        if config.attention_bias:
            yield f"{layer}.self_attn.{part}.bias", (rows,)


def _mamba_tensors(config: GraniteConfig, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape, hidden = config.mamba, config.hidden
    channels = shape.inner + 2 * shape.shared
    for part in ("A_log", "D", "dt_bias"):
        yield f"{layer}.mamba.{part}", (shape.heads,)
    yield f"{layer}.mamba.conv1d.weight", (channels, 1, shape.taps)
    yield f"{layer}.mamba.norm.weight", (shape.inner,)
    yield f"{layer}.mamba.in_proj.weight", (shape.inner + channels + shape.heads, hidden)
    yield f"{layer}.mamba.out_proj.weight", (hidden, shape.inner)
    if config.conv_bias:
        yield f"{layer}.mamba.conv1d.bias", (channels,)
    if config.proj_bias:
        yield f"{layer}.mamba.in_proj.bias", (shape.inner + channels + shape.heads,)
        yield f"{layer}.mamba.out_proj.bias", (hidden,)


def caches(config: GraniteConfig, shard: Shard, kv: KvFormat) -> tuple[LayerCache, ...]:
    """Returns what the layers of one rank keep in the cache (base.Family)."""
    held = split_heads(config.num_heads, config.num_kv_heads, shard).kv
    heads = (held.extent, held.start, held.stop)
    return tuple(
        kv.attention(f"layers.{i}.attn", heads, config.head_dim, None)
        if config.kinds[i] == "full"
        else LayerCache(f"layers.{i}.mamba", CacheKind.STATE, None, config.mamba.parts(shard))
        for i in shard.layers(config.num_layers)
    )


def build(config: GraniteConfig, weights: Weights, shard: Shard) -> "Granite":
    """Builds the network of one rank (base.Family)."""
    config.mamba.check(shard)
    return Granite(config, weights, shard)


class Mamba2:
    """One layer's mixer: projection, convolution, state space scan, gated norm, projection."""

    def __init__(self, weights: Weights, name: str, layer: str, config: GraniteConfig, shard: Shard) -> None:
        shape = self._shape = config.mamba
        self._layer, self._shard, self._eps = layer, shard, config.norm_eps
        heads = head_range(shape.heads, shard.tp_rank, shard.tp_size)
        groups = head_range(shape.groups, shard.tp_rank, shard.tp_size)
        inner = slice(heads.start * shape.head_dim, heads.stop * shape.head_dim)
        # The rows of in_proj are the gate, the sections x, B and C, and one step size per head. The convolution has
        # those of the sections.
        sections = [inner, *(_shifted(groups, shape.state, shape.inner + i * shape.shared) for i in range(2))]
        self._sizes = [part.stop - part.start for part in sections]
        self._input = weights.linear(
            *[f"{name}.in_proj"] * 5,
            rows=[
                inner,
                *(slice(part.start + shape.inner, part.stop + shape.inner) for part in sections),
                _shifted(heads, 1, 2 * shape.inner + 2 * shape.shared),
            ],
            bias=config.proj_bias,
        )
        self._output = weights.linear(f"{name}.out_proj", cols=inner, bias=config.proj_bias and shard.tp_rank == 0)
        self._taps = [weights.take(f"{name}.conv1d.weight", rows=part)[:, 0] for part in sections]
        self._conv_bias = [weights.take(f"{name}.conv1d.bias", rows=p) if config.conv_bias else None for p in sections]
        own = slice(heads.start, heads.stop)
        self._decay = -weights.take(f"{name}.A_log", rows=own, dtype=torch.float32).exp()
        self._skip = weights.take(f"{name}.D", rows=own, dtype=torch.float32)[:, None]
        self._dt_bias = weights.take(f"{name}.dt_bias", rows=own, dtype=torch.float32)
        self._norm = weights.take(f"{name}.norm.weight", rows=inner)
        self._groups = groups
        self._num_heads = len(heads)

    def __call__(
        self, x: torch.Tensor, batch: Batch, table: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Returns the mixed tokens [tokens, hidden], summed over all ranks, and updates the states of the batch.

        `table` is ignored: only the order of the tokens counts here.
        """
        gate, *inputs, dt = torch.split(self._input(x), [self._sizes[0], *self._sizes, self._num_heads], dim=-1)
        dt = functional.softplus(dt.float() + self._dt_bias)
        mixed = torch.empty(len(x), self._num_heads, self._shape.head_dim, dtype=torch.float32, device=x.device)
        sequences = batch.sequences(self._layer)
        states = [batch.state(self._layer, part) for part in STATE_PARTS]
        before = [state[sequences.state_blocks] for state in states]
        after = [state.clone() for state in before]
        if sequences.num_decoding:
            rows = slice(0, sequences.num_decoding)
            mixed[rows], new = self._steps([part[rows] for part in inputs], dt[rows], [s[rows] for s in before])
            for state, moved in zip(after, new, strict=True):
                state[rows] = moved
        for i in range(sequences.num_decoding, len(sequences.starts)):
            rows = slice(sequences.starts[i], sequences.stops[i])
            mixed[rows], new = self._chunk([part[rows] for part in inputs], dt[rows], [s[i] for s in before])
            for state, moved in zip(after, new, strict=True):
                state[i] = moved
        for state, moved in zip(states, after, strict=True):
            state[sequences.state_blocks] = moved
        return output(self._output, self._gated(mixed.flatten(1), gate).to(x.dtype), self._shard)

    def _steps(
        self, inputs: list[torch.Tensor], dt: torch.Tensor, states: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Processes one token of each of some requests."""
        moved = [
            convolve_steps(part, state, taps, bias)
            for part, state, taps, bias in zip(inputs, states[:3], self._taps, self._conv_bias, strict=True)
        ]
        x, b, c = self._by_head([part for part, _ in moved])
        y, ssm = scan_steps(x, dt, self._decay, b, c, states[3])
        return y + self._skip * x, [*(state for _, state in moved), ssm]

    def _chunk(
        self, inputs: list[torch.Tensor], dt: torch.Tensor, states: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Processes several tokens of one request."""
        moved = [
            convolve(part, state, taps, bias)
            for part, state, taps, bias in zip(inputs, states[:3], self._taps, self._conv_bias, strict=True)
        ]
        x, b, c = self._by_head([part for part, _ in moved])
        y, ssm = scan(x, dt, self._decay, b, c, states[3])
        return y + self._skip * x, [*(state for _, state in moved), ssm]

    def _by_head(self, sections: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, b, c = (part.float() for part in sections)
        groups, state = len(self._groups), self._shape.state
        return x.reshape(len(x), -1, self._shape.head_dim), b.reshape(-1, groups, state), c.reshape(-1, groups, state)

    def _gated(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Returns the RMS norm of mixed * silu(gate), over the channels of each group of heads on all ranks."""
        mixed = mixed * functional.silu(gate.float())
        squares = mixed.view(len(mixed), len(self._groups), -1).square().sum(-1)
        if self._shape.groups % self._shard.tp_size:  # ranks that share a group each have a part of its heads
            all_groups = squares.new_zeros(len(mixed), self._shape.groups)
            all_groups[:, self._groups.start : self._groups.stop] = squares
            squares = self._shard.comm.all_reduce(all_groups)[:, self._groups.start : self._groups.stop]
        scale = (squares / (self._shape.inner // self._shape.groups) + self._eps).rsqrt()
        normed = mixed.view(len(mixed), len(self._groups), -1) * scale[..., None]
        return normed.flatten(1).to(self._norm.dtype) * self._norm


def _shifted(part: Heads, unit: int, offset: int) -> slice:
    return slice(part.start * unit + offset, part.stop * unit + offset)


class _Mlp:
    def __init__(self, weights: Weights, name: str, inner: int, shard: Shard) -> None:
        part = rows_of(split(inner, shard))
        self._shard = shard
        self._gate = weights.linear(f"{name}.input_linear", rows=part)
        self._up = weights.linear(f"{name}.input_linear", rows=slice(part.start + inner, part.stop + inner))
        self._down = weights.linear(f"{name}.output_linear", cols=part)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return output(self._down, self._up.times(x, self._gate.activated(x, "silu")), self._shard)


@dataclass(frozen=True, slots=True)
class _Layer:
    mixer_norm: torch.Tensor
    mixer: Attention | Mamba2
    mlp_norm: torch.Tensor
    mlp: _Mlp


class Granite:
    """Implements base.Network."""

    def __init__(self, config: GraniteConfig, weights: Weights, shard: Shard) -> None:
        self.config = config
        self.dtype = weights.dtype
        self._ends = Ends(weights, config, shard)
        self._first = shard.is_first
        self._layers = [self._layer(weights, i, shard) for i in shard.layers(config.num_layers)]
        self._rope = (
            Rotary(config.rope, config.head_dim, config.max_positions, weights.dtype, weights.device)
            if config.rotary
            else None
        )
        self.embed = self._ends.embed

    def _layer(self, weights: Weights, i: int, shard: Shard) -> _Layer:
        config, name = self.config, f"model.layers.{i}"
        attends = config.kinds[i] == "full"
        return _Layer(
            mixer_norm=weights.take(f"{name}.input_layernorm.weight"),
            mixer=Attention(
                weights,
                f"{name}.self_attn",
                f"layers.{i}.attn",
                config,
                shard,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                scale=config.attention_multiplier,
            )
            if attends
            else Mamba2(weights, f"{name}.mamba", f"layers.{i}.mamba", config, shard),
            mlp_norm=weights.take(f"{name}.post_attention_layernorm.weight"),
            mlp=_Mlp(weights, f"{name}.shared_mlp", config.intermediate, shard),
        )

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the hidden states after this stage (base.Network)."""
        eps, width, part = self.config.norm_eps, (self.config.hidden,), self.config.residual_multiplier
        table = None
        if self._rope is not None:
            table = self._rope(batch.positions)
        if self._first:
            x = self.embed(x) * self.config.embedding_multiplier
        for layer in self._layers:
            normed = functional.rms_norm(x, width, layer.mixer_norm, eps)
            x = x + layer.mixer(normed, batch, table) * part
            x = x + layer.mlp(functional.rms_norm(x, width, layer.mlp_norm, eps)) * part
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [rows, vocab_size] in float32 (base.Network)."""
        return self._ends.logits(hidden) / self.config.logits_divisor
