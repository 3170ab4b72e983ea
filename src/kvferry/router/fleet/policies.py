"""Which of several workers that could serve a request does.

round_robin     in turn.
least_loaded    the fewest open requests: the router's own, and what the worker says of others'. Ties go round.
power_of_two    the less loaded of two that were drawn: nearly as even, and many routers do not all run to the same one.
prefix_aware    the least work: prompt tokens that are not in the worker's cache, as it told, plus what waits before.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.router.fleet.worker import Worker
from kvferry.router.settings import PolicyName

__all__ = ["Policy", "Wanted", "make_policy"]


class Wanted(Protocol):
    """What a request asks of a worker."""

    @property
    def num_tokens(self) -> int:
        """About so many prompt tokens."""
        ...

    def num_cached(self, worker: Worker) -> int:
        """About so many of them are in its cache."""
        ...


class Policy(Protocol):
    """One a role."""

    def choose(self, candidates: Sequence[Worker], wanted: Wanted) -> Worker:
        """One of them; there is at least one. Called on the event loop, once an attempt; must not block."""
        ...


class _RoundRobin:
    def __init__(self) -> None:
        self._picks = itertools.count(1)

    def choose(self, candidates: Sequence[Worker], wanted: Wanted) -> Worker:
        return self._picked(min(candidates, key=lambda worker: worker.last_pick))

    def _picked(self, worker: Worker) -> Worker:
        worker.last_pick = next(self._picks)
        return worker


class _LeastLoaded(_RoundRobin):
    def choose(self, candidates: Sequence[Worker], wanted: Wanted) -> Worker:
        return self._picked(min(candidates, key=lambda worker: (worker.load, worker.last_pick)))


class _PowerOfTwo(_RoundRobin):
    def __init__(self, draw: Callable[[Sequence[Worker], int], Sequence[Worker]]) -> None:
        super().__init__()
        self._draw = draw

    def choose(self, candidates: Sequence[Worker], wanted: Wanted) -> Worker:
        two = self._draw(candidates, min(2, len(candidates)))
        return self._picked(min(two, key=lambda worker: (worker.load, worker.last_pick)))


class _PrefixAware(_RoundRobin):
    """Work is counted in prompt tokens. A request that waits there counts as an average prompt, so that a popular
    prefix does not put all its requests on one worker."""

    _ALPHA = 0.05

    def __init__(self) -> None:
        super().__init__()
        self._mean_tokens = 256.0

    def choose(self, candidates: Sequence[Worker], wanted: Wanted) -> Worker:
        self._mean_tokens += self._ALPHA * (wanted.num_tokens - self._mean_tokens)

        def work(worker: Worker) -> tuple[float, int]:
            uncached = wanted.num_tokens - wanted.num_cached(worker)
            return uncached + worker.load * self._mean_tokens, worker.last_pick

        return self._picked(min(candidates, key=work))


def make_policy(name: PolicyName, rng: random.Random | None = None) -> Policy:
    """A new one; a role has its own."""
    if name is PolicyName.ROUND_ROBIN:
        return _RoundRobin()
    if name is PolicyName.POWER_OF_TWO:
        return _PowerOfTwo((rng or random.Random()).sample)
    if name is PolicyName.PREFIX_AWARE:
        return _PrefixAware()
    return _LeastLoaded()
