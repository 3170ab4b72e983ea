"""Measures how long each callback holds an event loop, and fails a test in which one held it for too long.

What counts is the processor time of the loop's thread, so a machine that is busy with something else changes nothing.
The garbage collector is left out: its time depends on everything else that the test process holds. Time in which
another thread keeps the interpreter to itself is not the loop's own; `longest_stall_s` measures that by a heartbeat.
"""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["HELD_S", "Held", "LoopMonitor", "check_held", "limit_s", "longest_stall_s"]

HELD_S = 0.020
"""The aim: how long a callback may hold a loop."""
_HELD_ON_A_BUSY_MACHINE_S = 0.050
_KEPT = 20


def limit_s() -> float:
    """Returns how long a callback may hold the loop: 20 ms, or 50 ms on a busy machine, whose cores are slower. A
    machine on which pytest-xdist runs tests side by side is busy."""
    busy = "PYTEST_XDIST_WORKER" in os.environ or os.getloadavg()[0] > (os.cpu_count() or 1)
    return _HELD_ON_A_BUSY_MACHINE_S if busy else HELD_S


@dataclass(frozen=True, order=True, slots=True)
class Held:
    """One callback that held a loop."""

    seconds: float
    what: str

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:.1f} ms: {self.what}"


def check_held(longest: Sequence[Held], whose: str = "", *, within_s: float | None = None) -> None:
    """Fails if one of these held a loop for longer than `within_s`, by default for `limit_s()`."""
    within_s = limit_s() if within_s is None else within_s
    late = "; ".join(str(held) for held in longest if held.seconds > within_s)
    assert not late, f"the event loop {whose} was held for over {within_s * 1e3:g} ms: {late}"


class LoopMonitor:
    """Watches the loop of this thread, if it is asyncio's own, from `install` to `remove`. A context."""

    def __init__(self, within_s: float | None = None) -> None:
        """`within_s`: what the context allows, by default `limit_s()` at its end."""
        self._within_s = within_s
        self._thread = threading.get_ident()
        self.longest: list[Held] = []
        """The callbacks that held a loop longest, longest first."""
        self._original: Callable[[asyncio.Handle], Any] = asyncio.Handle._run
        self._collecting_s = 0.0
        self._collection_began_s = 0.0

    def install(self) -> "LoopMonitor":
        """Begins to measure."""
        original, monitor = self._original, self

        def run(handle: asyncio.Handle) -> Any:
            if threading.get_ident() != monitor._thread:
                return original(handle)
            collected_s, began_s = monitor._collecting_s, time.thread_time()
            what = _name_of(handle)  # before it runs: its last step forgets the coroutine
            try:
                return original(handle)
            finally:
                held_s = time.thread_time() - began_s - (monitor._collecting_s - collected_s)
                monitor._note(held_s, what)

        asyncio.Handle._run = run  # type: ignore[method-assign, assignment]
        gc.callbacks.append(self._on_collection)
        return self

    def remove(self) -> None:
        """Ends measuring."""
        asyncio.Handle._run = self._original  # type: ignore[method-assign, assignment]
        gc.callbacks.remove(self._on_collection)

    def check(self, within_s: float | None = None) -> None:
        """Fails if a callback held a loop for longer than `within_s`, by default for `limit_s()`."""
        check_held(self.longest, within_s=within_s)

    def __enter__(self) -> "LoopMonitor":
        return self.install()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.remove()
        if error is None:
            self.check(self._within_s)

    def _note(self, held_s: float, what: str) -> None:
        if len(self.longest) < _KEPT or held_s > self.longest[-1].seconds:
            self.longest = sorted([*self.longest, Held(held_s, what)], reverse=True)[:_KEPT]

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began_s = time.thread_time()
        else:
            self._collecting_s += time.thread_time() - self._collection_began_s


def _name_of(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return _where(task.get_coro())
    return str(getattr(callback, "__qualname__", type(callback).__name__))


def _where(coroutine: Any) -> str:
    """Returns the names of the coroutines from a task down to where it waits."""
    names: list[str] = []
    while coroutine is not None and hasattr(coroutine, "cr_code") and len(names) < 8:
        names.append(coroutine.cr_code.co_qualname)
        coroutine = coroutine.cr_await
    return " > ".join(names) or "a task"


@contextmanager
def longest_stall_s(every_s: float = 0.001) -> Iterator[Callable[[], float]]:
    """Gives a function that returns for how long the interpreter let no other thread run, at most, until now.

    A thread beats every millisecond. A late beat counts for no more than the processor time that this process used
    meanwhile, so a machine that is busy with something else changes little.
    """
    longest, ending = 0.0, threading.Event()

    def beat() -> None:
        nonlocal longest
        while not ending.is_set():
            wall_s, used_s = time.perf_counter(), time.process_time()
            ending.wait(every_s)
            late_s = time.perf_counter() - wall_s - every_s
            longest = max(longest, min(late_s, time.process_time() - used_s))

    thread = threading.Thread(target=beat, name="heartbeat")
    thread.start()
    try:
        yield lambda: longest
    finally:
        ending.set()
        thread.join()
