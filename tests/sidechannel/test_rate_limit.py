"""How often one address may ask."""

from kvferry.sidechannel.rate_limit import RateLimit


def test_a_burst_and_then_the_rate() -> None:
    limit = RateLimit(10.0)
    assert [limit.allow("a", 0.0) for _ in range(21)] == [True] * 20 + [False]
    assert not limit.allow("a", 0.05)
    assert limit.allow("a", 0.15)
    assert not limit.allow("a", 0.15)


def test_addresses_do_not_share() -> None:
    limit = RateLimit(1.0)
    assert [limit.allow(address, 0.0) for address in ("a", "a", "a", "b")] == [True, True, False, True]


def test_rates_below_one_per_second() -> None:
    limit = RateLimit(0.1)
    assert limit.allow("a", 0.0)
    assert not limit.allow("a", 5.0)
    assert limit.allow("a", 10.0)


def test_many_addresses_do_not_fill_memory() -> None:
    limit = RateLimit(1.0, max_addresses=100)
    for index in range(1000):
        limit.allow(f"10.0.{index}", 0.0)
    assert len(limit) == 100
