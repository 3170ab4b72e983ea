"""Clock offsets from the four times of an exchange."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.observe.timeline_clocks import ClockSample, WorkerClocks

SECONDS = st.floats(0, 10)


@given(ahead_s=st.floats(-1e6, 1e6), there_s=SECONDS, work_s=SECONDS, back_s=SECONDS)
def test_the_true_offset_is_within_the_stated_error(
    ahead_s: float, there_s: float, work_s: float, back_s: float
) -> None:
    sent_s = 100.0
    received_s = sent_s + there_s + ahead_s
    answered_s = received_s + work_s
    returned_s = sent_s + there_s + work_s + back_s
    sample = ClockSample.of(sent_s, received_s, answered_s, returned_s)
    assert abs(sample.offset_s - ahead_s) <= sample.error_s + 1e-8
    assert sample.error_s <= (there_s + back_s) / 2 + 1e-8


def test_a_worker_with_nonsense_times_has_a_large_error_and_no_negative_one() -> None:
    assert ClockSample.of(1.0, 50.0, 40.0, 2.0).error_s == 0.5  # it answered before it was asked
    assert ClockSample.of(1.0, 50.0, 90.0, 2.0).error_s == 0.0


def test_the_fastest_of_the_latest_exchanges_is_used_until_it_is_old() -> None:
    clocks = WorkerClocks()
    assert clocks.best("p0", "i1", 0.0) is None
    clocks.add("p0", "i1", ClockSample(5.0, 0.001, 0.0))
    clocks.add("p0", "i1", ClockSample(6.0, 0.100, 1.0))
    best = clocks.best("p0", "i1", 1.0)
    assert best is not None
    assert best.offset_s == 5.0
    # Clocks drift: a good sample from yesterday is worse than a poor one from now.
    clocks.add("p0", "i1", ClockSample(7.0, 0.100, 86_400.0))
    best = clocks.best("p0", "i1", 86_400.0)
    assert best is not None
    assert best.offset_s == 7.0
    assert clocks.best("p0", "i2", 1.0) is None  # a restart has another clock


def test_samples_and_clocks_are_bounded() -> None:
    clocks = WorkerClocks()
    for index in range(3000):
        clocks.add(f"p{index}", "i", ClockSample(0.0, 0.0, 0.0))
    assert clocks.best("p0", "i", 0.0) is None
    for index in range(20):
        clocks.add("p2999", "i", ClockSample(float(index), 0.0 if index == 0 else 1.0, 0.0))
    best = clocks.best("p2999", "i", 0.0)
    assert best is not None
    assert best.offset_s >= 12
