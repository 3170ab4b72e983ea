"""The batch of one step: attention over the paged cache, and the recurrent states of the requests.

A plan is made once per step for each cache group, and used by every layer of the group. Decoding requests (one new
token each) are divided into batches of similar length, and each batch shares its calls. A chunk of a prompt has one
call for its new tokens, whose keys and values are at hand, and one for each tile of what the cache holds.

A context is never copied as a whole. It is read in tiles, each small enough to stay in a core's cache until it has been
used, and the tiles' results are merged by the logarithms of their sums (FlashAttention, arXiv 2205.14135, section 3.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engines.mini.cache.pages import LayerPages, Slots
from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.compute.tiles import Merged, attend_tile
from kvferry.engines.mini.models.families.base import Sequences
from kvferry.engines.mini.step import ChunkInput

__all__ = ["StepBatch"]

WASTE_TOKENS = 512
"""Decoding requests share a call unless it would read more padding than this."""
TILE_BYTES = 1 << 20
"""The size of the keys and values of a tile."""


@dataclass(slots=True)
class _Tile:
    """Some blocks of the past of some requests."""

    blocks: torch.Tensor
    """The block ids: [requests, blocks]."""
    first: int
    last: int
    """The tokens [first, last) of the tile are read."""
    bias: torch.Tensor | None
    """Broadcast to [requests, heads, queries, last - first]; None: every query attends to all tokens."""
    rows: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    def read(self, pages: LayerPages) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads keys and values, each [requests, heads, last - first, dim]."""
        if (rows := self.rows.get(pages.row_key)) is None:
            rows = self.rows[pages.row_key] = pages.rows_of(self.blocks)
        keys, values = pages.gather(rows, self.blocks)
        return keys[:, :, self.first : self.last], values[:, :, self.first : self.last]


@dataclass(frozen=True, slots=True)
class _Decode:
    """Decoding requests that share calls."""

    tokens: torch.Tensor | None
    """Their rows in the batch; None: the first `size` rows."""
    size: int
    tiles: list[_Tile]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of one prompt: rows [first, last) of the batch."""

    first: int
    last: int
    past: list[_Tile]
    bias: torch.Tensor | None
    """The mask of the chunk's own tokens, [queries, queries]; None: causal."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The calls of one cache group."""

    slots: Slots
    """The slot of each token of the step."""
    decodes: list[_Decode]
    chunks: list[_Chunk]


