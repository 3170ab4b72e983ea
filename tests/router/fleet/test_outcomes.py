"""The table of outcomes: each code and status of a worker has one row, and no row forgets a column."""

import pytest

from kvferry.router.fleet.outcomes import OUTCOMES, Counts, Outcome, Retry, outcome_of, outcome_table


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (400, "context_length_exceeded", Outcome.REFUSED),
        (404, "", Outcome.REFUSED),
        (400, "engine_dead", Outcome.REFUSED),  # a client's error stays one, whatever its code says
        (429, "", Outcome.OVERLOADED),
        (503, "overloaded", Outcome.OVERLOADED),
        (503, "draining", Outcome.LEAVING),
        (503, "stopping", Outcome.LEAVING),
        (503, "aborted", Outcome.LEAVING),
        (503, "engine_dead", Outcome.ENGINE_DEAD),
        (500, "engine_dead", Outcome.ENGINE_DEAD),
        (503, "engine_crashed", Outcome.ENGINE_CRASHED),
        (500, "request_failed", Outcome.REQUEST_FAILED),
        (500, "handoff_failed", Outcome.HANDOFF_FAILED),
        (500, "internal_error", Outcome.SERVER_ERROR),
        (500, None, Outcome.SERVER_ERROR),
        (599, "", Outcome.SERVER_ERROR),
    ],
)
def test_a_status_and_a_code_are_one_outcome(status: int, code: str | None, outcome: Outcome) -> None:
    assert outcome_of(status, code) is outcome


def test_every_outcome_has_its_consequence() -> None:
    assert set(OUTCOMES) == set(Outcome)
    assert outcome_table().count("\n") == len(Outcome) + 1
    for outcome, row in OUTCOMES.items():
        assert bool(row.status) == bool(row.code), outcome
        assert row.reached or outcome is Outcome.UNREACHABLE


def test_what_the_request_causes_counts_against_no_worker() -> None:
    for outcome in (Outcome.REFUSED, Outcome.REQUEST_FAILED):
        assert (OUTCOMES[outcome].retry, OUTCOMES[outcome].counts) == (Retry.NO, Counts.NONE)
