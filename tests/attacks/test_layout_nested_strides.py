"""Thousands of interleaved tensors, each with its own stride: the overlap check must end soon."""

import pytest

from kvferry.errors import MalformedMessage
from kvferry.layout.description import CacheGroup, CacheKind, CacheLayout, Paging, Rank, Region, Tensor
from kvferry.layout.limits import MAX_TENSORS


def nested(count: int) -> CacheLayout:
    """Returns tensors: number i has the bytes i and 100000 - i, so no two overlap, but all their ranges do."""
    tensors = tuple(
        Tensor(f"layers.{i}.attn", "k", "bf16", 1, 0, 0, i, Paging(2, 100_000 - 2 * i, None), ())
        for i in range(1, count + 1)
    )
    return CacheLayout(Rank(), (Region(1 << 20, 100_001),), (CacheGroup(CacheKind.FULL, 4),), tensors)


@pytest.mark.parametrize("count", [40, 2000, MAX_TENSORS])
def test_strides_that_nest_without_end_are_refused(count: int) -> None:
    with pytest.raises(MalformedMessage, match="more than 16 different strides"):
        nested(count)


def test_a_few_strides_are_accepted() -> None:
    assert len(nested(12).tensors) == 12
