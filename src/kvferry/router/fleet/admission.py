"""Admission: picks a decode worker that has room for a request's prompt, before prefill is given any work.

A prompt that prefill has computed and no decode worker can take would occupy prefill's blocks for a whole lease. So a
request waits here, before prefill, until a decode worker has room: for `room_wait_s` at most, and with at most
`max_waiting` requests waiting at once.

A large prompt may never find room at once while small ones take each block that becomes free. So a request that has
waited for `room_turn_s` gets a *turn*, the oldest first and one per decode worker: it is prefilled and sent to the
worker without room. The worker then keeps the order, because only it knows how long its answers still are: small
requests are not held for as long as an answer takes, and do not pass for ever (`--overtake`; a vLLM server lets none
pass).

If all decode workers have just gone, requests wait here too, for `restart_wait_s` since the last of them went. So a
restart of all of them fails no request whose answer has not begun.
"""

import itertools
import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvferry.router.fleet.failures import FailedAttempts
from kvferry.router.fleet.model_names import check_model
from kvferry.router.fleet.policies import PromptEstimate
from kvferry.router.fleet.worker import BlockReservation, Worker
from kvferry.router.fleet.workers import Fleet, long_enough
from kvferry.router.settings import RouterSettings
from kvferry.web.api_errors import ApiError

__all__ = ["Admission", "Demand", "Place"]


class Demand(Protocol):
    """What a request asks of a worker."""

    @property
    def model(self) -> str | None:
        """The model's name, if the client sent one."""
        ...

    def num_needed(self, num_prompt_tokens: int) -> int:
        """Returns the number of tokens of the prompt and the answer together."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request may go."""

    worker: Worker
    has_room: bool
    """False: it has its turn, and waits in the worker for room."""

    def taking(self, num_tokens: int) -> AbstractContextManager[BlockReservation]:
        """Returns a context within which the place is taken, for a prompt of this length."""
        return self.worker.reserving(num_tokens) if self.has_room else self.worker.waiting_there()


