"""Positions far beyond any table, between ranks that split tokens: planning must not iterate up to them."""

import pytest

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.description import CacheLayout, Rank
from kvferry.layout.packing import plan_staged
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan
from kvferry.layout.tokens import MAX_TOKENS
from tests.layout.samples import attention


def dealt(rank: int, size: int, run: int) -> CacheLayout:
    return attention(rank=Rank(rank, cp_rank=rank, cp_size=size, cp_run_tokens=run))


@pytest.mark.parametrize("reader", [attention(), dealt(0, 3, 4)], ids=["whole", "dealt"])
@pytest.mark.parametrize("planner", [plan, plan_staged])
def test_a_position_without_a_block_is_found_without_a_long_search(reader: CacheLayout, planner: object) -> None:
    assert callable(planner)
    edge = pair([dealt(0, 2, 1), dealt(1, 2, 1)], reader).edges[0]
    with pytest.raises(MalformedMessage, match=r"token 1?\d has no block"):
        planner(edge, [BlockTable(0, 0, [0])], [BlockTable(0, 0, [1])], TokenRange(0, MAX_TOKENS))
