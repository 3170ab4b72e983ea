"""Small layouts for tests of single rules."""

from dataclasses import replace
from typing import Any

from kvferry.layout.builders import AxisOrder, LayoutBuilder, head_range
from kvferry.layout.description import CacheLayout, Rank, Tensor


def attention(
    *,
    layers: int = 2,
    heads: int = 4,
    tp_rank: int = 0,
    tp_size: int = 1,
    block_tokens: int = 4,
    num_blocks: int = 8,
    order: AxisOrder = AxisOrder.NHD,
    encoding: str = "bf16",
    rank: Rank | None = None,
    first_layer: int = 0,
) -> CacheLayout:
    """Returns attention layers that have separate memory, with 2 elements of 2 bytes per head."""
    builder = LayoutBuilder(rank or Rank(tp_rank, tp_rank, tp_size))
    group = builder.full(block_tokens)
    for number in range(first_layer, first_layer + layers):
        builder.attention(
            f"layers.{number}.attn",
            group,
            heads=head_range(heads, tp_rank, tp_size),
            head_dim=2,
            element_bytes=2,
            encoding=encoding,
            order=order,
            num_blocks=num_blocks,
        )
    return builder.build()


def with_tensor(layout: CacheLayout, index: int, **changes: Any) -> CacheLayout:
    """Returns the same layout with one tensor changed."""
    tensors = list(layout.tensors)
    tensors[index] = replace(tensors[index], **changes)
    return replace(layout, tensors=tuple(tensors))


def paging(tensor: Tensor, **changes: Any) -> dict[str, Any]:
    """Returns a change of a tensor's paging, for with_tensor."""
    return {"paging": replace(tensor.paging, **changes)}
