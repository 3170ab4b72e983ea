"""Attention of one mixed batch over the paged cache.

A plan is made once a step and used by every layer. Requests that decode (one new token) are put into groups of similar
length, and each group is one call. Pieces of prompts are one call each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from kvferry.engines.mini.cache import KVCache

__all__ = ["AttentionPlan", "Piece"]

WASTE_TOKENS = 512
"""Decoding requests share a call unless that would read more padding than this."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one request computes in this step: tokens [start, stop) of it, with these blocks."""

    block_ids: Sequence[int]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests that decode together."""

    tokens: torch.Tensor
    """Their rows in the batch."""
    rows: torch.Tensor
    bias: torch.Tensor
    """[batch * kv heads, 1, 1, context]: 0 where a token is seen, else minus infinity."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A piece of one prompt."""

    first: int
    last: int
    """Rows [first, last) of the batch."""
    rows: torch.Tensor
    context: int
    bias: torch.Tensor | None
    """[queries, context]; None for a whole prompt so far: causal."""


class AttentionPlan:
    """Where each token of the batch goes in the cache, and what it may see."""

    def __init__(self, cache: KVCache, pieces: Sequence[Piece], dtype: torch.dtype, windows: set[int | None]) -> None:
        """`pieces`: those of one token first, in the order of the batch."""
        self._cache = cache
        self._device = cache.data.device
        self._dtype = dtype
        block = cache.block_tokens
        ranges = [np.arange(p.start, p.stop) for p in pieces]
        blocks = [np.asarray(p.block_ids)[r // block] for p, r in zip(pieces, ranges, strict=True)]
        positions = np.concatenate(ranges)
        self.positions = self._tensor(positions)
        """Of each token in its request."""
        self.slots = (self._tensor(np.concatenate(blocks)), self._tensor(positions % block))
        """Of each token: its block, and its place in the block."""
        num_decoding = next((i for i, p in enumerate(pieces) if p.stop - p.start > 1), len(pieces))
        self._groups: dict[int | None, list[_Group]] = {}
        self._chunks: dict[int | None, list[_Chunk]] = {}
        for window in windows:
            self._groups[window] = [self._group(cache, pieces, g, window) for g in _alike(pieces[:num_decoding])]
            self._chunks[window] = self._cut(cache, pieces[num_decoding:], num_decoding, window)

    def attend(
        self,
        name: str,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See families.base.Batch."""
        cache, layer = self._cache, int(name.split(".")[1])
        window = cache.config.windows[layer]
        cache.store(layer, keys, values, self.slots)
        num_tokens, num_heads, dim = queries.shape
        heads = cache.config.num_kv_heads
        shared = num_heads // heads  # query heads that read the same keys
        parts = []
        for group in self._groups[window]:
            batch = len(group.tokens)
            keys, values = cache.gather(layer, group.rows, batch)
            q = queries[group.tokens].view(batch * heads, shared, 1, dim)
            keys, values = (x.view(batch * heads, 1, -1, dim).expand(-1, shared, -1, -1) for x in (keys, values))
            mixed = functional.scaled_dot_product_attention(q, keys, values, group.bias, scale=scale)
            parts.append((group, mixed.view(batch, -1)))
        if len(parts) == 1 and len(parts[0][0].tokens) == num_tokens:
            return parts[0][1]  # one group of all, in the order of the batch
        out = queries.new_empty(num_tokens, num_heads * dim)
        for group, mixed in parts:
            out[group.tokens] = mixed
        for chunk in self._chunks[window]:
            keys, values = cache.gather(layer, chunk.rows, 1)
            # Heads that share keys are a second axis of heads, over which keys are repeated without a copy.
            q = queries[chunk.first : chunk.last].view(-1, heads, shared, dim).permute(1, 2, 0, 3)
            keys, values = (
                x[0, :, None, : chunk.context].expand(heads, shared, chunk.context, dim) for x in (keys, values)
            )
            mixed = functional.scaled_dot_product_attention(
                q, keys, values, chunk.bias, is_causal=chunk.bias is None, scale=scale
            )
            out[chunk.first : chunk.last] = mixed.permute(2, 0, 1, 3).reshape(-1, num_heads * dim)
        return out

    def _tensor(self, values: Sequence[object] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)

    def _bias(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(seen.shape, dtype=self._dtype, device=self._device).masked_fill_(~seen, float("-inf"))

    def _group(self, cache: KVCache, pieces: Sequence[Piece], members: list[int], window: int | None) -> _Group:
        block = cache.block_tokens
        lengths = [pieces[i].stop for i in members]
        width = -(-max(lengths) // block)
        tables = [list(pieces[i].block_ids[: -(-pieces[i].stop // block)]) for i in members]
        rows = cache.rows(0, self._tensor([table + [0] * (width - len(table)) for table in tables]))
        position = torch.arange(width * block, device=self._device)
        length = self._tensor(lengths)[:, None]
        seen = position < length
        if window is not None:
            seen &= position >= length - window
        bias = self._bias(seen.repeat_interleave(cache.config.num_kv_heads, dim=0))
        return _Group(self._tensor(members), rows, bias[:, None, None, :])

    def _cut(self, cache: KVCache, pieces: Sequence[Piece], first: int, window: int | None) -> list[_Chunk]:
        chunks = []
        for piece in pieces:
            last = first + piece.stop - piece.start
            blocks = self._tensor([piece.block_ids[: -(-piece.stop // cache.block_tokens)]])
            bias = None
            if piece.start > 0 or (window is not None and window < piece.stop):
                query = torch.arange(piece.start, piece.stop, device=self._device)[:, None]
                key = torch.arange(piece.stop, device=self._device)[None, :]
                seen = key <= query
                if window is not None:
                    seen &= key > query - window
                bias = self._bias(seen)
            chunks.append(_Chunk(first, last, cache.rows(0, blocks), piece.stop, bias))
            first = last
        return chunks


def _alike(pieces: Sequence[Piece]) -> list[list[int]]:
    """Indices of decoding requests in groups of similar length, each in the order of the batch."""
    groups: list[list[int]] = []
    waste = 0
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].stop):
        gap = pieces[groups[-1][0]].stop - pieces[i].stop if groups else 0
        if groups and waste + gap <= WASTE_TOKENS:
            groups[-1].append(i)
            waste += gap
        else:
            groups.append([i])
            waste = 0
    return [sorted(group) for group in groups]
