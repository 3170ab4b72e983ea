"""A peer sends spans to pack that are outside our table, or of which there are more or fewer than group pairs."""

import pytest

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.edge import Edge
from kvferry.layout.packing import Side, pack_plan, spans
from kvferry.layout.pairing import pair
from kvferry.layout.tokens import Span
from tests.layout.samples import attention

GOOD = [BlockTable(0, 0, [3, 1])]
WANTED = TokenRange(0, 8)


def an_edge() -> Edge:
    return pair([attention()], attention()).edges[0]


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        ([], "0 token spans for 1 pairs"),
        ([Span(0, 8, True), Span(0, 8, True)], "2 token spans for 1 pairs"),
        ([Span(0, 9, True)], r"holds tokens \[0, 8\); \[0, 9\) are needed"),
        ([Span(-1, 8, True)], r"\[-1, 8\) is not inside"),
        ([Span(8, 4, True)], r"\[8, 4\) is not inside"),
        ([Span(0, 1 << 60, True)], "is not inside"),
    ],
)
def test_spans_that_do_not_fit_are_refused(sent: list[Span], match: str) -> None:
    with pytest.raises(MalformedMessage, match=match):
        pack_plan(an_edge(), Side.SOURCE, GOOD, sent)


def test_right_spans_are_accepted() -> None:
    sent = spans(an_edge(), GOOD, GOOD, WANTED)
    assert pack_plan(an_edge(), Side.SOURCE, GOOD, sent).payload_bytes == 2 * 2 * 8 * 4 * 4
