"""Deadlines of many waits, by one timer: a timer for each would be a tenth of what a request costs.

asyncio keeps timers in a heap; one that is cancelled stays there until half of them are. A request to a worker waits
for minutes at most and for milliseconds as a rule, so nearly all would be cancelled.
"""

import asyncio
from typing import Protocol

__all__ = ["Deadlines", "Due"]


class Due(Protocol):
    """Something that must not last for ever."""

    @property
    def due_s(self) -> float:
        """Loop time at which it has lasted too long; infinity: not now."""
        ...

    def on_due(self) -> None:
        """It has. Called again and again until it is taken out, or is due later; must not raise or block."""
        ...


class Deadlines:
    """On the event loop. A deadline is noticed up to `every_s` late."""

    def __init__(self, every_s: float = 0.05) -> None:
        self._every_s = every_s
        self._open: set[Due] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, one: Due) -> None:
        """Watch it from now on."""
        self._open.add(one)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)

    def discard(self, one: Due) -> None:
        """No longer."""
        self._open.discard(one)

    def stop(self) -> None:
        """Watch nothing more."""
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for one in [one for one in self._open if one.due_s <= now_s]:
            one.on_due()
        if self._open:
            self._timer = loop.call_later(self._every_s, self._look)
