"""Block ids from a peer that would lead out of its region, or two positions into one block."""

import pytest

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.edge import Edge
from kvferry.layout.packing import plan_staged
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan
from tests.layout.samples import attention

GOOD = [BlockTable(0, 0, [3, 1])]
WANTED = TokenRange(0, 8)


def an_edge() -> Edge:
    return pair([attention()], attention()).edges[0]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([0, 8], r"block id 8 is not in \[0, 8\)"),
        ([0, -1], r"block id -1 is not in \[0, 8\)"),
        ([0, 1 << 62], r"block id 4611686018427387904 is not in"),
        ([0, 1 << 70], "below 2\\*\\*63"),
        ([5, 5], "block id 5 is listed twice"),
    ],
)
@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("planner", [plan, plan_staged])
def test_wrong_ids_are_refused_on_both_sides(ids: list[int], says: str, side: str, planner: object) -> None:
    bad = [BlockTable(0, 0, ids)]
    assert callable(planner)
    with pytest.raises(MalformedMessage, match=f"{side} block table of group 0: .*{says}|{side} block table.*{says}"):
        planner(an_edge(), *((bad, GOOD) if side == "source" else (GOOD, bad)), WANTED)
