"""The network of the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3. One pass over a flat batch of tokens.

The batch is one long row of tokens of several requests, decoding ones first (a token each), then pieces of prompts.
Everything but attention treats all tokens alike. Attention reads each request's past from the paged cache.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvferry.engines.mini.attention import AttentionPlan
from kvferry.engines.mini.cache import KVCache
from kvferry.engines.mini.linear import Linear
from kvferry.engines.mini.models import ModelConfig, Rope

__all__ = ["LayerWeights", "Llama"]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Query, key and value are one matrix."""

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    """[query heads + kv heads, head_dim], or None."""
    output: Linear
    mlp_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


class Llama:
    """Weights and the forward pass. Holds no state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        layers: list[LayerWeights],
        norm: torch.Tensor,
        head: Linear,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self._rope = _rope_tables(config, embedding.dtype, embedding.device)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, cache: KVCache, plan: AttentionPlan) -> torch.Tensor:
        """Hidden states [num_tokens, hidden] before the last norm; stores the tokens' keys and values in the cache."""
        eps, width = self.config.norm_eps, (self.config.hidden,)
        cos, sin = (table[plan.positions].unsqueeze(1) for table in self._rope)
        x = functional.embedding(token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = functional.rms_norm(x, width, layer.attention_norm, eps)
            x = layer.output.plus(self._attention(index, layer, normed, cos, sin, cache, plan), x)
            normed = functional.rms_norm(x, width, layer.mlp_norm, eps)
            x = layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), x)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] in float32, of some rows of what `forward` returned."""
        normed = functional.rms_norm(hidden, (self.config.hidden,), self.norm, self.config.norm_eps)
        return self.head(normed).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        config = self.config
        num_turned = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(x).view(len(x), -1, config.head_dim)
        turned = qkv[:, :num_turned]  # queries and keys
        if layer.qk_norm is not None:
            turned = functional.rms_norm(turned, (config.head_dim,), None, config.norm_eps) * layer.qk_norm
        # The second half turns the first: roll brings the other half of each pair; the sign is in `sin`.
        turned = torch.addcmul(turned * cos, turned.roll(config.head_dim // 2, -1), sin)
        cache.store(index, turned[:, config.num_heads :], qkv[:, num_turned:], plan.slots)
        return plan.attend(index, turned[:, : config.num_heads], cache, config.windows[index])


def _rope_tables(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine, [max_positions, head_dim], computed in float32 as transformers does."""
    frequency, scale = _frequencies(config.rope, config.head_dim, config.max_positions)
    angle = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), frequency)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return (
        torch.cat([cos, cos], dim=-1).to(device=device, dtype=dtype),
        torch.cat([-sin, sin], dim=-1).to(device=device, dtype=dtype),
    )


def _frequencies(rope: Rope, head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2], and what cosine and sine are multiplied with."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    factor = float(rope.options.get("factor", 1.0))
    if rope.kind == "linear":
        return plain / factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope, factor), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim, max_positions)
    return plain, 1.0


def _llama3(plain: torch.Tensor, rope: Rope, factor: float) -> torch.Tensor:
    """Long waves are slowed down by `factor`, short ones kept, those between are blended. (Llama 3.1)"""
    low, high = float(rope.options["low_freq_factor"]), float(rope.options["high_freq_factor"])
    context = float(rope.options["original_max_position_embeddings"])
    wave = 2 * math.pi / plain
    smooth = (context / wave - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    slowed = torch.where(wave > context / low, plain / factor, plain)
    return torch.where((wave >= context / high) & (wave <= context / low), blended, slowed)


def _yarn(plain: torch.Tensor, rope: Rope, head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate long waves, extrapolate short ones, with a ramp between."""
    options = rope.options
    context = float(options["original_max_position_embeddings"])
    factor = float(options.get("factor") or max_positions / context)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(float(options.get("beta_fast") or 32)), dimension(float(options.get("beta_slow") or 1))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    scale = options.get("attention_factor")
    if scale is None:
        scale = _yarn_scale(factor, float(options.get("mscale") or 0), float(options.get("mscale_all_dim") or 0))
    return plain / factor * ramp + plain * (1 - ramp), float(scale)


def _yarn_scale(factor: float, mscale: float, mscale_all: float) -> float:
    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return of(mscale) / of(mscale_all) if mscale and mscale_all else of(1.0)