class StepBatch:
    """Implements families.base.Batch."""

    def __init__(
        self, cache: KVCache, chunks: Sequence[ChunkInput], dtype: torch.dtype, pages: dict[str, LayerPages]
    ) -> None:
        """Chunks of one token come first. `dtype` is that of the computation. `pages` is filled here, for all steps."""
        self._cache = cache
        self._chunks = chunks
        self._dtype = dtype
        self._pages = pages
        self._device = cache.device
        self._num_decoding = next((i for i, s in enumerate(chunks) if s.stop - s.start > 1), len(chunks))
        self._ranges = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
        self._flat_positions = np.concatenate(self._ranges)
        self.positions = self._tensor(self._flat_positions)
        self._plans: dict[tuple[int, int | None], _Plan] = {}
        self._sequences: dict[int, Sequences] = {}

    def attend(
        self,
        layer: str,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Implements families.base.Batch."""
        return self._attend(layer, queries, (keys, values), scale or queries.shape[-1] ** -0.5).flatten(1)

    def attend_latent(
        self, layer: str, queries: torch.Tensor, latents: torch.Tensor, *, value_dim: int, scale: float
    ) -> torch.Tensor:
        """Implements families.base.Batch."""
        # The CPU's kernel needs values as wide as keys; the surplus is cut off.
        return self._attend(layer, queries, (latents.unsqueeze(1),), scale)[..., :value_dim]

    def sequences(self, layer: str) -> Sequences:
        """Implements families.base.Batch."""
        group = self._cache.group_of(layer)
        if group not in self._sequences:
            stops = np.cumsum([len(r) for r in self._ranges])
            self._sequences[group] = Sequences(
                num_decoding=self._num_decoding,
                starts=tuple(int(stop) - len(r) for stop, r in zip(stops, self._ranges, strict=True)),
                stops=tuple(map(int, stops)),
                state_blocks=self._tensor([chunk.tables[group].block_ids[0] for chunk in self._chunks]),
            )
        return self._sequences[group]

    def state(self, layer: str, part: str) -> torch.Tensor:
        """Implements families.base.Batch."""
        return self._cache.view(layer, part)

    def _attend(self, layer: str, queries: torch.Tensor, new: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
        """Stores the new keys and values, and returns attention [tokens, heads, dim]."""
        if (pages := self._pages.get(layer)) is None:
            pages = self._pages[layer] = LayerPages(self._cache, layer, self._dtype)
        key = pages.group, pages.window
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = self._make_plan(pages)
        new = pages.store(new, plan.slots)
        num_tokens, num_heads, dim = queries.shape
        heads, shared = pages.heads, num_heads // pages.heads  # query heads that read the same keys
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in plan.decodes:
            q = queries[: group.size] if group.tokens is None else queries[group.tokens]
            merged = Merged()
            for tile in group.tiles:
                # Heads that share keys are rows of one small matrix, so the keys are read once.
                merged.add(attend_tile(q.reshape(group.size, heads, shared, dim), *tile.read(pages), tile.bias, scale))
            mixed = merged.result().reshape(group.size, num_heads, dim)
            if group.tokens is None and group.size == num_tokens:
                return mixed
            out[slice(group.size) if group.tokens is None else group.tokens] = mixed
        for chunk in plan.chunks:
            # Heads that share keys are a second axis of heads, over which keys are repeated without a copy.
            q = queries[chunk.first : chunk.last].view(-1, heads, shared, dim).permute(1, 2, 0, 3)
            merged = Merged()
            for tile in chunk.past:
                k, v = (x[0].unsqueeze(1).expand(-1, shared, -1, -1) for x in tile.read(pages))
                merged.add(attend_tile(q, k, v, tile.bias, scale))
            k, v = (
                x[chunk.first : chunk.last].transpose(0, 1).unsqueeze(1).expand(-1, shared, -1, -1)
                for x in (new[0], new[-1])
            )
            merged.add(attend_tile(q, k, v, chunk.bias, scale, causal=chunk.bias is None))
            out[chunk.first : chunk.last].view(-1, heads, shared, dim).copy_(merged.result().permute(2, 0, 1, 3))
        return out

    def _tensor(self, values: Sequence[object] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)

    def _bias(self, seen: npt.NDArray[np.bool_]) -> torch.Tensor:
        # Not minus infinity, because a tile of which a query sees nothing must have a sum, however small.
        low = torch.finfo(self._dtype).min / 4
        return torch.zeros(seen.shape, dtype=self._dtype, device=self._device).masked_fill_(
            torch.as_tensor(~seen, device=self._device), low
        )

    def _make_plan(self, pages: LayerPages) -> _Plan:
        block, group = self._cache.block_tokens, pages.group
        tables = [chunk.tables[group] for chunk in self._chunks]
        blocks = [
            np.asarray(table.block_ids)[(r - table.first_token) // block]
            for table, r in zip(tables, self._ranges, strict=True)
        ]
        per_token = 2 * pages.heads * pages.dim * self._dtype.itemsize
        tile_tokens = max(block, TILE_BYTES // per_token // block * block)
        first, chunks = self._num_decoding, []
        for index in range(self._num_decoding, len(self._chunks)):
            chunk = self._chunks[index]
            last = first + chunk.stop - chunk.start
            chunks.append(self._chunk(index, pages, first, last, tile_tokens))
            first = last
        return _Plan(
            (self._tensor(np.concatenate(blocks)), self._tensor(self._flat_positions % block)),
            [self._decode(members, pages, tile_tokens) for members in self._similar_lengths(pages.window)],
            chunks,
        )

    def _begin(self, index: int, pages: LayerPages) -> int:
        """Returns the first token of a request's past that has to be read, rounded down to the start of a block."""
        chunk = self._chunks[index]
        seen = max(chunk.base, 0 if pages.window is None else chunk.start - pages.window + 1)
        block, kept = self._cache.block_tokens, chunk.tables[pages.group].first_token
        assert kept <= seen, f"the window needs tokens from {seen} on, and the block table starts at token {kept}"
        return kept + (seen - kept) // block * block

    def _blocks(self, index: int, pages: LayerPages, first: int, last: int) -> list[int]:
        table, block = self._chunks[index].tables[pages.group], self._cache.block_tokens
        begin = (first - table.first_token) // block
        return list(table.block_ids[begin : -(-(last - table.first_token) // block)])

    def _decode(self, members: list[int], pages: LayerPages, tile_tokens: int) -> _Decode:
        block = self._cache.block_tokens
        begins = np.array([self._begin(i, pages) for i in members])
        stops = np.array([self._chunks[i].stop for i in members])
        tables = [self._blocks(i, pages, int(b), int(s)) for i, b, s in zip(members, begins, stops, strict=True)]
        width = max(map(len, tables))
        padded = self._tensor([table + [0] * (width - len(table)) for table in tables])
        step = max(1, tile_tokens // len(members) // block)
        low = stops - (pages.window or stops)  # tokens before these are outside the window
        alike = bool((stops - begins == stops[0] - begins[0]).all() and (low - begins == low[0] - begins[0]).all())
        tiles = []
        for at in range(0, width, step):
            blocks = padded[:, at : at + step]
            count = blocks.shape[1] * block
            if alike:  # no mask is needed: the tokens that no request sees are left out of the tile
                first = min(count, max(0, int(low[0] - begins[0]) - at * block))
                last = min(count, int(stops[0] - begins[0]) - at * block)
                if last > first:
                    tiles.append(_Tile(blocks, first, last, None))
                continue
            position = begins[:, None] + at * block + np.arange(count)[None, :]
            seen = (position < stops[:, None]) & (position >= low[:, None])
            tiles.append(_Tile(blocks, 0, count, self._bias(seen[:, None, None, :])))
        in_order = members == list(range(len(members)))
        return _Decode(None if in_order else self._tensor(members), len(members), tiles)

    def _chunk(self, index: int, pages: LayerPages, first: int, last: int, tile_tokens: int) -> _Chunk:
        chunk, block, window = self._chunks[index], self._cache.block_tokens, pages.window
        query = np.arange(chunk.start, chunk.stop)[:, None]
        past = []
        step = max(1, tile_tokens // block) * block
        for at in range(self._begin(index, pages), chunk.start, step):
            stop = min(at + step, chunk.start)
            blocks = self._tensor([self._blocks(index, pages, at, stop)])
            bias = None
            if window is not None:
                bias = self._bias(np.arange(at, stop)[None, :] > query - window)
            past.append(_Tile(blocks, 0, stop - at, bias))
        bias = None
        if window is not None and window < chunk.stop - chunk.start:
            bias = self._bias((query >= query.T) & (query - window < query.T))
        return _Chunk(first, last, past, bias)

    def _similar_lengths(self, window: int | None) -> list[list[int]]:
        """Divides the decoding requests into batches of similar length, each in the order of the step."""
        lengths = [min(s.stop, window or s.stop) for s in self._chunks[: self._num_decoding]]
        groups: list[list[int]] = []
        waste = 0
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            gap = lengths[groups[-1][0]] - lengths[i] if groups else 0
            if groups and waste + gap <= WASTE_TOKENS:
                groups[-1].append(i)
                waste += gap
            else:
                groups.append([i])
                waste = 0
        return [sorted(group) for group in groups]
