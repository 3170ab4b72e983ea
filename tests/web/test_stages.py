"""The times that an engine records become stages."""

from kvferry.stats import StageTimes
from kvferry.web.stages import HandoffTotals, Stage, stages_of


def test_a_request_that_is_computed_here() -> None:
    times = StageTimes(arrived_s=1.0, computing_s=2.0, first_token_s=5.0, ended_s=9.0)
    assert stages_of(times) == (Stage("queue", 1, 2), Stage("prefill", 2, 5), Stage("decode", 5, 9))


def test_a_request_whose_kv_comes_from_another_engine() -> None:
    times = StageTimes(
        arrived_s=1.0, reserved_s=2.0, landing_s=3.0, landed_s=4.0, first_token_s=4.0, computing_s=4.5, ended_s=6.0
    )
    names = [(one.name, one.begin_s, one.end_s) for one in stages_of(times)]
    # Prefill sampled the first token: nothing of the prompt was computed here, so no stage claims that time.
    assert names == [("queue", 1, 2), ("handshake", 2, 3), ("transfer", 3, 4), ("decode", 4, 6)]


def test_a_request_that_never_ran_has_no_stage() -> None:
    assert stages_of(StageTimes(arrived_s=1.0)) == ()
    assert stages_of(StageTimes(arrived_s=1.0, reserved_s=2.0)) == (Stage("queue", 1, 2),)


def test_totals_separate_what_landed_from_what_did_not() -> None:
    totals = HandoffTotals().plus(landed=True, num_bytes=100, transfer_s=0.5)
    totals = totals.plus(landed=False, num_bytes=0, transfer_s=0.0)
    assert totals == HandoffTotals(landed=1, failed=1, bytes=100, transfer_s=0.5)
