"""One request's way through the fleet. The routes are:

pull     A decode worker with room is chosen, then a prefill worker that fits it. Prefill computes the prompt and its
         first token, which goes to the client. Decode gets the client's body with prefill's `kv_transfer_params`, byte
         for byte. This is also the route while a worker's mode is not known yet: the parameters reveal it.
push     Both workers get their bodies at once, with one transfer id, so that decode's registration overlaps prefill.
local    Decode computes the prompt by choice: it is short, or one worker must compute all of it.
alone    No prefill worker fits or answers: decode gets the client's body, and its answer says why (decode-only).
prefill  The first token is the whole answer (it stopped, or one token was asked for): decode is never asked.

Failures, as long as nothing has gone to the client: if prefill fails, another prefill worker is tried, else decode
serves alone. If decode fails, another decode worker is tried: with the same hand-off if the failed one was never
reached, else with a new one. After prefill's first token was sent, another decode worker may still continue from it,
with the same hand-off. After decode's own bytes nothing is replayed.

If prefill may have offered a hand-off, and no decode worker has begun to answer with it when the request ends or a new
dispatch replaces it, then prefill is informed that it will not be taken (`upstream.releases`).

How one worker is asked, and what is noted of it, is in `calls`.
"""

import asyncio
import secrets
import time
from typing import Any

from aiohttp import web

from kvferry.errors import MalformedMessage
from kvferry.router.answer.first_event import early_event
from kvferry.router.answer.relay import from_prefill
from kvferry.router.calls import Answered, WorkerCalls
from kvferry.router.client_body import ClientBody, PrefillAnswer
from kvferry.router.context import RouterContext
from kvferry.router.fleet.failures import WorkerFailed
from kvferry.router.fleet.outcomes import Outcome
from kvferry.router.fleet.worker import Worker
from kvferry.router.handoff_params import (
    PrefillOutcome,
    can_push,
    identity_in,
    new_transfer_id,
    push_params,
    read_params,
)
from kvferry.router.observe.observer import Field
from kvferry.router.settings import FirstToken
from kvferry.web.api_errors import ApiError, request_id_of

__all__ = ["Dispatch"]


