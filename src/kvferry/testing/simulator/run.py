"""Runs many worlds in several processes, until enough hand-offs were simulated, or a violation was found."""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.testing.simulator.mutants import MUTANTS
from kvferry.testing.simulator.scenario import make_scenario
from kvferry.testing.simulator.simulated_memory import Violation
from kvferry.testing.simulator.world import World

__all__ = ["Found", "SimResult", "prepare_of", "simulate"]

_WORLDS_PER_TASK = 25


@dataclass(frozen=True, slots=True)
class Found:
    """A world in which an invariant was violated."""

    world_seed: int
    invariant: str
    what: str


@dataclass(frozen=True, slots=True)
class SimResult:
    """The sum over all worlds."""

    seed: int
    handoffs: int
    landed: int
    events: int
    found: tuple[Found, ...]
    mutant: str | None
    seconds: float
    cpu_s: float
    """The CPU time of all processes. On a busy machine it is far less than `seconds` times the number of processes."""


@dataclass(frozen=True, slots=True)
class _Task:
    handoffs: int = 0
    landed: int = 0
    events: int = 0
    cpu_s: float = 0.0
    found: tuple[Found, ...] = ()


def prepare_of(mutant: str | None) -> Callable[[RankProtocol], None]:
    """Returns what patches each RankProtocol. Raises ConfigError for a mutant that does not exist."""
    if mutant is None:
        return _unchanged
    if mutant not in MUTANTS:
        raise ConfigError(f"mutant {mutant!r} does not exist: choose one of {', '.join(sorted(MUTANTS))}")
    return MUTANTS[mutant]


def _unchanged(core: RankProtocol) -> None:
    pass


def _run_task(first: int, count: int, mutant: str | None) -> _Task:
    prepare = prepare_of(mutant)
    began_s = time.process_time()
    handoffs = landed = events = 0
    found = []
    for world_seed in range(first, first + count):
        world = World(make_scenario(world_seed), prepare=prepare)
        try:
            world.run()
        except Violation as violation:
            found.append(Found(world_seed, violation.invariant, str(violation)))
        handoffs += world.num_handoffs
        landed += world.num_landed
        events += world.num_events
        if found and mutant:
            break
    return _Task(handoffs, landed, events, time.process_time() - began_s, tuple(found))


def simulate(
    runs: int,
    seed: int,
    *,
    jobs: int = 2,
    mutant: str | None = None,
    progress: Callable[[int, float], None] = lambda handoffs, seconds: None,
) -> SimResult:
    """Simulates at least `runs` hand-offs in worlds with the seeds seed * 2**32, that plus 1, and so on.

    Stops early when a mutant was caught. Blocks; calls `progress` regularly with the hand-offs and seconds so far.
    """
    prepare_of(mutant)
    began_s = time.monotonic()
    total = _Task()
    next_world = seed << 32
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        pending: set[Future[_Task]] = set()
        done = False
        while pending or not done:
            while not done and len(pending) < 2 * jobs:
                pending.add(pool.submit(_run_task, next_world, _WORLDS_PER_TASK, mutant))
                next_world += _WORLDS_PER_TASK
            ended, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in ended:
                task = future.result()
                total = _Task(
                    total.handoffs + task.handoffs,
                    total.landed + task.landed,
                    total.events + task.events,
                    total.cpu_s + task.cpu_s,
                    total.found + task.found,
                )
            progress(total.handoffs, time.monotonic() - began_s)
            done = done or total.handoffs >= runs or bool(total.found and mutant) or len(total.found) >= 20
            if done:
                for future in pending:
                    future.cancel()
                pending = {future for future in pending if not future.cancelled()}
    found = tuple(sorted(total.found, key=lambda one: one.world_seed))
    seconds = time.monotonic() - began_s
    return SimResult(seed, total.handoffs, total.landed, total.events, found, mutant, seconds, total.cpu_s)
