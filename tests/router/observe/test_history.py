"""The series behind the dashboard's small charts: periods, percentiles, gaps, and a bounded memory."""

from kvferry.router.observe.history import EVERY_S, History


def test_a_period_has_its_rate_percentiles_and_share() -> None:
    history = History()
    for number in range(1, 101):
        history.add(10 * EVERY_S, first_byte_s=number / 1000, handed_over=3, prompt_tokens=4)
    history.add(10 * EVERY_S, first_byte_s=None, handed_over=0, prompt_tokens=0)
    series = history.series(11 * EVERY_S)
    last = {name: values[-1] for name, values in series.items() if isinstance(values, list)}
    assert last == {
        "rate": 101 / EVERY_S, "first_byte_p50_ms": 50.0, "first_byte_p99_ms": 99.0, "handed_over_share": 0.75,
    }  # fmt: skip


def test_the_running_period_is_left_out_and_an_empty_one_is_a_gap() -> None:
    history = History()
    history.add(10 * EVERY_S, first_byte_s=0.1, handed_over=1, prompt_tokens=1)
    assert history.series(10 * EVERY_S)["rate"] == [0.0] * 89
    series = history.series(12 * EVERY_S)
    assert series["rate"] == [0.0] * 87 + [1 / EVERY_S, 0.0]
    assert series["first_byte_p50_ms"] == [None] * 87 + [100.0, None]
    assert series["handed_over_share"] == [None] * 87 + [1.0, None]


def test_memory_is_bounded() -> None:
    history = History()
    for period in range(1000):
        for _ in range(3):
            history.add(period * EVERY_S, first_byte_s=0.1, handed_over=0, prompt_tokens=1)
    assert len(history._buckets) == 90
    for _ in range(10_000):
        history.add(1000 * EVERY_S, first_byte_s=0.1, handed_over=0, prompt_tokens=1)
    assert len(history._buckets[-1].first_bytes_s) == 512
