"""Pairs of caches for the staging tests: layouts with memory, and the result of a direct transfer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.builders import AxisOrder, KvPlace, LayoutBuilder, attention_bytes, head_range
from kvferry.layout.description import CacheLayout, Rank
from kvferry.layout.edge import Edge
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan

NUM_TOKENS = 288
Buffers = list[npt.NDArray[np.uint8]]


@dataclass(frozen=True)
class Shape:
    """How one side stores its cache."""

    order: AxisOrder = AxisOrder.NHD
    block_tokens: int = 16
    tp: tuple[int, int] = (0, 1)
    per_layer: bool = False
    kv: KvPlace = KvPlace.PACKED
    element_bytes: int = 2
    head_dim: int = 8


def layout(shape: Shape, *, num_layers: int = 3, num_heads: int = 4) -> CacheLayout:
    """Makes a cache of NUM_TOKENS tokens and some spare blocks."""
    builder = LayoutBuilder(Rank(index=shape.tp[0], tp_rank=shape.tp[0], tp_size=shape.tp[1]))
    group = builder.full(shape.block_tokens)
    heads = head_range(num_heads, *shape.tp)
    num_blocks = NUM_TOKENS // shape.block_tokens + 3
    block_bytes = attention_bytes(shape.block_tokens, heads, shape.head_dim, shape.element_bytes)
    pool = None if shape.per_layer else builder.pool(num_blocks, block_bytes * num_layers)
    for layer in range(num_layers):
        builder.attention(
            f"layers.{layer}.attn",
            group,
            heads=heads,
            head_dim=shape.head_dim,
            element_bytes=shape.element_bytes,
            encoding="bf16" if shape.element_bytes == 2 else "u8",
            order=shape.order,
            kv=shape.kv,
            num_blocks=num_blocks,
            pool=None if pool is None else pool.at(layer * block_bytes),
        )
    return builder.build()


def table(shape: Shape, seed: int | None) -> list[BlockTable]:
    """Returns the blocks in order (seed None), or shuffled."""
    num_blocks = NUM_TOKENS // shape.block_tokens + 3
    used = NUM_TOKENS // shape.block_tokens
    ids = np.arange(num_blocks) if seed is None else np.random.default_rng(seed).permutation(num_blocks)
    return [BlockTable(0, 0, ids[:used].tolist())]


def edge(source: Shape, destination: Shape) -> Edge:
    """Returns the edge from this rank of the source, after all its ranks were paired."""
    ranks = [layout(Shape(**{**source.__dict__, "tp": (rank, source.tp[1])})) for rank in range(source.tp[1])]
    found = pair(ranks, layout(destination)).edge_from(source.tp[0])
    assert found is not None
    return found


def buffers(cache: CacheLayout, seed: int) -> Buffers:
    """Returns memory for a layout, filled with random bytes."""
    random = np.random.default_rng(seed)
    return [np.frombuffer(random.bytes(region.num_bytes), np.uint8).copy() for region in cache.regions]


def moved_directly(
    over: Edge,
    source_tables: Sequence[BlockTable],
    tables: Sequence[BlockTable],
    wanted: TokenRange,
    source: Buffers,
    into: Buffers,
) -> Buffers:
    """Returns the destination's memory after every planned run was copied one by one."""
    result = [buffer.copy() for buffer in into]
    for runs in plan(over, source_tables, tables, wanted):
        for from_, to, length in zip(runs.source, runs.destination, runs.length, strict=True):
            result[runs.destination_region][to : to + length] = source[runs.source_region][from_ : from_ + length]
    return result


PAIRS = {
    "same": (Shape(), Shape()),
    "tp2-tp1-nhd": (Shape(tp=(1, 2)), Shape()),
    "tp2-tp1-hnd": (Shape(AxisOrder.HND, tp=(0, 2)), Shape(AxisOrder.HND)),
    "tp1-tp2-nhd": (Shape(), Shape(tp=(1, 2))),
    "nhd-hnd": (Shape(), Shape(AxisOrder.HND)),
    "hnd-nhd-per-layer": (Shape(AxisOrder.HND, per_layer=True), Shape(per_layer=True)),
    "16-48": (Shape(), Shape(block_tokens=48)),
    "16-24": (Shape(), Shape(block_tokens=24)),
    "apart-packed": (Shape(per_layer=True, kv=KvPlace.APART), Shape(AxisOrder.HND)),
    "odd-bytes": (Shape(element_bytes=1, head_dim=5), Shape(AxisOrder.HND, element_bytes=1, head_dim=5)),
}