class Dispatch:
    """Serves one request. `run` is called once. Cancelling it, as when the client hangs up, aborts every request to
    workers."""

    def __init__(self, context: RouterContext, request: web.Request, body: ClientBody, number: int) -> None:
        """`number` is the dispatch's number for observers."""
        self._context = context
        self._fleet = context.fleet
        self._request = request
        self._body = body
        self._calls = WorkerCalls(context, request, body, number)
        self._failed = self._calls.failed
        self._reply = self._calls.reply
        self._prompt = self._calls.prompt
        self._task: asyncio.Task[Any] | None = None
        self._cut: ApiError | None = None

    @property
    def served(self) -> dict[str, Field]:
        """How the request was served, as far as it is known; for observers."""
        return self._calls.served

    async def run(self) -> web.StreamResponse:
        """Returns the answer to the client. Raises ApiError if no worker can give one."""
        self._body.check()
        self._task = asyncio.current_task()
        try:
            if self._body.max_tokens == 1 and self._body.indivisible_reason is None:
                await self._one_token()
            return await self._decode_somewhere()
        except Answered as answered:
            return answered.response
        except ApiError as error:
            if not self._reply.started:
                raise
            return await self._reply.fail(error)
        except asyncio.CancelledError:
            if self._cut is None or self._task is None or self._task.uncancel():
                raise  # the client has hung up
            if not self._reply.started:
                raise self._cut from None
            return await self._reply.fail(self._cut)
        finally:
            self._task = None
            self._calls.give_up("no decode worker took it")

    def cut(self, error: ApiError) -> None:
        """Ends the request with an error, if it is still running. Called on the event loop; never blocks."""
        if self._task is not None and self._cut is None:
            self._cut = error
            self._task.cancel()

    # ---- decode ----

    async def _decode_somewhere(self) -> web.StreamResponse:
        outcome: PrefillOutcome | None = None
        while True:
            place = await self._context.admission.admit(self._failed, self._prompt, self._body)
            decode = place.worker
            prefill = None if outcome is None else outcome.prefill
            if prefill is not None and self._fleet.mismatch_reason(prefill, decode):
                outcome = None
                self._calls.give_up("the other decode worker does not fit")
            if outcome is None and self._reply.started:
                raise self._cannot_go_on()
            with place.taking(self._prompt.num_tokens) as self._calls.reservation:
                try:
                    if outcome is None:
                        outcome = self._choose_local_prefill(decode)
                    if outcome is None and (prefill := self._next_prefill(decode)) is not None:
                        if can_push(prefill, decode):
                            return await self._push(prefill, decode)
                        outcome = await self._prefill(prefill, decode)
                        if self._too_long_for(decode):  # now the prompt's length is known, and nothing was sent there
                            self._failed.decode[decode] = time.monotonic()
                            continue
                    if outcome is None:
                        outcome = self._decode_only(decode)
                    return await self._decode(decode, outcome)
                except WorkerFailed as failure:
                    self._calls.note(failure, None if prefill is None else self._fleet.pairs.of(prefill, decode))
                    keep = self._reply.started and outcome is not None
                    if outcome is not None and not keep and (failure.reached or outcome.params is None):
                        outcome = None  # decode may have claimed the grant, so a new dispatch gets a new transfer id
                        self._calls.give_up(f"decode {failure}")
                finally:
                    if self._context.admission.num_waiting:
                        self._fleet.ask_soon(decode)

    def _cannot_go_on(self) -> ApiError:
        failures = "; ".join(str(failure) for failure in self._failed.failures) or "cannot go on from prefill's token"
        return ApiError(
            502, f"decode {failures}; the answer is incomplete: send the request again", code="worker_failed"
        )

    def _choose_local_prefill(self, decode: Worker) -> PrefillOutcome | None:
        """Returns a local prefill if decode should compute the prompt by choice, else None."""
        body = self._body
        reason = body.indivisible_reason
        if reason is None and body.num_choices > 1 and not decode.shares_handoffs:
            reason = f"n={body.num_choices}: a hand-off to a vLLM server without kvferry's connector carries one choice"
        if reason is None and (below := self._context.cost.local_below_tokens):
            uncached = self._prompt.num_tokens - self._prompt.num_cached(decode)
            if uncached < below and not self._context.cost.probe():
                reason = f"about {uncached} of its tokens are not in decode's cache, and a hand-off pays from {below}"
        return None if reason is None else PrefillOutcome(reason=reason, local_prefill=True)

    def _decode_only(self, decode: Worker) -> PrefillOutcome:
        """Returns the reason why no worker can prefill for `decode`."""
        failures = [str(failure) for failure in self._failed.failures if failure.worker.assigned_role == "prefill"]
        if not failures and not self._fleet.prefill:
            return PrefillOutcome(reason="no prefill worker is configured")
        reasons = "; ".join(failures) if failures else self._fleet.no_prefill_reason(decode, self._body.model)
        return PrefillOutcome(reason="prefill " + reasons)

    async def _decode(self, decode: Worker, outcome: PrefillOutcome) -> web.StreamResponse:
        if outcome.params is None:
            body = self._body.plain(self._calls.sources(decode) if self._body.num_prompts == 1 else ())
        else:
            body = self._body.for_decode(outcome.params)
        route = "pull" if outcome.params is not None else "local" if outcome.local_prefill else "alone"
        headers = self._calls.served_by(route, outcome.prefill, decode, outcome.reason)
        return await self._calls.relay(decode, body, headers, route, prefill=outcome.prefill)

    # ---- prefill ----

    def _next_prefill(self, decode: Worker | None) -> Worker | None:
        if len(self._failed.prefill) >= self._context.settings.max_attempts:
            return None
        return self._fleet.pick_prefill(decode, self._failed.prefill, self._prompt, self._body.model)

    async def _prefill(self, prefill: Worker, decode: Worker) -> PrefillOutcome:
        """Has prefill compute the prompt. Raises Answered if that settles the request, WorkerFailed if it failed."""
        raw, answer = await self._calls.ask_prefill(prefill, new_transfer_id())
        if self._ends_with_first_token(answer, prefill):
            raise Answered(await self._prefills_answer(raw, prefill))
        if answer.params is None:
            stop = "its first token ended the first choice" if answer.stopped else "it returned no kv_transfer_params"
            self._calls.settled()
            return PrefillOutcome(reason=f"prefill {prefill.name}: {stop}")
        outcome = PrefillOutcome(prefill, answer.params)
        try:
            params = read_params(answer.params)
        except MalformedMessage as error:
            raise WorkerFailed(prefill, f"returned {error}", Outcome.UNREADABLE) from error
        if prefill.is_vllm:
            prefill.learn(identity_in(params))
        if params.first_token is not None and decode.can("first-token") and not self._too_long_for(decode):
            await self._send_first_token(raw, prefill, decode, "pull")
        return outcome

    def _ends_with_first_token(self, answer: PrefillAnswer, prefill: Worker) -> bool:
        """True if prefill's first token is the whole answer."""
        # For some models a vLLM server leaves the prompt's end to decode: its own token then comes from a shortened
        # prompt, and is not the answer's.
        return answer.stopped and self._body.num_choices == 1 and not prefill.is_vllm

    async def _prefills_answer(self, raw: bytes, prefill: Worker) -> web.StreamResponse:
        """Answers with what prefill has answered."""
        self._context.metrics.on_route("prefill")
        self._calls.settled()
        self._calls.note_served(prefill)
        return await from_prefill(self._reply, self._body, raw, self._calls.served_by("prefill", prefill, None, ""))

    async def _send_first_token(self, raw: bytes, prefill: Worker, decode: Worker, route: str) -> None:
        """Begins the client's stream with prefill's token, if that can be sent alone."""
        if self._context.settings.first_token is not FirstToken.PREFILL or self._reply.started:
            return
        event = early_event(self._body, raw)
        if event is not None:
            served = self._calls.served_by(route, prefill, decode, "") | {"x-kvferry-first-token": "prefill"}
            kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            await self._reply.start_early({**kind, **served, "X-Request-Id": request_id_of(self._request)}, event)

    async def _one_token(self) -> None:
        """Has a prefill worker answer a request for one token, as an ordinary request. Returns if no prefill worker
        can; raises Answered otherwise."""
        while (prefill := self._next_prefill(None)) is not None:
            headers = self._calls.served_by("prefill", prefill, None, "")
            try:
                raise Answered(await self._calls.relay(prefill, self._body.plain(), headers, "prefill"))
            except WorkerFailed as failure:
                self._calls.note(failure)

    # ---- push ----

    async def _push(self, prefill: Worker, decode: Worker) -> web.StreamResponse:
        """Sends to both at once. If prefill fails before decode has begun to answer, raises prefill's WorkerFailed."""
        transfer_id = new_transfer_id()
        # A vLLM server matches the two requests by this id, so it must be new; clients may send theirs again.
        request_id = f"{request_id_of(self._request)}-{secrets.token_hex(4)}" if prefill.is_vllm else None
        chat = "chat" in self._request.path
        params = push_params(prefill, transfer_id, request_id or "", chat=chat)
        headers = self._calls.served_by("push", prefill, decode, "", transfer_id)
        writing = asyncio.create_task(self._calls.ask_prefill(prefill, transfer_id, request_id))
        reading = asyncio.create_task(
            self._calls.relay(
                decode, self._body.for_decode(params), headers, "push", prefill=prefill, request_id=request_id
            )
        )
        try:
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and not reading.done() and not self._calls.begun:
                # If prefill refuses the prompt, or fails, decode would wait for it in vain.
                await self._prefill_wrote(*writing.result(), prefill, decode)
            return await reading
        finally:
            await _end_tasks(writing, reading)

    async def _prefill_wrote(self, raw: bytes, answer: PrefillAnswer, prefill: Worker, decode: Worker) -> None:
        """Handles prefill's answer if decode has not begun. Raises WorkerFailed if decode was given the address of an
        earlier process of prefill."""
        if self._ends_with_first_token(answer, prefill) and not self._calls.begun:
            raise Answered(await self._prefills_answer(raw, prefill))
        if answer.params is None:
            return  # decode learns it from prefill itself, or computes the prompt
        params = read_params(answer.params)
        if prefill.is_vllm:
            before, now = prefill.learned, identity_in(params)
            prefill.learn(now)
            if before is not None and (before.engine, before.port) != (now.engine, now.port):
                raise WorkerFailed(prefill, "has restarted: decode waits for another process", Outcome.RESTARTED)
        # If the hand-off fails, decode samples a token of its own: only a greedy one is the same again.
        if decode.can("first-token") and self._body.greedy and not self._calls.begun:
            finish = answer.choices[0].finish_reason if answer.choices else None
            if finish in (None, "length"):
                await self._send_first_token(raw, prefill, decode, "push")

    # ---- common ----

    def _too_long_for(self, worker: Worker) -> bool:
        """True if the prompt and the answer are certainly too long for this worker."""
        return self._prompt.exact and worker.longest_request < self._body.num_needed(self._prompt.num_tokens)


async def _end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
