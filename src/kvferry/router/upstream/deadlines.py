"""Deadlines of many waits, with a single timer: a timer for each would be a tenth of what a request costs.

asyncio keeps timers in a heap, and a cancelled one stays there until half of them are cancelled. A request to a worker
waits for minutes at most and usually for milliseconds, so nearly all timers would be cancelled.
"""

import asyncio
from typing import Protocol

__all__ = ["Deadlines", "Due"]


class Due(Protocol):
    """A wait that must not last for ever."""

    @property
    def due_s(self) -> float:
        """The loop time at which it has lasted too long; infinity if there is no limit at the moment."""
        ...

    def on_due(self) -> None:
        """Called once it has lasted too long, and again until it is discarded or is due later. Must not raise or
        block."""
        ...


class Deadlines:
    """Watches waits, on the event loop. A deadline is noticed up to `every_s` late."""

    def __init__(self, every_s: float = 0.05) -> None:
        self._every_s = every_s
        self._open: set[Due] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, one: Due) -> None:
        """Watches `one` from now on."""
        self._open.add(one)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._check)

    def discard(self, one: Due) -> None:
        """Stops watching `one`."""
        self._open.discard(one)

    def stop(self) -> None:
        """Stops watching all of them."""
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for one in [one for one in self._open if one.due_s <= now_s]:
            one.on_due()
        if self._open:
            self._timer = loop.call_later(self._every_s, self._check)
