"""Policies that choose one of the workers that could serve a request. admission.py says which could, and calls them.

round_robin     Each worker in turn.
least_loaded    The worker with the fewest open requests: this router's, and others' as the worker reports them.
power_of_two    The less loaded of two workers drawn at random. It is nearly as even, and several routers do not all
                choose the same worker.
prefix_aware    The worker with the least work: prompt tokens that are not in its cache, as it reports it, plus what
                already waits there.

A tie, in all but round_robin, goes to the worker that served the conversation's turn before, because its cache has that
turn; else to each worker in turn.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.router.fleet.worker import Worker
from kvferry.router.settings import PolicyName

__all__ = ["Policy", "PromptEstimate", "make_policy"]


class PromptEstimate(Protocol):
    """An estimate of how long a prompt is, and how much of it a worker has cached."""

    @property
    def num_tokens(self) -> int:
        """The approximate number of prompt tokens."""
        ...

    @property
    def exact(self) -> bool:
        """True if `num_tokens` is exact: the client sent token ids, or a worker has counted."""
        ...

    def num_cached(self, worker: Worker) -> int:
        """Returns about how many of them are in the worker's cache."""
        ...

    def served_before(self, worker: Worker) -> bool:
        """True if the worker served the turn before of the same conversation."""
        ...


class Policy(Protocol):
    """Chooses workers of one role."""

    def choose(self, candidates: Sequence[Worker], prompt: PromptEstimate) -> Worker:
        """Returns one of `candidates`, of which there is at least one. Called on the event loop, once per attempt; must
        not block."""
        ...


class _RoundRobin:
    def __init__(self) -> None:
        self._picks = itertools.count(1)

    def choose(self, candidates: Sequence[Worker], prompt: PromptEstimate) -> Worker:
        return self._picked(min(candidates, key=lambda worker: worker.last_pick))

    def _picked(self, worker: Worker) -> Worker:
        worker.last_pick = next(self._picks)
        return worker

    @staticmethod
    def _by(load: float, worker: Worker, prompt: PromptEstimate) -> tuple[float, bool, int]:
        """Returns the key by which workers are compared: the load, and then what decides between equal loads."""
        return load, not prompt.served_before(worker), worker.last_pick


class _LeastLoaded(_RoundRobin):
    def choose(self, candidates: Sequence[Worker], prompt: PromptEstimate) -> Worker:
        return self._picked(min(candidates, key=lambda worker: self._by(worker.load, worker, prompt)))


class _PowerOfTwo(_RoundRobin):
    def __init__(self, draw: Callable[[Sequence[Worker], int], Sequence[Worker]]) -> None:
        super().__init__()
        self._draw = draw

    def choose(self, candidates: Sequence[Worker], prompt: PromptEstimate) -> Worker:
        two = self._draw(candidates, min(2, len(candidates)))
        return self._picked(min(two, key=lambda worker: self._by(worker.load, worker, prompt)))


class _PrefixAware(_RoundRobin):
    """Work is counted in prompt tokens. Each open request counts as an average prompt, so that a popular prefix does
    not put all its requests on one worker."""

    _ALPHA = 0.05

    def __init__(self) -> None:
        super().__init__()
        self._mean_tokens = 256.0

    def choose(self, candidates: Sequence[Worker], prompt: PromptEstimate) -> Worker:
        self._mean_tokens += self._ALPHA * (prompt.num_tokens - self._mean_tokens)

        def work(worker: Worker) -> tuple[float, bool, int]:
            uncached = prompt.num_tokens - prompt.num_cached(worker)
            return self._by(uncached + worker.load * self._mean_tokens, worker, prompt)

        return self._picked(min(candidates, key=work))


def make_policy(name: PolicyName, rng: random.Random | None = None) -> Policy:
    """Returns a new policy. Each role needs its own."""
    if name is PolicyName.ROUND_ROBIN:
        return _RoundRobin()
    if name is PolicyName.POWER_OF_TWO:
        return _PowerOfTwo((rng or random.Random()).sample)
    if name is PolicyName.PREFIX_AWARE:
        return _PrefixAware()
    return _LeastLoaded()
