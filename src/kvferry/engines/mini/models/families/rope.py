"""Rotary position embeddings: cosine and sine of positions, as transformers computes them."""

import math

import torch

from kvferry.engines.mini.models.config import Rope

__all__ = ["Rotary", "rope_tables", "rotate", "yarn_scale"]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [tokens, heads, dim] by the tables [tokens, 1, dim] of a Rotary."""
    # Elements i and i + dim / 2 are a pair: roll aligns each with its partner; the sign is in `sin`.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Rotary:
    """Computes the tables of some positions.

    Does so for each step, because tables for all positions of a long context would be hundreds of megabytes.
    """

    def __init__(self, rope: Rope, dim: int, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        frequency, self._scale = _frequencies(rope, dim, max_positions)
        self._frequency = torch.cat([frequency, frequency]).to(device)
        # The first half subtracts its partner times the sine, the second half adds it.
        self._sine_scale = torch.cat([-torch.ones(dim // 2), torch.ones(dim // 2)]).to(device) * self._scale
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosine and signed sine, each [tokens, 1, dim], computed in float32 as transformers does."""
        angle = positions[:, None, None].float() * self._frequency
        return (angle.cos() * self._scale).to(self._dtype), (angle.sin() * self._sine_scale).to(self._dtype)


def rope_tables(
    rope: Rope, dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tables of all positions, [max_positions, dim] each, for drafters, whose contexts are short."""
    cos, sin = Rotary(rope, dim, max_positions, dtype, device)(torch.arange(max_positions, device=device))
    return cos.squeeze(1), sin.squeeze(1)


def _frequencies(rope: Rope, dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """Returns inverse frequencies [dim / 2], and the factor for cosine and sine."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    factor = float(rope.options.get("factor", 1.0))
    if rope.kind == "linear":
        return plain / factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope, factor), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, dim, max_positions)
    return plain, 1.0


def _llama3(plain: torch.Tensor, rope: Rope, factor: float) -> torch.Tensor:
    """Divides low frequencies by `factor`, keeps high ones, and blends those between (Llama 3.1)."""
    low, high = float(rope.options["low_freq_factor"]), float(rope.options["high_freq_factor"])
    context = float(rope.options["original_max_position_embeddings"])
    wave = 2 * math.pi / plain
    smooth = (context / wave - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    slowed = torch.where(wave > context / low, plain / factor, plain)
    return torch.where((wave >= context / high) & (wave <= context / low), blended, slowed)


def _yarn(plain: torch.Tensor, rope: Rope, dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolates low frequencies, extrapolates high ones, with a ramp between."""
    options = rope.options
    context = float(options["original_max_position_embeddings"])
    factor = float(options.get("factor") or max_positions / context)

    def dimension(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(float(options.get("beta_fast") or 32)), dimension(float(options.get("beta_slow") or 1))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    scale = options.get("attention_factor")
    if scale is None:
        scale = _attention_scale(factor, float(options.get("mscale") or 0), float(options.get("mscale_all_dim") or 0))
    return plain / factor * ramp + plain * (1 - ramp), float(scale)


def _attention_scale(factor: float, mscale: float, mscale_all: float) -> float:
    return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all) if mscale and mscale_all else yarn_scale(factor)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Returns the factor by which YaRN scales queries and keys if positions are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
