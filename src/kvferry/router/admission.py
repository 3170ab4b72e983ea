"""Which decode worker takes a request, with room for its prompt: asked before prefill is given work.

A prompt that prefill has computed and nobody can take keeps prefill's blocks for a lease. So a request waits here, in
front of prefill, until some decode worker has room; for `room_wait_s` at most, and not more than `max_waiting` at once.
"""

import time

from kvferry.http.errors import ApiError
from kvferry.router.policies import Wanted
from kvferry.router.shared import Attempts, Dispatcher
from kvferry.router.worker import Worker

__all__ = ["admit"]


async def admit(shared: Dispatcher, tried: Attempts, wanted: Wanted, model: str | None) -> Worker:
    """A decode worker that serves `model`. Raises ApiError if none can serve, or none has room in time."""
    fleet, settings = shared.fleet, shared.settings
    until_s: float | None = None
    while True:
        candidates: list[Worker] = []
        if len(tried.decode) < settings.max_attempts:
            candidates = fleet.serving(model, fleet.decode_candidates(tried.decode), fleet.decode)
        if not candidates:
            raise _nobody(shared, tried)
        roomy = [worker for worker in candidates if worker.has_room(wanted.num_tokens)]
        if roomy:
            return fleet.choose_decode(roomy, wanted)
        now_s = time.monotonic()
        if until_s is None:
            if shared.num_waiting >= settings.max_waiting:
                raise _full(candidates, f"and {shared.num_waiting} requests wait already")
            until_s = now_s + settings.room_wait_s
        if now_s >= until_s:
            raise _full(candidates, f"after {settings.room_wait_s:g} s")
        shared.num_waiting += 1
        try:
            await fleet.wait_change(until_s - now_s)
        finally:
            shared.num_waiting -= 1


def _full(candidates: list[Worker], more: str) -> ApiError:
    rooms = "; ".join(f"{worker.name} has {worker.free_blocks} free blocks" for worker in candidates)
    return ApiError(
        503,
        f"no decode worker has room for this prompt, {more} ({rooms}): try again later, or add a decode worker",
        kind="overloaded_error",
        code="overloaded",
        retry_after_s=1,
    )


def _nobody(shared: Dispatcher, tried: Attempts) -> ApiError:
    if tried.failures:
        failures = [failure for failure in tried.failures if failure.worker.wanted == "decode"]
        status = max((failure.status for failure in failures), default=502)
        text = "; ".join(f"decode {failure}" for failure in failures)
        retry = 1 if status == 503 else None
        return ApiError(status, f"{text}. Try again, or look at /v1/kvferry", code="worker_failed", retry_after_s=retry)
    reasons = "; ".join(worker.why_not_now() or worker.name for worker in shared.fleet.decode)
    return ApiError(
        503, f"no decode worker can serve: {reasons or 'none is configured'}. Start one, or look at /v1/kvferry",
        code="no_decode_worker", retry_after_s=1,
    )  # fmt: skip
