"""Tables that leave out a needed position, or a whole group."""

import pytest

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.edge import Edge
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan
from tests.layout.samples import attention

GOOD = [BlockTable(0, 0, [3, 1])]
WANTED = TokenRange(0, 8)


def an_edge() -> Edge:
    return pair([attention()], attention()).edges[0]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([], "group 0 has no table"),
        ([BlockTable(0, 0, [1]), BlockTable(0, 0, [2])], "group 0 has two tables"),
        ([BlockTable(1, 0, [1]), *GOOD], "group is 1; the layout has 1 groups"),
        ([BlockTable(-1, 0, [1]), *GOOD], "group is -1"),
        ([BlockTable(0, 0, [1])], r"holds \[0, 4\): token 4 has no block"),
        ([BlockTable(0, 4, [1])], r"holds \[4, 8\): token 0 has no block"),
        ([BlockTable(0, -4, [1, 2, 3])], "first_token is -4"),
        ([BlockTable(0, 1 << 62, [1, 2, 3])], "first_token is 4611686018427387904"),
        ([BlockTable(0, 0, [])], "token 0 has no block"),
    ],
)
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_missing_position_is_refused_before_anything_is_copied(table: list[BlockTable], says: str, side: str) -> None:
    with pytest.raises(MalformedMessage, match=f"{side}.*{says}"):
        plan(an_edge(), *((table, GOOD) if side == "source" else (GOOD, table)), WANTED)


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (5, 4), (0, 1 << 41)])
def test_an_impossible_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(MalformedMessage, match="wanted tokens"):
        plan(an_edge(), GOOD, GOOD, TokenRange(start, stop))
