"""Reduces a scenario that fails to the smallest one found that fails in the same way."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.testing.simulator.scenario import Job, Scenario
from kvferry.testing.simulator.simulated_memory import Violation
from kvferry.testing.simulator.world import World
from kvferry.wire.versions import PROTOCOL_MAX

__all__ = ["failure_of", "shrink", "trace_of"]

RecordT = TypeVar("RecordT", Job, Scenario)

_TRIES = 4
"""How many seeds each smaller scenario is tried with, because removing something shifts the random numbers."""


def failure_of(scenario: Scenario, prepare: Callable[[RankProtocol], None]) -> Violation | None:
    """Returns the violation in the world of this scenario, or None."""
    try:
        World(scenario, prepare=prepare).run()
    except Violation as violation:
        return violation
    return None


def trace_of(scenario: Scenario, prepare: Callable[[RankProtocol], None]) -> list[str]:
    """Returns every event of the world, up to the violation."""
    lines: list[str] = []
    world = World(scenario, prepare=prepare, trace=lines)
    try:
        world.run()
    except Violation as violation:
        world.say("%s", violation)
    return lines


def shrink(
    scenario: Scenario, invariant: str, prepare: Callable[[RankProtocol], None], *, budget_s: float = 20.0
) -> Scenario:
    """Removes jobs, faults and ranks as long as the same invariant fails. Deterministic within the time budget."""
    until_s = time.monotonic() + budget_s
    progress = True
    while progress and time.monotonic() < until_s:
        progress = False
        for smaller in _smaller(scenario):
            found = _still_fails(smaller, invariant, prepare)
            if found is not None:
                scenario, progress = found, True
                break
            if time.monotonic() > until_s:
                break
    return scenario


def _still_fails(scenario: Scenario, invariant: str, prepare: Callable[[RankProtocol], None]) -> Scenario | None:
    for shift in range(_TRIES):
        tried = replace(scenario, seed=scenario.seed + shift)
        violation = failure_of(tried, prepare)
        if violation is not None and violation.invariant == invariant:
            return tried
    return None


def _with(record: RecordT, name: str, value: Any) -> RecordT:
    return replace(record, **{name: value})


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    jobs = scenario.jobs
    size = len(jobs) // 2
    while size:
        for start in range(0, len(jobs), size):
            yield replace(scenario, jobs=jobs[:start] + jobs[start + size :])
        size //= 2
    for name in ("drop", "duplicate", "long_delay", "fail", "slow", "hang", "late", "drift"):
        if getattr(scenario, name):
            yield _with(scenario, name, 0.0)
    for name in ("crashes", "pauses", "partitions"):
        events = getattr(scenario, name)
        for index in range(len(events)):
            yield _with(scenario, name, events[:index] + events[index + 1 :])
    for name in ("prefill_ranks", "decode_ranks"):
        ranks = getattr(scenario, name)
        for index, count in enumerate(ranks):
            for fewer in {1, count - 1} - {0, count}:
                yield _with(scenario, name, (*ranks[:index], fewer, *ranks[index + 1 :]))
    for name, plain in (("in_order", True), ("verify", False), ("owes_all", True), ("protocol", PROTOCOL_MAX)):
        if getattr(scenario, name) is not plain:
            yield _with(scenario, name, plain)
    for index, job in enumerate(jobs):
        plainer = replace(job, retries=0, withdraw_s=None, cancel_s=None, preempted=False, cached_tokens=0, chunks=1,
                          differs_at=None)  # fmt: skip
        for name in ("retries", "withdraw_s", "cancel_s", "preempted", "cached_tokens", "chunks", "differs_at"):
            if getattr(job, name) != getattr(plainer, name):
                simpler = _with(job, name, getattr(plainer, name))
                yield replace(scenario, jobs=(*jobs[:index], simpler, *jobs[index + 1 :]))
