"""A circuit breaker, with a clock that the test moves."""

from kvferry.router.fleet.breakers import Breaker, BreakerState


def test_it_opens_after_consecutive_failures_and_then_tries_one_request_per_period() -> None:
    breaker = Breaker(3, 2.0, 5.0)
    assert [breaker.failed(0.0, "x") for _ in range(3)] == [False, False, True]
    assert (breaker.state(1.9), breaker.permits(1.9)) == (BreakerState.OPEN, False)
    assert "3 failures in a row, tried again in 1.5 s; the last: x" in breaker.explain(0.5)
    assert (breaker.state(2.0), breaker.permits(2.0)) == (BreakerState.HALF_OPEN, True)
    breaker.began(2.0)  # this one; its end may never be reported
    assert not breaker.permits(2.1)
    assert breaker.permits(4.0)
    breaker.failed(4.0, "y")
    assert not breaker.permits(7.9)
    assert breaker.permits(8.0)  # 4 s: doubled
    breaker.failed(8.0, "y")
    assert breaker.permits(13.0)  # 5 s: the longest
    breaker.succeeded()
    assert (breaker.state(13.0), breaker.reason) == (BreakerState.CLOSED, "")


def test_a_success_in_between_restarts_the_count() -> None:
    breaker = Breaker(2, 1.0, 1.0)
    for _ in range(5):
        breaker.failed(0.0, "x")
        assert breaker.permits(0.0)
        breaker.succeeded()


def test_a_closed_breaker_lets_everything_through() -> None:
    breaker = Breaker(1, 1.0, 1.0)
    for _ in range(3):
        breaker.began(0.0)
        assert breaker.permits(0.0)
