"""One attention layer's part of the cache: stores what a step computed, and reads what was stored.

The blocks of a batch are read by one copy of rows; a row is what one head keeps of one block. 8-bit floats are
converted back to the model's dtype on the way.
"""

from functools import cached_property
from math import prod

import torch

from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.models.cache_spec import CachePart
from kvferry.engines.mini.models.kv_format import FP8_MAX

__all__ = ["LayerPages", "Slots"]

Slots = tuple[torch.Tensor, torch.Tensor]
"""A slot for each token: its block, and its place in the block."""


class LayerPages:
    """One layer's part of every page. Made once for each layer of a cache."""

    def __init__(self, cache: KVCache, layer: str, dtype: torch.dtype) -> None:
        """`dtype` is what keys and values are computed in."""
        self._cache = cache
        self._dtype = dtype
        names = ("latent",) if (layer, "latent") in cache.placement.parts else ("k", "v")
        held = [cache.placement.parts[layer, name] for name in names]
        self.group = held[0][1]
        """The index of the group whose block table the layer uses."""
        self.window = cache.windows[layer]
        self._parts = [part for part, _, _ in held]
        self._views = [cache.view(layer, name) for name in names]
        self._quantised = self._parts[0].dtype is torch.float8_e4m3fn
        scaled = (layer, f"{names[0]}.scale") in cache.placement.parts
        self._token_scales = [cache.view(layer, f"{name}.scale") for name in names] if scaled else []
        self._scales = [_scale(part) for part in self._parts]
        part, _, offset = held[0]
        self.heads = prod(part.sizes[:-1])
        """The number of KV heads of this rank; 1 for a latent."""
        self.dim = part.sizes[-1]
        row = cache.block_tokens * self.dim * part.dtype.itemsize
        page = cache.placement.page_bytes
        together = all(other == offset + i * self.heads * row for i, (_, _, other) in enumerate(held))
        assert together, "values lie directly after keys"
        assert offset % row == page % row == 0, "a page is a whole number of rows"
        as_bytes = cache.data.view(torch.uint8).view(-1, row)[offset // row :]
        # 8-bit floats are copied as integers, because not every operation supports them.
        self._rows = as_bytes if self._quantised else as_bytes.view(part.dtype)
        self.row_key = (page // row, len(names), self.heads)
        """Layers with equal keys have equal `rows_of`, so its result can be shared."""

    @cached_property
    def _within(self) -> torch.Tensor:
        _, parts, heads = self.row_key
        return torch.arange(parts * heads, device=self._cache.device).view(parts, 1, heads, 1)

    def rows_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Returns the rows that `gather` reads for block tables [batch, blocks]."""
        return (blocks[None, :, None, :] * self.row_key[0] + self._within).flatten()

    def gather(self, rows: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of block tables [batch, blocks], each [batch, heads, blocks * block_tokens, dim]."""
        batch, num_blocks = blocks.shape
        found = torch.index_select(self._rows, 0, rows)
        if self._quantised:
            found = found.view(torch.float8_e4m3fn)
        found = found.to(self._dtype)
        found = found.view(len(self._parts), batch, self.heads, num_blocks * self._cache.block_tokens, self.dim)
        if self._token_scales:
            for part, scales in zip(found, self._token_scales, strict=True):
                of_blocks = scales[blocks].view(batch, num_blocks, self.heads, -1)
                part *= of_blocks.transpose(1, 2).reshape(batch, self.heads, -1, 1)
        elif self._quantised:
            for part, scale in zip(found, self._scales, strict=True):
                part *= scale
        return found[0], found[-1]

    def store(self, new: tuple[torch.Tensor, ...], slots: Slots) -> tuple[torch.Tensor, ...]:
        """Writes keys and values, or latents, each [tokens, heads, dim]. Returns them as they will be read."""
        blocks, offsets = slots
        if not self._quantised:
            stored = [x.to(view.dtype) for view, x in zip(self._views, new, strict=True)]
            for view, x in zip(self._views, stored, strict=True):
                self._at(view)[blocks, :, offsets] = x
            return tuple(x.to(self._dtype) for x in stored)
        read = []
        for i, (view, x) in enumerate(zip(self._views, new, strict=True)):
            scale: float | torch.Tensor = self._scales[i]
            if self._token_scales:
                scale = (x.abs().amax(-1, keepdim=True).float() / FP8_MAX).clamp_min(1e-12)
                self._token_scales[i].view(len(view), self.heads, -1)[blocks, :, offsets] = scale.squeeze(-1)
            small = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
            self._at(view).view(torch.uint8)[blocks, :, offsets] = small.view(torch.uint8)
            read.append(small.to(x.dtype) * (scale.to(x.dtype) if isinstance(scale, torch.Tensor) else scale))
        return tuple(read)

    def _at(self, view: torch.Tensor) -> torch.Tensor:
        """Returns a view as [blocks, heads, tokens, dim]; a latent has one head."""
        return view if view.dim() == 4 else view.unsqueeze(1)


def _scale(part: CachePart) -> float:
    """Returns the scale of a whole tensor, which is part of the name of its encoding."""
    _, _, scale = part.encoding.partition(":")
    return float(scale or 1.0)
