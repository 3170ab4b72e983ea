"""Which decode worker takes a request, with room for its prompt: asked before prefill is given work.

A prompt that prefill has computed and nobody can take keeps prefill's blocks for a lease. So a request waits here, in
front of prefill, until some decode worker has room; for `room_wait_s` at most, and not more than `max_waiting` at once.

Where every decode worker has gone a moment ago, it waits here too, for `restart_wait_s` since then: a restart of all of
them fails no request that has not begun to be answered.
"""

import math
import time

from kvferry.router.context import Attempts, RouterContext
from kvferry.router.fleet.policies import Wanted
from kvferry.router.fleet.worker import Worker
from kvferry.web.api_errors import ApiError

__all__ = ["admit"]


async def admit(shared: RouterContext, tried: Attempts, wanted: Wanted, model: str | None) -> Worker:
    """A decode worker that serves `model`. Raises ApiError if none can serve, or none has room in time."""
    fleet, settings = shared.fleet, shared.settings
    until_s: float | None = None
    while True:
        _forgive(tried)
        candidates: list[Worker] = []
        if len(tried.of_decode) < settings.max_attempts:
            candidates = fleet.serving(model, fleet.decode_candidates(tried.decode), fleet.decode)
        roomy = [worker for worker in candidates if worker.has_room(wanted.num_tokens)]
        if roomy:
            return fleet.choose_decode(roomy, wanted)
        now_s = time.monotonic()
        if not candidates:
            back_by_s = max(fleet.last_lost_s(model), _unsure_since_s(shared, tried)) + settings.restart_wait_s
            if now_s >= back_by_s or len(tried.of_decode) >= settings.max_attempts:
                raise _nobody(shared, tried)
            if shared.num_waiting >= settings.max_waiting:
                raise _nobody(shared, tried, f"; {shared.num_waiting} requests wait for one already")
            await _wait(shared, back_by_s - now_s)
            continue
        if until_s is None:
            if shared.num_waiting >= settings.max_waiting:
                raise _full(candidates, f"and {shared.num_waiting} requests wait already")
            until_s = now_s + settings.room_wait_s
        if now_s >= until_s:
            raise _full(candidates, f"after {settings.room_wait_s:g} s")
        await _wait(shared, until_s - now_s)


def _forgive(tried: Attempts) -> None:
    """Workers that have come up since they failed this request may have it again: nothing of it is left there."""
    for worker in [worker for worker, failed_s in tried.decode.items() if worker.up_s > failed_s]:
        del tried.decode[worker]


def _unsure_since_s(shared: RouterContext, tried: Attempts) -> float:
    """When the latest of those failed that may have gone with it: they are asked at once, and then it is known."""
    latest_s = -math.inf
    for failure in tried.of_decode:
        worker, failed_s = failure.worker, tried.decode.get(failure.worker)
        if failed_s is None or worker.why_unusable is not None or (failure.answered and failure.status != 503):
            continue
        if worker.report.asked_s <= failed_s:
            shared.fleet.ask_soon(worker)
            latest_s = max(latest_s, failed_s)
    return latest_s


async def _wait(shared: RouterContext, longest_s: float) -> None:
    shared.num_waiting += 1
    try:
        await shared.fleet.wait_change(longest_s)
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


def _nobody(shared: RouterContext, tried: Attempts, more: str = "") -> ApiError:
    failures = tried.of_decode
    if failures:
        text = "; ".join(f"decode {failure}" for failure in failures)
        return ApiError(
            max(failure.status for failure in failures), f"{text}{more}. Try again, or look at /v1/kvferry",
            code="worker_failed", retry_after_s=1,
        )  # fmt: skip
    reasons = [worker.why_not_now() or f"{worker.name} serves another model" for worker in shared.fleet.decode]
    reasons += [f"and prefill {failure}" for failure in tried.failures]
    return ApiError(
        503,
        f"no decode worker can serve: {'; '.join(reasons) or 'none is configured'}{more}. "
        "Start one, or look at /v1/kvferry",
        code="no_decode_worker", retry_after_s=1,
    )  # fmt: skip
