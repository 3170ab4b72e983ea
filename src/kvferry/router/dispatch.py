"""One request's way through the fleet.

Pull:   a decode worker with room is chosen, then a prefill worker that fits it. Prefill computes the prompt and its
        first token, which goes to the client; decode gets the client's body with prefill's `kv_transfer_params`, byte
        for byte. Also with workers whose mode is not known yet: the parameters tell it (R16).
Push:   both get their bodies at once, with one transfer id: decode's registration overlaps prefill.
Local:  decode computes the prompt by choice: it is short, or cannot be divided.
Alone:  no prefill worker fits or answers: decode gets the client's body, and says why in its answer.
Prefill: the first token is the whole answer (it stopped, or one token was asked for): decode is never called.

Failures, as long as nothing has gone to the client: prefill fails -> another one, else alone. Decode fails -> another
one; with the same hand-off if the failed one was never reached, else with a new one. Once prefill's first token is out,
another decode worker may still go on from it, with the same hand-off. After decode's own bytes nothing is replayed.

A hand-off that prefill may have offered, and into which no decode worker has begun to answer when the request ends or a
new dispatch replaces it, is given up: prefill is told (releases).
"""

import asyncio
import base64
import binascii
import logging
import secrets
import time
from collections.abc import Mapping

import msgspec
from aiohttp import web

from kvferry.errors import MalformedMessage
from kvferry.router.answer.first_event import early_event
from kvferry.router.answer.relay import from_prefill, relay
from kvferry.router.answer.reply import Reply
from kvferry.router.client_body import ClientBody, PrefillAnswer, check_choices
from kvferry.router.context import Attempts, RouterContext, Ticket, end_tasks
from kvferry.router.fleet.admission import admit
from kvferry.router.fleet.prefixes import unpack_hashes
from kvferry.router.fleet.worker import BlockReservation, Worker
from kvferry.router.observe.observer import Field
from kvferry.router.settings import FirstToken
from kvferry.router.tickets import can_push, learned_from, new_transfer_id, push_params, told_in
from kvferry.router.upstream.worker_answer import WorkerFailed
from kvferry.web.api_errors import ApiError, request_id_of
from kvferry.web.records import header_value

__all__ = ["Dispatch"]

logger = logging.getLogger(__name__)

_OVERLOADED = 503


