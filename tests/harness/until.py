"""The only way in which tests wait: until a condition holds, with a deadline at which the test fails."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["let_threads_run", "until", "until_async"]


def until(
    condition: Callable[[], Any],
    what: str = "the condition holds",
    *,
    within_s: float = 60.0,
    every_s: float = 0.005,
    meanwhile: Callable[[], object] | None = None,
) -> Any:
    """Polls until `condition` returns something true, and returns that. Fails with its last value after `within_s`.

    `meanwhile` runs between two polls, instead of a pause, and brings the condition about.
    """
    end_s = time.monotonic() + within_s
    while True:
        if value := condition():
            return value
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {within_s:g} s: {what}; the last value was {value!r}")
        if meanwhile is None:
            let_threads_run(every_s)
        else:
            meanwhile()


def let_threads_run(seconds: float = 0.0005) -> None:
    """Gives other threads and processes a moment. For loops that step an engine or poll a process, and then check."""
    threading.Event().wait(seconds)


async def until_async(
    condition: Callable[[], Any], what: str = "the condition holds", *, within_s: float = 10.0, every_s: float = 0.002
) -> Any:
    """Does the same on an event loop. `condition` may return an awaitable."""
    end_s = time.monotonic() + within_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {within_s:g} s: {what}; the last value was {value!r}")
        await asyncio.sleep(every_s)
