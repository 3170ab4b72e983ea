"""The calls of one request to workers: what is sent with each, and what is noted when it is answered or fails.

`dispatch` decides which worker is asked for what. This module knows how one is asked: the headers, the observers'
events, the breakers, the pair's counters, and the hand-off that prefill may have offered and that has to be given up if
no decode worker takes it (`upstream.releases`).
"""

import logging
import time
from collections.abc import Mapping

import msgspec
from aiohttp import web

from kvferry.router.accounting import note_answer, note_length, note_prefill
from kvferry.router.answer.account import HandoffOutcome, outcome_of
from kvferry.router.answer.relay import relay
from kvferry.router.answer.reply import Reply
from kvferry.router.answer.usage import TokenCounter
from kvferry.router.client_body import ClientBody, PrefillAnswer
from kvferry.router.context import RouterContext
from kvferry.router.fleet.failures import FailedAttempts, WorkerFailed
from kvferry.router.fleet.outcomes import Outcome
from kvferry.router.fleet.pair_records import Pair
from kvferry.router.fleet.worker import BlockReservation, Worker
from kvferry.router.observe.observer import Field
from kvferry.router.sources import fetch_sources
from kvferry.router.upstream.worker_client import check_too_long
from kvferry.settings import Role
from kvferry.web.api_errors import request_id_of
from kvferry.web.body_fields import Parts
from kvferry.web.records import CREATED, DECODE_CHECKS, header_value

__all__ = ["Answered", "WorkerCalls"]

logger = logging.getLogger(__name__)


