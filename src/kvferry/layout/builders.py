"""The usual caches, described. Used by engines, benches and tests; nothing here allocates memory.

Addresses are given, or made up (spaced so that regions do not meet) for layouts that are only planned with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.layout.description import (
    Axis,
    CacheGroup,
    CacheKind,
    CacheLayout,
    MemoryKind,
    Paging,
    Rank,
    Region,
    Tensor,
)

__all__ = ["Heads", "block_major", "head_range"]

MADE_UP_ADDRESS = 1 << 32


@dataclass(frozen=True, slots=True)
class Heads:
    """The KV heads of a model and which of them this rank holds."""

    extent: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def head_range(num_kv_heads: int, tp_rank: int, tp_size: int) -> Heads:
    """The usual split: dealt evenly (the first ranks hold one more), or replicated where ranks outnumber heads."""
    if tp_size >= num_kv_heads:
        start = tp_rank * num_kv_heads // tp_size
        return Heads(num_kv_heads, start, start + 1)
    each, rest = divmod(num_kv_heads, tp_size)
    start = tp_rank * each + min(tp_rank, rest)
    return Heads(num_kv_heads, start, start + each + (tp_rank < rest))


def block_major(
    layers: Sequence[str],
    *,
    num_blocks: int,
    block_tokens: int,
    heads: Heads,
    head_dim: int,
    element_bytes: int,
    encoding: str,
    address: int = MADE_UP_ADDRESS,
    kind: MemoryKind = MemoryKind.DRAM,
    device: int = 0,
    rank: Rank | None = None,
    group: CacheGroup | None = None,
) -> CacheLayout:
    """One allocation, C-contiguous [num_blocks, layers, 2 (k, v), heads, block_tokens, head_dim]: a block of all layers
    is one run. The embedded engine's cache."""
    token = head_dim * element_bytes
    head = block_tokens * token
    half = len(heads) * head
    block = len(layers) * 2 * half
    axes = (
        Axis("head", heads.extent, heads.start, heads.stop, head),
        Axis("dim", head_dim, 0, head_dim, element_bytes),
    )
    tensors = tuple(
        Tensor(layer, part, encoding, element_bytes, 0, 0, (2 * i + j) * half, Paging(num_blocks, block, token), axes)
        for i, layer in enumerate(layers)
        for j, part in enumerate(("k", "v"))
    )
    return CacheLayout(
        rank or Rank(),
        (Region(address, num_blocks * block, kind, device),),
        (group or CacheGroup(CacheKind.FULL, block_tokens),),
        tensors,
    )
