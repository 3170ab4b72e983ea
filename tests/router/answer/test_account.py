"""How a hand-off has ended, as the headers of decode's answer say it."""

import pytest

from kvferry.router.answer.account import HandoffOutcome, handed_over_tokens, outcome_of


@pytest.mark.parametrize(
    ("headers", "outcome", "num_tokens"),
    [
        ({"x-kvferry-handed-over": "40"}, HandoffOutcome.LANDED, 40),
        ({"x-kvferry-handed-over": "40", "x-kvferry-why": "short"}, HandoffOutcome.LANDED, 40),
        ({"x-kvferry-handed-over": "0"}, HandoffOutcome.LANDED, 0),  # all of it was in decode's cache
        ({"x-kvferry-handed-over": "0", "x-kvferry-why": "gone"}, HandoffOutcome.FAILED, 0),
        ({}, HandoffOutcome.UNKNOWN, 0),
        ({"x-kvferry-why": "from the router"}, HandoffOutcome.UNKNOWN, 0),
        ({"x-kvferry-handed-over": "many"}, HandoffOutcome.LANDED, 0),
    ],
)
def test_outcomes(headers: dict[str, str], outcome: HandoffOutcome, num_tokens: int) -> None:
    assert (outcome_of(headers), handed_over_tokens(headers)) == (outcome, num_tokens)
