"""How keys and values are stored: as they are, or as 8-bit floats with a scale.

`fp8_e4m3` has one scale for all keys and one for all values of a layer, from the checkpoint (`k_scale` and `v_scale`; 1
without them). Such a scale is part of what the bytes mean, so the name of the encoding contains it. `fp8_e4m3_token`
has a scale for each head of each token, which follows from the largest element; the scales are parts of the same block.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kvferry.engines.mini.models.cache_spec import CachePart, LayerCache
from kvferry.layout.description import CacheKind

__all__ = ["FP8_MAX", "KvFormat"]

FP8_MAX = 448.0
"""The largest value of float8_e4m3fn."""

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8_e4m3"}


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How every attention layer of a model stores its keys and values."""

    dtype: torch.dtype
    per_token: bool = False
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Maps a layer name to the factors for stored keys and values."""

    @property
    def digest(self) -> str | None:
        """A digest of the scales, for the fact `kv.scales`: equal scales have equal digests. None: all scales are 1."""
        scales = {layer: pair for layer, pair in self.scales.items() if pair != (1.0, 1.0)}
        return hashlib.sha256(repr(sorted(scales.items())).encode()).hexdigest()[:16] if scales else None

    def attention(
        self, layer: str, heads: tuple[int, int, int], dim: int, window_tokens: int | None = None
    ) -> LayerCache:
        """Returns what ordinary attention keeps. `heads`: the model's number of KV heads, and the range held here."""
        axes = (("head", *heads), ("dim", dim, 0, dim))
        parts = [self._part(name, axes, scale) for name, scale in zip("kv", self._scales(layer), strict=True)]
        if self.per_token:
            scale_axes = (("head", *heads),)
            parts += [CachePart(f"{name}.scale", torch.float32, "fp32", scale_axes, token_axis=1) for name in "kv"]
        kind = CacheKind.FULL if window_tokens is None else CacheKind.WINDOW
        return LayerCache(layer, kind, window_tokens, tuple(parts))

    def latent(self, layer: str, dim: int) -> LayerCache:
        """Returns what multi-head latent attention keeps, which is the same on every tensor-parallel rank."""
        parts = [self._part("latent", (("dim", dim, 0, dim),), self._scales(layer)[0])]
        if self.per_token:
            parts.append(CachePart("latent.scale", torch.float32, "fp32"))
        return LayerCache(layer, CacheKind.FULL, None, tuple(parts))

    def _scales(self, layer: str) -> tuple[float, float]:
        return self.scales.get(layer, (1.0, 1.0))

    def _part(self, name: str, axes: tuple[tuple[str, int, int, int], ...], scale: float) -> CachePart:
        encoding = NAMES[self.dtype]
        if self.dtype is torch.float8_e4m3fn and not self.per_token and scale != 1.0:
            encoding = f"{encoding}:{scale!r}"
        return CachePart(name, self.dtype, encoding, axes)
