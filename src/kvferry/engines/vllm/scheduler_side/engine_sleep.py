"""How to wake vLLM's engine when it is idle, and to let it sleep when it has nothing to do but to wait for a peer.

An idle engine sleeps on the queue of what its clients ask. vLLM has no hook to wake it, and the other way, to call work
pending for as long as a peer may read, has it step a thousand times a second; so does a request that waits for its KV.
So the engine core is looked up where it makes its connector: it is the `self` of a caller. One without a queue (in the
caller's own process), or of a release that differs, is not woken, and does not sleep; then it steps as vLLM has it.
"""

import queue
import sys
from types import FrameType
from typing import Any

__all__ = ["EngineSleep", "find_wake"]


class EngineSleep:
    """Of one engine core."""

    def __init__(self, core: Any, word: Any) -> None:
        self._core = core
        self._word = word

    def __call__(self) -> None:
        """An idle engine asks once whether work is pending. From any thread; never blocks."""
        self._core.input_queue.put_nowait((self._word, None))

    def sleep(self, timeout_s: float) -> None:
        """Until somebody wakes the engine, or a client asks for something. On the engine's thread."""
        inbox = self._core.input_queue
        with inbox.not_empty:
            if not inbox.queue:
                inbox.not_empty.wait(timeout_s)

    def is_all(self, num_requests: int) -> bool:
        """The engine has these requests, no others, and no step under way."""
        core = self._core
        if getattr(core, "batch_queue", None) or hasattr(core, "dp_group"):  # those of a group step together
            return False
        return bool(sum(core.scheduler.get_request_counts()) == num_requests)

    @property
    def ending(self) -> bool:
        """The engine was told to end: it goes as soon as no work is pending."""
        return getattr(getattr(self._core, "shutdown_state", None), "name", "RUNNING") != "RUNNING"


def find_wake(request_type: Any) -> EngineSleep | None:
    """To be called while the engine core is made, on its thread. `request_type`: vLLM's EngineCoreRequestType.

    None: this engine cannot be woken.
    """
    word = getattr(request_type, "WAKEUP", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and word is not None:
        core = frame.f_locals.get("self")
        if isinstance(getattr(core, "input_queue", None), queue.Queue):
            return EngineSleep(core, word)
        frame = frame.f_back
    return None