class Admission:
    """Admits requests to decode workers. There is one per router; it runs on the event loop."""

    def __init__(self, fleet: Fleet, settings: RouterSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self.num_waiting = 0
        """The number of requests that wait here for room on decode, or for a decode worker to come back."""
        self._numbers = itertools.count()
        self._without_room: dict[int, list[Worker]] = {}
        """The requests that have found no room, with the workers that could hold them; the oldest first."""

    async def admit(self, failed: FailedAttempts, prompt: PromptEstimate, request: Demand) -> Place:
        """Returns a place on a decode worker that serves the model, with room or with a turn. Raises ApiError if there
        is none in time."""
        number = next(self._numbers)
        try:
            return await self._admit(number, failed, prompt, request)
        finally:
            self._without_room.pop(number, None)

    async def _admit(self, number: int, failed: FailedAttempts, prompt: PromptEstimate, request: Demand) -> Place:
        fleet, settings, model = self._fleet, self._settings, request.model
        since_s: float | None = None
        while True:
            _forgive(failed)
            candidates: list[Worker] = []
            if len(failed.of_decode) < settings.max_attempts:
                candidates = fleet.decode_candidates(failed.decode, model)
            num_needed = request.num_needed(prompt.num_tokens)
            candidates = self._long_enough(candidates, num_needed, prompt, model)
            # No room is free for what no worker can ever hold: waiting for it would help no one.
            roomy = [
                worker
                for worker in candidates
                if worker.longest_request < num_needed or worker.has_room(prompt.num_tokens)
            ]
            if roomy:
                quiet = [worker for worker in roomy if not worker.has_turn]
                return Place(fleet.choose_decode(quiet or roomy, prompt), has_room=True)
            now_s = time.monotonic()
            if not candidates:
                self._without_room.pop(number, None)
                await self._wait_for_workers(failed, model, now_s)
                continue
            if since_s is None:
                since_s = now_s
            self._without_room[number] = candidates
            turns = self._turns(number, candidates) if now_s >= since_s + settings.room_turn_s else []
            if turns:
                return Place(fleet.choose_decode(turns, prompt), has_room=False)
            if now_s == since_s and self.num_waiting >= settings.max_waiting:
                raise _no_room(candidates, f"and {self.num_waiting} requests wait already")
            if now_s >= since_s + settings.room_wait_s:
                raise _no_room(candidates, f"after {settings.room_wait_s:g} s")
            due_s = [since_s + one for one in (settings.room_turn_s, settings.room_wait_s) if since_s + one > now_s]
            await self._wait(min(due_s) - now_s)

    def _turns(self, number: int, candidates: list[Worker]) -> list[Worker]:
        """Returns those of `candidates` at which this request may wait: no request waits there, and no older one here
        could."""
        older = {worker for one, others in self._without_room.items() if one < number for worker in others}
        return [worker for worker in candidates if not worker.has_turn and worker not in older]

    async def _wait_for_workers(self, failed: FailedAttempts, model: str | None, now_s: float) -> None:
        """Waits for a decode worker to come back. Raises ApiError if it is too late for that."""
        fleet, settings = self._fleet, self._settings
        back_by_s = max(fleet.last_lost_s(model), self._unsure_since_s(failed)) + settings.restart_wait_s
        if now_s >= back_by_s or len(failed.of_decode) >= settings.max_attempts:
            if model is not None and await check_model(fleet, model):
                return
            raise self._no_decode_worker(failed)
        if self.num_waiting >= settings.max_waiting:
            raise self._no_decode_worker(failed, f"; {self.num_waiting} requests wait for one already")
        await self._wait(back_by_s - now_s)

    def _long_enough(
        self, candidates: list[Worker], num_needed: int, prompt: PromptEstimate, model: str | None
    ) -> list[Worker]:
        """Returns those candidates that can hold the request. Raises ApiError 400 if no worker of the fleet can, tried
        or not, down or not."""
        able = long_enough(candidates, num_needed, exact=prompt.exact)
        everyone = self._fleet.serving(model, self._fleet.decode)
        longest = max((worker.longest_request for worker in everyone), default=math.inf)
        if able or longest >= num_needed:
            return able
        if not candidates:
            return []
        raise ApiError(
            400,
            f"the prompt has {prompt.num_tokens} tokens, max_tokens is {num_needed - prompt.num_tokens}, and no decode "
            f"worker takes more than {longest:g} together: shorten the prompt, lower max_tokens, or serve with a "
            "larger --max-model-len or --cache-gb",
            code="context_length_exceeded",
        )

    def _unsure_since_s(self, failed: FailedAttempts) -> float:
        """Returns when the latest worker failed of those that may have gone with their failure, and has each asked at
        once, so that it becomes known whether it has."""
        latest_s = -math.inf
        for failure in failed.of_decode:
            worker, failed_s = failure.worker, failed.decode.get(failure.worker)
            if failed_s is None or worker.unusable_reason is not None or failure.consequence.goes_on:
                continue
            if worker.report.asked_s <= failed_s:
                self._fleet.ask_soon(worker)
                latest_s = max(latest_s, failed_s)
        return latest_s

    async def _wait(self, longest_s: float) -> None:
        self.num_waiting += 1
        try:
            await self._fleet.wait_change(longest_s)
        finally:
            self.num_waiting -= 1

    def _no_decode_worker(self, failed: FailedAttempts, more: str = "") -> ApiError:
        failures = failed.of_decode
        if failures:
            text = "; ".join(f"decode {failure}" for failure in failures)
            worst = max((failure.consequence for failure in failures), key=lambda one: one.status)
            return ApiError(
                worst.status, f"{text}{more}. Try again, or look at /v1/kvferry", code=worst.code, retry_after_s=1
            )
        decode = self._fleet.decode
        reasons = [worker.unavailable_reason() or f"{worker.name} serves another model" for worker in decode]
        reasons += [f"and prefill {failure}" for failure in failed.failures]
        return ApiError(
            503,
            f"no decode worker can serve: {'; '.join(reasons) or 'none is configured'}{more}. "
            "Start one, or look at /v1/kvferry",
            code="no_decode_worker", retry_after_s=1,
        )  # fmt: skip


def _forgive(failed: FailedAttempts) -> None:
    """Allows another try of workers that have come up since they failed: they hold nothing of this request."""
    for worker in [worker for worker, failed_s in failed.decode.items() if worker.up_s > failed_s]:
        del failed.decode[worker]


def _no_room(candidates: list[Worker], more: str) -> ApiError:
    rooms = "; ".join(f"{worker.name} has {worker.free_blocks} free blocks" for worker in candidates)
    return ApiError(
        503,
        f"no decode worker has room for this prompt, {more} ({rooms}): try again later, or add a decode worker",
        kind="overloaded_error",
        code="overloaded",
        retry_after_s=1,
    )
