"""Observers see every stage of every request. Time lines, traces and logs of dispatches are observers.

These are the events of one dispatch, in order; a failed attempt repeats some. Fields are strings, numbers or None.

    arrived            request_id, path, stream, traceparent (as the client sent it, or "")
    chosen             route (pull, push, prefill, local, alone), prefill, decode, transfer_id, why
    prefill.sent       worker, transfer_id              the body was given to the connection
    prefill.answered   worker, status                   the whole answer is here
    decode.sent        worker
    decode.began       worker, status                   the headers are here
    first_byte         source (prefill, decode)         the first byte of the body was given to the client's connection
    failed             worker, stage, cause             an attempt failed; the next one may follow
    released           worker, transfer_id, cause       a hand-off was given up
    ended              status (499: the client hung up), route, prefill, decode, handed_over, cached, recomputed, why

`worker`, `prefill` and `decode` are engine ids. Without observers an event costs one `if`.
"""

import itertools
import logging
import time
from collections.abc import Mapping
from typing import Protocol

__all__ = ["Field", "Observer", "Observers"]

logger = logging.getLogger(__name__)

Field = str | int | float | None


class Observer(Protocol):
    """Sees dispatches. It is called on the event loop in the middle of a request, so it must not block and must be
    cheap."""

    def on_event(self, dispatch: int, name: str, at_s: float, fields: Mapping[str, Field]) -> None:
        """Called for an event of a dispatch. `dispatch` is unique in this router; `at_s` is `time.monotonic()`."""
        ...

    def worker_headers(self, dispatch: int, stage: str) -> Mapping[str, str]:
        """Returns headers for the request that is about to be sent to a worker (`traceparent`); they replace the
        client's. `stage` is `prefill` or `decode`."""
        ...


class Observers:
    """All observers of a router. If one raises, that is logged and the request goes on."""

    def __init__(self) -> None:
        self._all: list[Observer] = []
        self._serial = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, observer: Observer) -> None:
        """Adds an observer. Called before the router listens, or on the event loop."""
        self._all.append(observer)

    def new_dispatch(self) -> int:
        """Returns a number for a new dispatch."""
        return next(self._serial)

    def emit(self, dispatch: int, name: str, /, **fields: Field) -> None:
        """Passes an event on to all observers, with the current time. Never raises."""
        if not self._all:
            return
        at_s = time.monotonic()
        for observer in self._all:
            try:
                observer.on_event(dispatch, name, at_s, fields)
            except Exception:  # a fault in an observer must not fail a request
                logger.exception("an observer failed event=%s", name)

    def worker_headers(self, dispatch: int, stage: str) -> dict[str, str]:
        """Returns the headers that the observers add to a request to a worker. Never raises."""
        headers: dict[str, str] = {}
        for observer in self._all:
            try:
                headers.update(observer.worker_headers(dispatch, stage))
            except Exception:
                logger.exception("an observer failed headers stage=%s", stage)
        return headers
