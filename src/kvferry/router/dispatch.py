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
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvferry.errors import MalformedMessage
from kvferry.router.accounting import note_answer, note_prefill
from kvferry.router.answer.account import HandoffOutcome, outcome_of
from kvferry.router.answer.first_event import early_event
from kvferry.router.answer.relay import from_prefill, relay
from kvferry.router.answer.reply import Reply
from kvferry.router.client_body import ClientBody, PrefillAnswer
from kvferry.router.context import RouterContext
from kvferry.router.fleet.failures import FailedAttempts, WorkerFailed
from kvferry.router.fleet.outcomes import Outcome
from kvferry.router.fleet.pair_records import Pair
from kvferry.router.fleet.worker import BlockReservation, Worker
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
from kvferry.router.upstream.worker_client import check_too_long
from kvferry.settings import Role
from kvferry.web.api_errors import ApiError, request_id_of
from kvferry.web.body_fields import Parts
from kvferry.web.records import DECODE_CHECKS, header_value

__all__ = ["Dispatch"]

logger = logging.getLogger(__name__)


class _Answered(Exception):  # not an error: it unwinds to the answer
    """Prefill's answer settles the request: `response` goes to the client."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response


class Dispatch:
    """Serves one request. `run` is called once. Cancelling it, as when the client hangs up, aborts every request to
    workers."""

    def __init__(self, context: RouterContext, request: web.Request, body: ClientBody, number: int) -> None:
        """`number` is the dispatch's number for observers."""
        self._context = context
        self._fleet = context.fleet
        self._metrics = context.metrics
        self._number = number
        self._request = request
        self._body = body
        self._failed = FailedAttempts()
        self._began_s = time.monotonic()
        self._reply = Reply(request, self._on_first_byte)
        self._prompt = context.prefixes.prompt(
            body.prompt_begin, body.prompt_size, body.num_prompt_ids, with_pieces=context.fleet.wants_pieces
        )
        self._offer: tuple[Worker, str] | None = None
        self._reservation: BlockReservation | None = None
        self._begun = False
        self._prefilled_s: float | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cut: ApiError | None = None
        self.served: dict[str, Field] = {}
        """How the request was served, as far as it is known; for observers."""

    async def run(self) -> web.StreamResponse:
        """Returns the answer to the client. Raises ApiError if no worker can give one."""
        self._body.check()
        self._task = asyncio.current_task()
        try:
            if self._body.max_tokens == 1 and self._body.indivisible_reason is None:
                await self._one_token()
            return await self._decode_somewhere()
        except _Answered as answered:
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
            self._give_up("no decode worker took it")

    def cut(self, error: ApiError) -> None:
        """Ends the request with an error, if it is still running. Called on the event loop; never blocks."""
        if self._task is not None and self._cut is None:
            self._cut = error
            self._task.cancel()

    # ---- decode ----

    async def _decode_somewhere(self) -> web.StreamResponse:
        outcome: PrefillOutcome | None = None
        while True:
            decode = await self._context.admission.admit(self._failed, self._prompt, self._body)
            prefill = None if outcome is None else outcome.prefill
            if prefill is not None and self._fleet.mismatch_reason(prefill, decode):
                outcome = None
                self._give_up("the other decode worker does not fit")
            if outcome is None and self._reply.started:
                raise self._cannot_go_on()
            with decode.reserving(self._prompt.num_tokens) as self._reservation:
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
                    self._note(failure, None if prefill is None else self._fleet.pairs.of(prefill, decode))
                    keep = self._reply.started and outcome is not None
                    if outcome is not None and not keep and (failure.reached or outcome.params is None):
                        outcome = None  # decode may have claimed the grant, so a new dispatch gets a new transfer id
                        self._give_up(f"decode {failure}")
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
        reasons = "; ".join(failures) if failures else self._fleet.no_prefill_reason(decode)
        return PrefillOutcome(reason="prefill " + reasons)

    async def _decode(self, decode: Worker, outcome: PrefillOutcome) -> web.StreamResponse:
        body = self._body.plain() if outcome.params is None else self._body.for_decode(outcome.params)
        route = "pull" if outcome.params is not None else "local" if outcome.local_prefill else "alone"
        headers = self._served_by(route, outcome.prefill, decode, outcome.reason)
        return await self._relay(decode, body, headers, route, prefill=outcome.prefill)

    async def _relay(
        self, worker: Worker, body: Parts, served: Mapping[str, str], route: str, *,
        prefill: Worker | None = None, request_id: str | None = None,
    ) -> web.StreamResponse:  # fmt: skip
        reason = {"x-kvferry-why": served["x-kvferry-why"]} if "x-kvferry-why" in served else {}
        stage = "prefill" if route == "prefill" else "decode"
        headers = self._headers(stage, request_id) | reason
        if self._reply.early is not None:
            headers["x-kvferry-first-token"] = "sent"  # decode continues from it, even if the hand-off fails
        self._emit(f"{stage}.sent", worker=worker.name)
        began_s = time.monotonic()
        worker.breaker.began(began_s)
        pair = self._fleet.pairs.of(prefill, worker) if prefill is not None else None
        if pair is not None:
            pair.open += 1
        try:
            async with self._context.upstream.post(
                worker, self._request.path, body, headers,
                headers_within_s=self._context.settings.first_byte_timeout_s,
            ) as answer:  # fmt: skip
                self._emit(f"{stage}.began", worker=worker.name, status=answer.status)
                if answer.status == 400 and self._longer_elsewhere(worker):
                    await check_too_long(worker, answer)

                def on_begin(headers: Mapping[str, str]) -> None:
                    nonlocal pair
                    self._begun = True
                    self._body.release()  # nothing is sent to another worker any more
                    if pair is not None:
                        pair.open -= 1
                        pair = None
                    self._on_begin(worker, prefill, headers, route, answer.status)

                return await relay(self._reply, worker, answer, served, on_begin)
        finally:
            if pair is not None:
                pair.open -= 1

    def _on_begin(
        self, worker: Worker, prefill: Worker | None, headers: Mapping[str, str], route: str, status: int
    ) -> None:
        """Notes that a worker's answer begins; `headers` are those for the client."""
        if self._reservation is not None:
            self._reservation.began_s = time.monotonic()
        if status < 400:
            self._note_served(worker)
            if outcome_of(headers) is not HandoffOutcome.FAILED:
                self._offer = None
        self.served |= {
            name.removeprefix("x-kvferry-").replace("-", "_"): value
            for name, value in headers.items()
            if "kvferry" in name
        }
        note_answer(
            self._context, prefill, worker, headers, route=route, status=status, streamed=self._reply.started,
            prefilled_s=self._prefilled_s,
        )  # fmt: skip

    def _on_first_byte(self, source: str) -> None:
        if self._reply.started:  # the first byte of any other answer comes at its end
            self._metrics.on_first_byte(time.monotonic() - self._began_s)
        self._emit("first_byte", source=source)

    # ---- prefill ----

    def _next_prefill(self, decode: Worker | None) -> Worker | None:
        if len(self._failed.prefill) >= self._context.settings.max_attempts:
            return None
        return self._fleet.pick_prefill(decode, self._failed.prefill, self._prompt, self._body.model)

    async def _prefill(self, prefill: Worker, decode: Worker) -> PrefillOutcome:
        """Has prefill compute the prompt. Raises _Answered if that settles the request, WorkerFailed if it failed."""
        raw, answer = await self._ask_prefill(prefill, new_transfer_id())
        if self._ends_with_first_token(answer, prefill):
            raise _Answered(await self._prefills_answer(raw, prefill))
        is_vllm = prefill.info is not None and prefill.info.kind == "vllm"
        if answer.params is None:
            stop = "its first token ended the first choice" if answer.stopped else "it returned no kv_transfer_params"
            self._offer = None
            return PrefillOutcome(reason=f"prefill {prefill.name}: {stop}")
        outcome = PrefillOutcome(prefill, answer.params)
        try:
            params = read_params(answer.params)
        except MalformedMessage as error:
            raise WorkerFailed(prefill, f"returned {error}", Outcome.UNREADABLE) from error
        if is_vllm:
            prefill.learn(identity_in(params))
        if params.first_token is not None and decode.can("first-token") and not self._too_long_for(decode):
            await self._send_first_token(raw, prefill, decode, "pull")
        return outcome

    def _ends_with_first_token(self, answer: PrefillAnswer, prefill: Worker) -> bool:
        """True if prefill's first token is the whole answer."""
        # For some models a vLLM server leaves the prompt's end to decode: its own token then comes from a shortened
        # prompt, and is not the answer's.
        is_vllm = prefill.info is not None and prefill.info.kind == "vllm"
        return answer.stopped and self._body.num_choices == 1 and not is_vllm

    async def _prefills_answer(self, raw: bytes, prefill: Worker) -> web.StreamResponse:
        """Answers with what prefill has answered."""
        self._metrics.on_route("prefill")
        self._offer = None
        self._note_served(prefill)
        return await from_prefill(self._reply, self._body, raw, self._served_by("prefill", prefill, None, ""))

    async def _send_first_token(self, raw: bytes, prefill: Worker, decode: Worker, route: str) -> None:
        """Begins the client's stream with prefill's token, if that can be sent alone."""
        if self._context.settings.first_token is not FirstToken.PREFILL or self._reply.started:
            return
        event = early_event(self._body, raw)
        if event is not None:
            served = self._served_by(route, prefill, decode, "") | {"x-kvferry-first-token": "prefill"}
            kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            await self._reply.start_early({**kind, **served, "X-Request-Id": request_id_of(self._request)}, event)

    async def _ask_prefill(
        self, prefill: Worker, transfer_id: str, request_id: str | None = None
    ) -> tuple[bytes, PrefillAnswer]:
        self._give_up("a new dispatch replaces it")
        self._offer = (prefill, transfer_id)
        headers = self._headers("prefill", request_id)
        if prefill.can("decode-checks"):
            headers[DECODE_CHECKS] = self._body.decode_checks(self._fleet.longest_request(self._body.model))
        if self._fleet.wants_pieces and prefill.can("prompt-blocks"):
            headers["x-kvferry-want"] = "prompt-blocks"
        self._emit("prefill.sent", worker=prefill.name, transfer_id=transfer_id)
        began_s = time.monotonic()
        prefill.breaker.began(began_s)
        async with self._context.upstream.post(
            prefill, self._request.path, self._body.for_prefill(transfer_id), headers,
            headers_within_s=self._context.settings.prefill_timeout_s,
        ) as response:  # fmt: skip
            if response.status == 400 and self._longer_elsewhere(prefill):
                await check_too_long(prefill, response)
            if response.status >= 400:  # the client's error: it would be the same anywhere
                self._offer = None
                served = self._served_by("prefill", prefill, None, "")
                raise _Answered(await relay(self._reply, prefill, response, served, _nothing))
            raw = await response.read()
        try:
            answer = msgspec.json.decode(raw, type=PrefillAnswer)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WorkerFailed(prefill, f"gave an answer that cannot be read: {error}", Outcome.UNREADABLE) from error
        prefill.breaker.succeeded()
        self._prefilled_s = time.monotonic()
        self._emit("prefill.answered", worker=prefill.name, status=200)
        after_s = self._prefilled_s - began_s
        note_prefill(self._context, prefill, answer, self._body, self._prompt, after_s)
        return raw, answer

    async def _one_token(self) -> None:
        """Has a prefill worker answer a request for one token, as an ordinary request. Returns if no prefill worker
        can; raises _Answered otherwise."""
        while (prefill := self._next_prefill(None)) is not None:
            headers = self._served_by("prefill", prefill, None, "")
            try:
                raise _Answered(await self._relay(prefill, self._body.plain(), headers, "prefill"))
            except WorkerFailed as failure:
                self._note(failure)

    # ---- push ----

    async def _push(self, prefill: Worker, decode: Worker) -> web.StreamResponse:
        """Sends to both at once. If prefill fails before decode has begun to answer, raises prefill's WorkerFailed."""
        transfer_id = new_transfer_id()
        # A vLLM server matches the two requests by this id, so it must be new; clients may send theirs again.
        is_vllm = prefill.info is not None and prefill.info.kind == "vllm"
        request_id = f"{request_id_of(self._request)}-{secrets.token_hex(4)}" if is_vllm else None
        chat = "chat" in self._request.path
        params = push_params(prefill, transfer_id, request_id or "", chat=chat)
        headers = self._served_by("push", prefill, decode, "", transfer_id)
        writing = asyncio.create_task(self._ask_prefill(prefill, transfer_id, request_id))
        reading = asyncio.create_task(
            self._relay(decode, self._body.for_decode(params), headers, "push", prefill=prefill, request_id=request_id)
        )
        try:
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and not reading.done() and not self._begun:
                # If prefill refuses the prompt, or fails, decode would wait for it in vain.
                await self._prefill_wrote(*writing.result(), prefill, decode)
            return await reading
        finally:
            await _end_tasks(writing, reading)

    async def _prefill_wrote(self, raw: bytes, answer: PrefillAnswer, prefill: Worker, decode: Worker) -> None:
        """Handles prefill's answer if decode has not begun. Raises WorkerFailed if decode was given the address of an
        earlier process of prefill."""
        if self._ends_with_first_token(answer, prefill) and not self._begun:
            raise _Answered(await self._prefills_answer(raw, prefill))
        if answer.params is None:
            return  # decode learns it from prefill itself, or computes the prompt
        params = read_params(answer.params)
        if prefill.info is not None and prefill.info.kind == "vllm":
            before, now = prefill.learned, identity_in(params)
            prefill.learn(now)
            if before is not None and (before.engine, before.port) != (now.engine, now.port):
                raise WorkerFailed(prefill, "has restarted: decode waits for another process", Outcome.RESTARTED)
        # If the hand-off fails, decode samples a token of its own: only a greedy one is the same again.
        if decode.can("first-token") and self._body.greedy and not self._begun:
            finish = answer.choices[0].finish_reason if answer.choices else None
            if finish in (None, "length"):
                await self._send_first_token(raw, prefill, decode, "push")

    # ---- common ----

    def _too_long_for(self, worker: Worker) -> bool:
        """True if the prompt and the answer are certainly too long for this worker."""
        return self._prompt.exact and worker.longest_request < self._body.num_needed(self._prompt.num_tokens)

    def _longer_elsewhere(self, worker: Worker) -> bool:
        """True if a worker that takes longer requests may be tried, after this one has refused the request."""
        failed, fleet = self._failed, self._fleet
        others = [one for one in fleet.decode if one not in failed.decode]
        if worker.assigned_role is Role.PREFILL:
            others += [one for one in fleet.prefill if one not in failed.prefill]
        others = fleet.serving(self._body.model, others, fleet.workers)
        return any(one.unusable_reason is None and one.longest_request > worker.longest_request for one in others)

    def _give_up(self, reason: str) -> None:
        """Tells prefill that the hand-off that it may have offered will not be taken."""
        if self._offer is not None:
            (prefill, transfer_id), self._offer = self._offer, None
            if prefill.info is not None and prefill.info.kind == "vllm":
                return  # it has no such endpoint; the lease ends the hand-off
            self._context.releases.release_soon(prefill, transfer_id, reason)
            self._emit("released", worker=prefill.name, transfer_id=transfer_id, cause=reason)

    def _headers(self, stage: str, request_id: str | None = None) -> dict[str, str]:
        asked = self._request.headers
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id or request_id_of(self._request)}
        for name in ("traceparent", "tracestate"):
            if name in asked:
                headers[name] = asked[name]
        if self._context.worker_key is not None:
            headers["Authorization"] = f"Bearer {self._context.worker_key}"
        elif "Authorization" in asked:
            headers["Authorization"] = asked["Authorization"]
        if self._context.observers:
            headers |= self._context.observers.worker_headers(self._number, stage)
        return headers

    def _served_by(
        self, route: str, prefill: Worker | None, decode: Worker | None, reason: str, transfer_id: str = ""
    ) -> dict[str, str]:
        values = {
            "route": route,
            "prefill": prefill.name if prefill else "",
            "decode": decode.name if decode else "",
            "why": reason,
        }
        self._emit("chosen", **values, transfer_id=transfer_id)
        return {f"x-kvferry-{name}": header_value(value) for name, value in values.items() if value}

    def _emit(self, name: str, /, **fields: Field) -> None:
        if self._context.observers:
            self._context.observers.emit(self._number, name, **fields)

    def _note(self, failure: WorkerFailed, pair: Pair | None = None) -> None:
        """Notes a failed attempt. Raises ApiError if no other worker may be tried."""
        worker, stage = failure.worker, str(failure.worker.assigned_role)
        if self._failed.note(failure, time.monotonic(), pair):
            logger.warning("worker left alone peer=%s cause=%s", worker.name, failure)
        if stage == "prefill" and (failure.consequence.reported or not failure.reached):
            self._offer = None  # it has offered nothing
        elif stage == "prefill":
            self._give_up(str(failure))
        self._metrics.on_failure(worker.url, stage)
        self._emit("failed", worker=worker.name, stage=stage, cause=str(failure))
        logger.warning(
            "worker failed request=%s peer=%s stage=%s outcome=%r cause=%s", request_id_of(self._request), worker.name,
            stage, str(failure.outcome), failure,
        )  # fmt: skip
        if failure.outcome is Outcome.UNREACHABLE:
            self._fleet.mark_down(worker, failure.reason)
        self._failed.check_retry()

    def _note_served(self, worker: Worker) -> None:
        """Notes that a worker serves the request."""
        worker.breaker.succeeded()
        for failed in self._failed.served(worker, time.monotonic()):
            logger.warning("worker left alone peer=%s cause=%s", failed.name, failed.breaker.reason)


def _nothing(_: Mapping[str, str]) -> None:
    """Ignores the headers: a client's error has no route."""


async def _end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
