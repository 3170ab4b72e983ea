"""Wakes vLLM's engine when it is idle, and lets it sleep when all it has to do is wait for a peer.

An idle engine sleeps on the queue of its clients' requests. vLLM has no hook to wake it. The alternative, to report
work as pending for as long as a peer may read, makes it step a thousand times per second; so does a request that waits
for its KV. Therefore the engine core is looked up while it makes its connector: it is the `self` of a caller. A core
without a queue (in the caller's own process), or of a release that differs, is neither woken nor put to sleep; it then
steps as vLLM does by itself.
"""

import queue
import sys
from types import FrameType
from typing import Any

__all__ = ["EngineSleep", "find_engine_sleep"]


class EngineSleep:
    """Wakes one engine core, or lets it sleep."""

    def __init__(self, core: Any, word: Any) -> None:
        self._core = core
        self._word = word

    def __call__(self) -> None:
        """Makes an idle engine ask once whether work is pending. May be called from any thread; never blocks."""
        self._core.input_queue.put_nowait((self._word, None))

    def sleep(self, timeout_s: float) -> None:
        """Sleeps until the engine is woken, a client sends a request, or the time is over. On the engine's thread."""
        inbox = self._core.input_queue
        with inbox.not_empty:
            if not inbox.queue:
                inbox.not_empty.wait(timeout_s)

    def is_all(self, num_requests: int) -> bool:
        """Whether the engine has exactly this many requests, and no step under way."""
        core = self._core
        if getattr(core, "batch_queue", None) or hasattr(core, "dp_group"):  # those of a group step together
            return False
        return bool(sum(core.scheduler.get_request_counts()) == num_requests)

    @property
    def ending(self) -> bool:
        """Whether the engine is shutting down; it ends as soon as no work is pending."""
        return getattr(getattr(self._core, "shutdown_state", None), "name", "RUNNING") != "RUNNING"


def find_engine_sleep(request_type: Any) -> EngineSleep | None:
    """Looks up the engine core that is making its connector on this thread. None if it cannot be woken.

    `request_type` is vLLM's EngineCoreRequestType.
    """
    word = getattr(request_type, "WAKEUP", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and word is not None:
        core = frame.f_locals.get("self")
        if isinstance(getattr(core, "input_queue", None), queue.Queue):
            return EngineSleep(core, word)
        frame = frame.f_back
    return None