class _Answered(Exception):  # not an error: it unwinds to the answer
    """Prefill's side settled the request: `response` goes to the client."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response


class Dispatch:
    """One request. `run` is called once; cancelling it (the client hung up) aborts every request to workers."""

    def __init__(self, shared: RouterContext, request: web.Request, body: ClientBody, number: int) -> None:
        """`number`: under which observers see it."""
        self._shared = shared
        self._fleet = shared.fleet
        self._metrics = shared.metrics
        self._number = number
        self._request = request
        self._body = body
        self._tried = Attempts()
        self._began_s = time.monotonic()
        self._reply = Reply(request, self._on_first_byte)
        self._prompt_bytes = body.prompt_bytes
        self._prompt = shared.prefixes.prompt(
            self._prompt_bytes, body.num_prompt_ids, with_pieces=shared.fleet.wants_pieces
        )
        self._offer: tuple[Worker, str] | None = None
        self._promise: BlockReservation | None = None
        self._begun = False
        self._prefilled_s: float | None = None
        self.served: dict[str, Field] = {}
        """How it was served, as far as it is known; for observers."""

    async def run(self) -> web.StreamResponse:
        """The answer to the client. Raises ApiError if nobody can give one."""
        check_choices(self._body)
        try:
            if self._body.max_tokens == 1 and self._body.why_undivided is None:
                await self._one_token()
            return await self._decode_somewhere()
        except _Answered as answered:
            return answered.response
        except ApiError as error:
            if not self._reply.started:
                raise
            return await self._reply.fail(error)
        finally:
            self._give_up("no decode worker took it")

    # ---- decode ----

    async def _decode_somewhere(self) -> web.StreamResponse:
        ticket: Ticket | None = None
        while True:
            decode = await admit(self._shared, self._tried, self._prompt, self._body.model)
            if ticket is not None and ticket.prefill is not None and self._fleet.why_not(ticket.prefill, decode):
                ticket = None
                self._give_up("the other decode worker does not fit")
            if ticket is None and self._reply.started:
                raise self._cannot_go_on()
            with decode.promised(self._prompt.num_tokens) as self._promise:
                try:
                    if ticket is None:
                        ticket = self._why_local(decode)
                    if ticket is None and (prefill := self._next_prefill(decode)) is not None:
                        if can_push(prefill, decode):
                            return await self._push(prefill, decode)
                        ticket = await self._prefill(prefill, decode)
                    if ticket is None:
                        ticket = self._alone(decode)
                    return await self._decode(decode, ticket)
                except WorkerFailed as failure:
                    self._note(failure, "decode" if failure.worker is decode else "prefill")
                    keep = self._reply.started and ticket is not None
                    if ticket is not None and not keep and (failure.reached or ticket.params is None):
                        ticket = None  # it may have claimed the grant: a new dispatch has a new transfer id
                        self._give_up(f"decode {failure}")
                finally:
                    if self._shared.num_waiting:
                        self._fleet.ask_soon(decode)

    def _cannot_go_on(self) -> ApiError:
        failures = "; ".join(str(failure) for failure in self._tried.failures) or "cannot go on from prefill's token"
        return ApiError(
            502, f"decode {failures}; the answer is not whole: send the request again", code="worker_failed"
        )

    def _why_local(self, decode: Worker) -> Ticket | None:
        """Decode computes the prompt by choice."""
        body = self._body
        why = body.why_undivided
        if why is None and body.num_choices > 1 and decode.info is not None and decode.info.kind == "vllm":
            why = f"n={body.num_choices}: a hand-off to a vLLM server carries one choice"
        if why is None and (below := self._shared.local_below_tokens):
            uncached = self._prompt.num_tokens - self._prompt.num_cached(decode)
            if uncached < below:
                why = f"about {uncached} of its tokens are not in decode's cache, and a hand-off pays from {below}"
        return None if why is None else Ticket(why=why, local=True)

    def _alone(self, decode: Worker) -> Ticket:
        """Nobody can prefill for it, and why."""
        failures = [str(failure) for failure in self._tried.failures if failure.worker.wanted == "prefill"]
        return Ticket(why="prefill " + ("; ".join(failures) if failures else self._fleet.why_no_prefill(decode)))

    async def _decode(self, decode: Worker, ticket: Ticket) -> web.StreamResponse:
        body = self._body.plain() if ticket.params is None else self._body.for_decode(ticket.params)
        route = "pull" if ticket.params is not None else "local" if ticket.local else "alone"
        headers = self._served_by(route, ticket.prefill, decode, ticket.why)
        return await self._relay(decode, body, headers, route, prefill=ticket.prefill)

    async def _relay(
        self, worker: Worker, body: bytes, served: Mapping[str, str], route: str, *,
        prefill: Worker | None = None, request_id: str | None = None,
    ) -> web.StreamResponse:  # fmt: skip
        why = {"x-kvferry-why": served["x-kvferry-why"]} if "x-kvferry-why" in served else {}
        stage = "prefill" if route == "prefill" else "decode"
        headers = self._headers(stage, request_id) | why
        if self._reply.early is not None:
            headers["x-kvferry-first-token"] = "sent"  # decode goes on from it, whatever becomes of the hand-off
        self._tell(f"{stage}.sent", worker=worker.name)
        began_s = time.monotonic()
        worker.breaker.began(began_s)
        pair = self._fleet.pairs.of(prefill, worker) if prefill is not None else None
        if pair is not None:
            pair.open += 1
        try:
            async with self._shared.upstream.post(
                worker, self._request.path, body, headers,
                headers_within_s=self._shared.settings.first_byte_timeout_s,
            ) as answer:  # fmt: skip
                self._tell(f"{stage}.began", worker=worker.name, status=answer.status)

                def on_begin(headers: Mapping[str, str]) -> None:
                    nonlocal pair
                    self._begun = True
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
        """A worker's answer begins; `headers` are those for the client."""
        now_s = time.monotonic()
        if self._promise is not None:
            self._promise.began_s = now_s
        recomputed = _recomputed(headers)
        if status < 400:
            worker.breaker.succeeded()
            if not recomputed:
                self._offer = None
        self.served |= {
            name.removeprefix("x-kvferry-").replace("-", "_"): value
            for name, value in headers.items()
            if "kvferry" in name
        }
        self._metrics.on_route(route)
        self._metrics.on_tokens(headers)
        if route == "alone":
            self._shared.alarm.note(now_s, headers.get("x-kvferry-why", "no reason is known"))
        if prefill is None or status >= 400:
            return
        pair = self._fleet.pairs.of(prefill, worker)
        if recomputed:
            pair.failed += 1
            pair.last_why = headers.get("x-kvferry-why", "")
            self._shared.alarm.note(now_s, pair.last_why)
            if pair.breaker.failed(now_s, pair.last_why):
                logger.warning(
                    "pair left alone prefill=%s decode=%s cause=%s", prefill.name, worker.name, pair.last_why
                )
        else:
            pair.landed += 1
            pair.handed_over_tokens += _number(headers.get("x-kvferry-handed-over", ""))
            pair.breaker.succeeded()
            self._shared.alarm.note(now_s, None)
        if self._prefilled_s is not None:
            self._shared.cost.on_handoff(now_s - self._prefilled_s)
            self._metrics.on_handoff(now_s - self._prefilled_s)
        self._metrics.on_pair(prefill.name, worker.name, landed=not recomputed, headers=headers)

    def _on_first_byte(self, source: str) -> None:
        self._metrics.on_first_byte(time.monotonic() - self._began_s)
        self._tell("first_byte", source=source)

    # ---- prefill ----

    def _next_prefill(self, decode: Worker | None) -> Worker | None:
        if len(self._tried.prefill) >= self._shared.settings.max_attempts:
            return None
        return self._fleet.pick_prefill(decode, self._tried.prefill, self._prompt, self._body.model)

    async def _prefill(self, prefill: Worker, decode: Worker) -> Ticket:
        """Have the prompt computed. Raises _Answered if that settles the request, WorkerFailed if it failed."""
        raw, answer = await self._ask_prefill(prefill, new_transfer_id())
        finish = answer.choices[0].finish_reason if answer.choices else None
        stopped = finish not in (None, "length")
        # A vLLM server leaves the prompt's end to decode for some models: its own token comes from a shortened prompt.
        is_vllm = prefill.info is not None and prefill.info.kind == "vllm"
        if stopped and self._body.num_choices == 1 and not is_vllm:
            self._metrics.on_route("prefill")
            self._offer = None
            headers = self._served_by("prefill", prefill, None, "")
            raise _Answered(await from_prefill(self._reply, self._body, raw, headers))
        if answer.params is None:
            stop = "its first token ended the first choice" if stopped else "it returned no kv_transfer_params"
            self._offer = None
            return Ticket(why=f"prefill {prefill.name}: {stop}")
        ticket = Ticket(prefill, answer.params)
        try:
            told = told_in(answer.params)
        except MalformedMessage as error:
            raise WorkerFailed(prefill, f"returned {error}", reached=True) from error
        if is_vllm:
            prefill.learn(learned_from(told))
        if told.first_token is not None and decode.can("first-token"):
            await self._say_first_token(raw, prefill, decode, "pull")
        return ticket

    async def _say_first_token(self, raw: bytes, prefill: Worker, decode: Worker, route: str) -> None:
        """Begin the client's stream with prefill's token, if it stands by itself."""
        if self._shared.settings.first_token is not FirstToken.PREFILL or self._reply.started:
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
        if self._fleet.wants_pieces and prefill.can("prompt-blocks"):
            headers["x-kvferry-want"] = "prompt-blocks"
        self._tell("prefill.sent", worker=prefill.name, transfer_id=transfer_id)
        began_s = time.monotonic()
        prefill.breaker.began(began_s)
        async with self._shared.upstream.post(
            prefill, self._request.path, self._body.for_prefill(transfer_id), headers,
            headers_within_s=self._shared.settings.prefill_timeout_s,
        ) as response:  # fmt: skip
            if response.status >= 400:  # the client's error: it would be the same anywhere
                self._offer = None
                served = self._served_by("prefill", prefill, None, "")
                raise _Answered(await relay(self._reply, prefill, response, served, _nothing))
            raw = await response.read()
        try:
            answer = msgspec.json.decode(raw, type=PrefillAnswer)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WorkerFailed(prefill, f"gave an answer that cannot be read: {error}", reached=True) from error
        prefill.breaker.succeeded()
        self._prefilled_s = time.monotonic()
        self._tell("prefill.answered", worker=prefill.name, status=200)
        self._learn(answer, self._prefilled_s - began_s, prefill)
        return raw, answer

    def _learn(self, answer: PrefillAnswer, after_s: float, prefill: Worker) -> None:
        """From what prefill says of the prompt: its length, its blocks, and how long it took."""
        self._metrics.on_prefill(after_s)
        num_tokens = answer.usage.prompt_tokens if answer.usage is not None else 0
        prefixes, body = self._shared.prefixes, self._body
        prefixes.learn_length(self._prompt_bytes, body.num_prompt_ids, num_tokens)
        if answer.kvferry is not None:
            self._shared.cost.on_prefill(answer.kvferry.recomputed, after_s)
        elif num_tokens:
            self._shared.cost.on_prefill(num_tokens, after_s)
        if answer.prompt_blocks and prefill.info is not None:
            try:
                hashes = unpack_hashes(base64.b64decode(answer.prompt_blocks, validate=True))
            except binascii.Error:
                return  # only a better choice is lost
            size = prefill.info.limits.block_tokens
            prefixes.learn(self._prompt, hashes, num_tokens, size, len(self._prompt_bytes))

    async def _one_token(self) -> None:
        """One token is asked for: an ordinary request to prefill answers it. Falls through if no prefill can."""
        while (prefill := self._next_prefill(None)) is not None:
            headers = self._served_by("prefill", prefill, None, "")
            try:
                raise _Answered(await self._relay(prefill, self._body.plain(), headers, "prefill"))
            except WorkerFailed as failure:
                self._note(failure, "prefill")

    # ---- push ----

    async def _push(self, prefill: Worker, decode: Worker) -> web.StreamResponse:
        """Both at once. Prefill failing before decode has begun to answer is a WorkerFailed of prefill."""
        transfer_id = new_transfer_id()
        # A vLLM server matches the two by this id, so it must be new; clients may send one again.
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
                # What prefill refuses, or cannot do, decode would wait for in vain.
                await self._prefill_wrote(*writing.result(), prefill, decode)
            return await reading
        finally:
            await end_tasks(writing, reading)

    async def _prefill_wrote(self, raw: bytes, answer: PrefillAnswer, prefill: Worker, decode: Worker) -> None:
        """Prefill has answered before decode began. Raises WorkerFailed if decode was told of another process."""
        if answer.params is None:
            return  # decode knows from the wire, or answers by its own means
        told = told_in(answer.params)
        if prefill.info is not None and prefill.info.kind == "vllm":
            before, now = prefill.learned, learned_from(told)
            prefill.learn(now)
            if before is not None and (before.engine, before.port) != (now.engine, now.port):
                raise WorkerFailed(prefill, "has restarted: decode waits for another process", reached=True)
        # Where the hand-off fails decode draws a token of its own: only a greedy one is the same again.
        if decode.can("first-token") and self._body.greedy and not self._begun:
            finish = answer.choices[0].finish_reason if answer.choices else None
            if finish in (None, "length"):
                await self._say_first_token(raw, prefill, decode, "push")

    # ---- common ----

    def _give_up(self, reason: str) -> None:
        """Let prefill know that nobody will take what it may have offered."""
        if self._offer is not None:
            (prefill, transfer_id), self._offer = self._offer, None
            if prefill.info is not None and prefill.info.kind == "vllm":
                return  # it has no such endpoint: its lease ends it
            self._shared.releases.release_soon(prefill, transfer_id, reason)
            self._tell("released", worker=prefill.name, transfer_id=transfer_id, cause=reason)

    def _headers(self, stage: str, request_id: str | None = None) -> dict[str, str]:
        asked = self._request.headers
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id or request_id_of(self._request)}
        for name in ("traceparent", "tracestate"):
            if name in asked:
                headers[name] = asked[name]
        if self._shared.worker_key is not None:
            headers["Authorization"] = f"Bearer {self._shared.worker_key}"
        elif "Authorization" in asked:
            headers["Authorization"] = asked["Authorization"]
        if self._shared.observers:
            headers |= self._shared.observers.worker_headers(self._number, stage)
        return headers

    def _served_by(
        self, route: str, prefill: Worker | None, decode: Worker | None, why: str, transfer_id: str = ""
    ) -> dict[str, str]:
        values = {
            "route": route,
            "prefill": prefill.name if prefill else "",
            "decode": decode.name if decode else "",
            "why": why,
        }
        self._tell("chosen", **values, transfer_id=transfer_id)
        return {f"x-kvferry-{name}": header_value(value) for name, value in values.items() if value}

    def _tell(self, name: str, /, **fields: Field) -> None:
        if self._shared.observers:
            self._shared.observers.tell(self._number, name, **fields)

    def _note(self, failure: WorkerFailed, stage: str) -> None:
        worker = failure.worker
        self._tried.failures.append(failure)
        if stage == "decode":
            self._tried.decode[worker] = time.monotonic()
        else:
            self._tried.prefill.add(worker)
        if stage == "prefill" and (failure.answered or not failure.reached):
            self._offer = None  # it has offered nothing
        elif stage == "prefill":
            self._give_up(str(failure))
        worker.num_failures += 1
        if failure.status != _OVERLOADED and worker.breaker.failed(time.monotonic(), str(failure)):
            logger.warning("worker left alone peer=%s cause=%s", worker.name, failure)
        self._metrics.on_failure(worker.url, stage)
        self._tell("failed", worker=worker.name, stage=stage, cause=str(failure))
        logger.warning(
            "worker failed request=%s peer=%s stage=%s cause=%s", request_id_of(self._request), worker.name, stage,
            failure,
        )  # fmt: skip
        if not failure.reached:
            self._fleet.mark_down(worker, str(failure))


def _recomputed(headers: Mapping[str, str]) -> bool:
    """Decode says that nothing was handed over, and why: it may never have told prefill."""
    return headers.get("x-kvferry-handed-over") == "0" and bool(headers.get("x-kvferry-why"))


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _nothing(_: Mapping[str, str]) -> None:
    """An error of the client has no route."""