class Answered(Exception):  # not an error: it unwinds to the answer
    """A worker's answer settles the request: `response` goes to the client."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response


class WorkerCalls:
    """Calls workers for one request, and keeps what has become of these calls. Used on the event loop; in push mode two
    tasks use it at once."""

    def __init__(self, context: RouterContext, request: web.Request, body: ClientBody, number: int) -> None:
        """`number` is the dispatch's number for observers."""
        self._context = context
        self._number = number
        self._request = request
        self._body = body
        self._began_s = time.monotonic()
        self._created = str(int(time.time()))
        self._offer: tuple[Worker, str] | None = None
        self._prefilled_s: float | None = None
        self.failed = FailedAttempts()
        self.reply = Reply(request, self._on_first_byte)
        self.prompt = context.prefixes.prompt(
            body.prompt_begin, body.prompt_size, body.num_prompt_ids, with_pieces=context.fleet.wants_pieces
        )
        self.reservation: BlockReservation | None = None
        """The room that is reserved on the decode worker that is being asked."""
        self.begun = False
        """True once a worker's answer to the client has begun."""
        self.served: dict[str, Field] = {}
        """How the request was served, as far as it is known; for observers."""

    # ---- calls ----

    async def relay(
        self, worker: Worker, body: Parts, served: Mapping[str, str], route: str, *,
        prefill: Worker | None = None, request_id: str | None = None,
    ) -> web.StreamResponse:  # fmt: skip
        """Sends `body` to a worker and passes its answer on to the client. Raises WorkerFailed only while nothing of
        the answer has gone to the client."""
        reason = {"x-kvferry-why": served["x-kvferry-why"]} if "x-kvferry-why" in served else {}
        stage = "prefill" if route == "prefill" else "decode"
        headers = self._headers(stage, request_id) | reason
        if self.reply.early is not None:
            headers["x-kvferry-first-token"] = "sent"  # decode continues from it, even if the hand-off fails
        self._emit(f"{stage}.sent", worker=worker.name)
        began_s = time.monotonic()
        worker.breaker.began(began_s)
        pair = self._context.fleet.pairs.of(prefill, worker) if prefill is not None else None
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
                    self.begun = True
                    self._body.release()  # nothing is sent to another worker any more
                    if pair is not None:
                        pair.open -= 1
                        pair = None
                    self._on_begin(worker, prefill, headers, route, answer.status)

                counter = TokenCounter() if self._context.fleet.wants_pieces else None
                response = await relay(self.reply, worker, answer, served, on_begin, counter)
                if answer.status < 400:
                    self._context.prefixes.served(self.prompt, worker, counter.num_tokens if counter else 0)
                return response
        finally:
            if pair is not None:
                pair.open -= 1

    async def ask_prefill(
        self, prefill: Worker, transfer_id: str, request_id: str | None = None
    ) -> tuple[bytes, PrefillAnswer]:
        """Has a worker compute the prompt for a hand-off. Returns its answer as it came and as it was read. Raises
        Answered if it has refused the request, WorkerFailed if it has failed."""
        self.give_up("a new dispatch replaces it")
        self._offer = (prefill, transfer_id)
        headers = self._headers("prefill", request_id)
        checks = prefill.can("decode-checks")
        if checks:
            headers[DECODE_CHECKS] = self._body.decode_checks(self._context.fleet.longest_request(self._body.model))
        if self._context.fleet.wants_pieces and prefill.can("prompt-blocks"):
            headers["x-kvferry-want"] = "prompt-blocks"
        self._emit("prefill.sent", worker=prefill.name, transfer_id=transfer_id)
        began_s = time.monotonic()
        prefill.breaker.began(began_s)
        async with self._context.upstream.post(
            prefill, self._request.path,
            self._body.for_prefill(transfer_id, checks_options=checks, sources=self.sources(prefill)), headers,
            headers_within_s=self._context.settings.prefill_timeout_s,
        ) as response:  # fmt: skip
            if response.status == 400 and self._longer_elsewhere(prefill):
                await check_too_long(prefill, response)
            if response.status >= 400:  # the client's error: it would be the same anywhere
                self.settled()
                served = self.served_by("prefill", prefill, None, "")
                raise Answered(await relay(self.reply, prefill, response, served, _nothing))
            raw = await response.read()
        try:
            answer = msgspec.json.decode(raw, type=PrefillAnswer)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WorkerFailed(prefill, f"gave an answer that cannot be read: {error}", Outcome.UNREADABLE) from error
        prefill.breaker.succeeded()
        self._prefilled_s = time.monotonic()
        self._emit("prefill.answered", worker=prefill.name, status=200)
        after_s = self._prefilled_s - began_s
        note_prefill(self._context, prefill, answer, self._body, self.prompt, after_s)
        self._context.prefixes.served(self.prompt, prefill, 0)
        return raw, answer

    def sources(self, fetcher: Worker) -> list[dict[str, object]]:
        """Returns the workers from which this one may fetch the prompt's first tokens."""
        return fetch_sources(self.prompt, fetcher, self._context.fleet.workers, self._context.settings.fetch)

    def _headers(self, stage: str, request_id: str | None = None) -> dict[str, str]:
        asked = self._request.headers
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id or request_id_of(self._request)}
        headers[CREATED] = self._created
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

    def _longer_elsewhere(self, worker: Worker) -> bool:
        """True if a worker that takes longer requests may be tried, after this one has refused the request."""
        failed, fleet = self.failed, self._context.fleet
        others = [one for one in fleet.decode if one not in failed.decode]
        if worker.assigned_role is Role.PREFILL:
            others += [one for one in fleet.prefill if one not in failed.prefill]
        others = fleet.serving(self._body.model, others)
        return any(one.unusable_reason is None and one.longest_request > worker.longest_request for one in others)

    # ---- the hand-off that prefill may have offered ----

    def settled(self) -> None:
        """Notes that prefill holds nothing for this request any more, or that decode has taken it over."""
        self._offer = None

    def give_up(self, reason: str) -> None:
        """Informs prefill that the hand-off that it may have offered will not be taken."""
        if self._offer is not None:
            (prefill, transfer_id), self._offer = self._offer, None
            if prefill.is_vllm:
                return  # it has no such endpoint; the lease ends the hand-off
            self._context.releases.release_soon(prefill, transfer_id, reason)
            self._emit("released", worker=prefill.name, transfer_id=transfer_id, cause=reason)

    # ---- notes ----

    def served_by(
        self, route: str, prefill: Worker | None, decode: Worker | None, reason: str, transfer_id: str = ""
    ) -> dict[str, str]:
        """Notes which workers are chosen. Returns the headers that say so to the client."""
        values = {
            "route": route,
            "prefill": prefill.name if prefill else "",
            "decode": decode.name if decode else "",
            "why": reason,
        }
        self._emit("chosen", **values, transfer_id=transfer_id)
        return {f"x-kvferry-{name}": header_value(value) for name, value in values.items() if value}

    def note(self, failure: WorkerFailed, pair: Pair | None = None) -> None:
        """Notes a failed attempt. Raises ApiError if no other worker may be tried."""
        worker, stage = failure.worker, str(failure.worker.assigned_role)
        if self.failed.note(failure, time.monotonic(), pair):
            logger.warning("worker left alone peer=%s cause=%s", worker.name, failure)
        if stage == "prefill" and (failure.consequence.reported or not failure.reached):
            self.settled()  # it has offered nothing
        elif stage == "prefill":
            self.give_up(str(failure))
        self._context.metrics.on_failure(worker.url, stage)
        self._emit("failed", worker=worker.name, stage=stage, cause=str(failure))
        logger.warning(
            "worker failed request=%s peer=%s stage=%s outcome=%r cause=%s", request_id_of(self._request), worker.name,
            stage, str(failure.outcome), failure,
        )  # fmt: skip
        if failure.outcome is Outcome.UNREACHABLE:
            self._context.fleet.mark_down(worker, failure.reason)
        self.failed.check_retry()

    def note_served(self, worker: Worker) -> None:
        """Notes that a worker serves the request."""
        worker.breaker.succeeded()
        for failed in self.failed.served(worker, time.monotonic()):
            logger.warning("worker left alone peer=%s cause=%s", failed.name, failed.breaker.reason)

    def _on_begin(
        self, worker: Worker, prefill: Worker | None, headers: Mapping[str, str], route: str, status: int
    ) -> None:
        """Notes that a worker's answer begins; `headers` are those for the client."""
        if self.reservation is not None:
            self.reservation.began_s = time.monotonic()
        if status < 400:
            self.note_served(worker)
            note_length(self._context, headers, self._body, self.prompt)
            if outcome_of(headers) is not HandoffOutcome.FAILED:
                self.settled()
        self.served |= {
            name.removeprefix("x-kvferry-").replace("-", "_"): value
            for name, value in headers.items()
            if "kvferry" in name
        }
        note_answer(
            self._context, prefill, worker, headers, route=route, status=status, streamed=self.reply.started,
            prefilled_s=self._prefilled_s,
        )  # fmt: skip

    def _on_first_byte(self, source: str) -> None:
        if self.reply.started:  # the first byte of any other answer comes at its end
            self._context.metrics.on_first_byte(time.monotonic() - self._began_s)
        self._emit("first_byte", source=source)

    def _emit(self, name: str, /, **fields: Field) -> None:
        if self._context.observers:
            self._context.observers.emit(self._number, name, **fields)


def _nothing(_: Mapping[str, str]) -> None:
    """Ignores the headers: a client's error has no route."""
