"""One page in the tables of two groups: a hand-off would write it twice, and one group would read the other's bytes."""

from collections.abc import Callable

import pytest

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.builders import LayoutBuilder, StatePart, attention_bytes, head_range
from kvferry.layout.description import CacheLayout
from kvferry.layout.edge import Edge
from kvferry.layout.packing import Side, pack_plan, plan_staged, spans
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan

HEADS = head_range(2, 0, 1)
SIZE = attention_bytes(4, HEADS, 2, 2)
FULL, WINDOW, STATE = 0, 1, 2
WANTED = TokenRange(0, 8)


def cache(*, share: bool, state_at: int = 0) -> CacheLayout:
    """Returns full, window and state layers, on the same pages or on separate ones."""
    builder = LayoutBuilder()
    groups = builder.full(4), builder.window(4, 100), builder.states()
    pages = builder.pool(16, SIZE)
    for number, group in enumerate(groups[:2]):
        pool = pages if share or not number else builder.pool(16, SIZE)
        builder.attention(
            f"layers.{number}.attn", group, heads=HEADS, head_dim=2, element_bytes=2, encoding="bf16", pool=pool
        )
    parts = (StatePart("ssm", "f32", 4, (("state", 4, 0, 4),)),)
    builder.state("layers.2.mamba", groups[2], parts, pool=(pages if share else builder.pool(16, SIZE)).at(state_at))
    return builder.build()


def tables(full: list[int], window: list[int], state: int) -> list[BlockTable]:
    return [BlockTable(FULL, 0, full), BlockTable(WINDOW, 0, window), BlockTable(STATE, 8, [state])]


def an_edge(*, share: bool = True, state_at: int = 0) -> Edge:
    return pair([cache(share=False)], cache(share=share, state_at=state_at)).edges[0]


def destination_alone(
    edge: Edge, source: list[BlockTable], destination: list[BlockTable], wanted: TokenRange
) -> object:
    """Makes the destination's half of a staged plan as a peer does: from received spans, and its own tables."""
    received = spans(edge, source, tables([0, 1], [2, 3], 4), wanted)
    return pack_plan(edge, Side.DESTINATION, destination, received)


PLANNERS = [plan, plan_staged, destination_alone]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    ("bad", "groups"),
    [
        (tables([0, 1], [1, 2], 3), "0 and 1"),
        (tables([9, 8], [7, 9], 3), "0 and 1"),
        (tables([0, 1], [2, 3], 1), "0 and 2"),
        (tables([0, 1], [2, 3], 2), "1 and 2"),
    ],
)
def test_a_page_of_two_groups_is_refused(planner: Callable[..., object], bad: list[BlockTable], groups: str) -> None:
    with pytest.raises(MalformedMessage, match=f"destination block tables of groups {groups} share bytes"):
        planner(an_edge(), tables([0, 1], [2, 3], 4), bad, WANTED)


@pytest.mark.parametrize("planner", PLANNERS[:2])
def test_a_page_of_two_groups_is_refused_on_the_source_too(planner: Callable[..., object]) -> None:
    edge = pair([cache(share=True)], cache(share=False)).edges[0]
    with pytest.raises(MalformedMessage, match="source block tables of groups 0 and 1 share bytes"):
        planner(edge, tables([0, 1], [1, 2], 4), tables([0, 1], [1, 2], 1), WANTED)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_state_that_lies_inside_another_groups_page_is_found(planner: Callable[..., object]) -> None:
    with pytest.raises(MalformedMessage, match="groups 0 and 2 share bytes"):
        planner(an_edge(state_at=SIZE // 2), tables([0, 1], [2, 3], 4), tables([0, 5], [2, 3], 5), WANTED)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_same_ids_on_pages_of_their_own_are_right(planner: Callable[..., object]) -> None:
    planner(an_edge(share=False), tables([0, 1], [2, 3], 4), tables([0, 1], [0, 1], 1), WANTED)
    planner(an_edge(), tables([0, 1], [2, 3], 4), tables([3, 1], [0, 2], 4), WANTED)


def test_groups_side_by_side_in_one_block_are_right() -> None:
    builder = LayoutBuilder()
    full, window = builder.full(4), builder.window(4, 100)
    pool = builder.pool(16, 2 * SIZE)
    for number, group in enumerate((full, window)):
        place = pool.at(number * SIZE)
        builder.attention(
            f"layers.{number}.attn", group, heads=HEADS, head_dim=2, element_bytes=2, encoding="bf16", pool=place
        )
    layout = builder.build()
    both = [BlockTable(0, 0, [0, 1]), BlockTable(1, 0, [0, 1])]
    plan(pair([layout], layout).edges[0], both, both, WANTED)
