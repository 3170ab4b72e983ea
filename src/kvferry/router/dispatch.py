"""One request's way through the fleet.

Pull:   a decode worker with room is chosen, then a prefill worker that fits it. Prefill computes the prompt and its
        first token; decode gets the client's body with prefill's `kv_transfer_params`, byte for byte.
Push:   both get their bodies at once, with one transfer id: decode's registration overlaps prefill.
Alone:  no prefill worker fits or answers: decode gets the client's body, and says why in its answer.
Prefill: the first token is the whole answer (it stopped, or one token was asked for): decode is never called.

Failures, as long as nothing has gone to the client: prefill fails -> another one, else alone. Decode fails -> another
one; with the same hand-off if the failed one was never reached, else with a new one. Afterwards nothing is replayed.

A hand-off that prefill may have offered, and into which no decode worker has begun to answer when the request ends or a
new dispatch replaces it, is given up: prefill is told (releases).
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from kvferry.http.errors import ApiError, request_id_of
from kvferry.http.records import header_value
from kvferry.router.answers import WorkerFailed
from kvferry.router.bodies import ClientBody, PrefillAnswer, check_choices
from kvferry.router.metrics import RouterMetrics
from kvferry.router.relay import from_prefill, relay
from kvferry.router.releases import Releases
from kvferry.router.settings import RouterSettings
from kvferry.router.upstream import Upstream
from kvferry.router.workers import Fleet, Worker
from kvferry.settings import TransferMode

__all__ = ["Dispatch", "Dispatcher"]

logger = logging.getLogger(__name__)

_TO_WORKERS = ("Authorization", "traceparent", "tracestate")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What prefill's side of a request came to: a hand-off, or the reason why there is none."""

    prefill: Worker | None = None
    params: msgspec.Raw | None = None
    why: str = ""


@dataclass(slots=True)
class Attempts:
    """Workers that failed this request, and how."""

    prefill: set[Worker] = field(default_factory=set)
    decode: set[Worker] = field(default_factory=set)
    failures: list[WorkerFailed] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """What all dispatches share."""

    fleet: Fleet
    upstream: Upstream
    settings: RouterSettings
    metrics: RouterMetrics
    releases: Releases


class _Answered(Exception):  # not an error: it unwinds to the answer
    """Prefill's side settled the request: `response` goes to the client."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response


class Dispatch:
    """One request. `run` is called once; cancelling it (the client hung up) aborts every request to workers."""

    def __init__(self, shared: Dispatcher, request: web.Request, body: ClientBody) -> None:
        self._fleet = shared.fleet
        self._upstream = shared.upstream
        self._settings = shared.settings
        self._metrics = shared.metrics
        self._releases = shared.releases
        self._offer: tuple[Worker, str] | None = None
        self._request = request
        self._body = body
        self._tried = Attempts()
        self._began_s = time.monotonic()
        self._begun = False

    async def run(self) -> web.StreamResponse:
        """The answer to the client. Raises ApiError if nobody can give one."""
        check_choices(self._body)
        try:
            if self._body.wants_one_token and self._body.num_prompts == 1:
                await self._one_token()
            return await self._decode_somewhere()
        except _Answered as answered:
            return answered.response
        finally:
            self._give_up("no decode worker took it")

    # ---- decode ----

    async def _decode_somewhere(self) -> web.StreamResponse:
        ticket: Ticket | None = None
        while True:
            decode = self._pick_decode()
            if ticket is not None and ticket.prefill is not None and self._fleet.why_not(ticket.prefill, decode):
                ticket = None
                self._give_up("the other decode worker does not fit")
            try:
                if ticket is None and (prefill := self._push_partner(decode)) is not None:
                    return await self._push(prefill, decode)
                if ticket is None:
                    ticket = await self._get_ticket(decode)
                return await self._decode(decode, ticket)
            except WorkerFailed as failure:
                self._note(failure, "decode" if failure.worker is decode else "prefill")
                if ticket is not None and (failure.reached or ticket.params is None):
                    ticket = None  # it may have claimed the grant: a new dispatch has a new transfer id
                    self._give_up(f"decode {failure}")

    def _pick_decode(self) -> Worker:
        decode = None
        if len(self._tried.decode) < self._settings.max_attempts:
            decode = self._fleet.pick_decode(self._tried.decode)
        if decode is not None:
            return decode
        if self._tried.failures:
            failures = [failure for failure in self._tried.failures if failure.worker.wanted == "decode"]
            status = max((failure.status for failure in failures), default=502)
            retry = 1 if status == 503 else None
            text = "; ".join(f"decode {failure}" for failure in failures)
            raise ApiError(
                status, f"{text}. Try again, or look at /v1/kvferry", code="worker_failed", retry_after_s=retry
            )
        reasons = "; ".join(worker.why_unusable or worker.name for worker in self._fleet.decode)
        raise ApiError(
            503, f"no decode worker can serve: {reasons or 'none is configured'}. Start one, or look at /v1/kvferry",
            code="no_decode_worker", retry_after_s=1,
        )  # fmt: skip

    async def _decode(self, decode: Worker, ticket: Ticket) -> web.StreamResponse:
        body = self._body.plain() if ticket.params is None else self._body.for_decode(ticket.params)
        route = "alone" if ticket.params is None else "pull"
        headers = self._served_by(route, ticket.prefill, decode, ticket.why)
        return await self._relay(decode, body, headers, route)

    async def _relay(self, worker: Worker, body: bytes, served: Mapping[str, str], route: str) -> web.StreamResponse:
        why = {"x-kvferry-why": served["x-kvferry-why"]} if "x-kvferry-why" in served else {}
        async with self._upstream.post(
            worker, self._request.path, body, {**self._headers(), **why},
            headers_within_s=self._settings.first_byte_timeout_s,
        ) as answer:  # fmt: skip

            def on_begin(headers: Mapping[str, str]) -> None:
                self._begun = True
                if answer.status < 400 and not _recomputed(headers):
                    self._offer = None
                self._metrics.on_route(route)
                self._metrics.on_first_byte(time.monotonic() - self._began_s, headers)

            return await relay(self._request, worker, answer, served, on_begin)

    # ---- prefill, pull ----

    async def _get_ticket(self, decode: Worker) -> Ticket:
        """Have a prompt computed for this decode worker. Raises _Answered if that settles the request."""
        if self._body.num_prompts > 1:
            return Ticket(why=f"{self._body.num_prompts} prompts in one request: a hand-off carries one")
        while (prefill := self._next_prefill(decode)) is not None:
            try:
                return await self._prefill(prefill, decode)
            except WorkerFailed as failure:
                self._note(failure, "prefill")
        return Ticket(why=self._why_alone(decode))

    def _next_prefill(self, decode: Worker | None) -> Worker | None:
        if len(self._tried.prefill) >= self._settings.max_attempts:
            return None
        return self._fleet.pick_prefill(decode, self._tried.prefill)

    def _why_alone(self, decode: Worker) -> str:
        failures = [str(failure) for failure in self._tried.failures if failure.worker.wanted == "prefill"]
        return "prefill " + ("; ".join(failures) if failures else self._fleet.why_no_prefill(decode))

    async def _prefill(self, prefill: Worker, decode: Worker) -> Ticket:
        began_s = time.monotonic()
        raw, answer = await self._ask_prefill(prefill, _new_transfer_id())
        self._metrics.on_prefill(time.monotonic() - began_s)
        stopped = bool(answer.choices) and answer.choices[0].finish_reason == "stop"
        if stopped and self._body.num_choices == 1:
            self._metrics.on_route("prefill")
            self._offer = None
            headers = self._served_by("prefill", prefill, None, "")
            raise _Answered(await from_prefill(self._request, self._body, raw, headers))
        if answer.params is None:
            stop = "its first token ended the first choice" if stopped else "it returned no kv_transfer_params"
            self._offer = None
            return Ticket(why=f"prefill {prefill.name}: {stop}")
        return Ticket(prefill, answer.params)

    async def _ask_prefill(self, prefill: Worker, transfer_id: str) -> tuple[bytes, PrefillAnswer]:
        self._give_up("a new dispatch replaces it")
        self._offer = (prefill, transfer_id)
        async with self._upstream.post(
            prefill, self._request.path, self._body.for_prefill(transfer_id), self._headers(),
            headers_within_s=self._settings.prefill_timeout_s,
        ) as response:  # fmt: skip
            if response.status >= 400:  # the client's error: it would be the same anywhere
                self._offer = None
                headers = self._served_by("prefill", prefill, None, "")
                raise _Answered(await relay(self._request, prefill, response, headers, _nothing))
            raw = await response.read()
        try:
            return raw, msgspec.json.decode(raw, type=PrefillAnswer)
        except msgspec.MsgspecError as error:
            raise WorkerFailed(prefill, f"gave an answer that cannot be read: {error}", reached=True) from error

    async def _one_token(self) -> None:
        """One token is asked for: an ordinary request to prefill answers it. Falls through if no prefill can."""
        while (prefill := self._next_prefill(None)) is not None:
            headers = self._served_by("prefill", prefill, None, "")
            try:
                raise _Answered(await self._relay(prefill, self._body.plain(), headers, "prefill"))
            except WorkerFailed as failure:
                self._note(failure, "prefill")

    # ---- push ----

    def _push_partner(self, decode: Worker) -> Worker | None:
        """A prefill worker for a push, if this decode worker's mode is push."""
        push = decode.info is not None and decode.info.mode is TransferMode.PUSH  # R16
        return self._next_prefill(decode) if push and self._body.num_prompts == 1 else None

    async def _push(self, prefill: Worker, decode: Worker) -> web.StreamResponse:
        """Both at once. Prefill failing before decode has begun to answer is a WorkerFailed of prefill."""
        assert prefill.info is not None, "only workers that have answered are picked"
        transfer_id = _new_transfer_id()
        params: dict[str, object] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_mode": TransferMode.PUSH,
            "transfer_id": transfer_id,
            "remote_engine_id": prefill.info.engine,
            "remote_incarnation": prefill.info.incarnation,
            "remote_host": prefill.info.side_channel.host,
            "remote_port": prefill.info.side_channel.port,
        }
        headers = self._served_by("push", prefill, decode, "")
        writing = asyncio.create_task(self._ask_prefill(prefill, transfer_id))
        reading = asyncio.create_task(self._relay(decode, self._body.for_decode(params), headers, "push"))
        try:
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and not reading.done() and not self._begun:
                writing.result()  # what prefill refuses, or cannot do, decode would wait for in vain
            return await reading
        finally:
            await _end(writing, reading)

    # ---- common ----

    def _give_up(self, reason: str) -> None:
        """Let prefill know that nobody will take what it may have offered."""
        if self._offer is not None:
            (prefill, transfer_id), self._offer = self._offer, None
            self._releases.release_soon(prefill, transfer_id, reason)

    def _headers(self) -> dict[str, str]:
        passed = {name: self._request.headers[name] for name in _TO_WORKERS if name in self._request.headers}
        return {"Content-Type": "application/json", "X-Request-Id": request_id_of(self._request), **passed}

    def _served_by(self, route: str, prefill: Worker | None, decode: Worker | None, why: str) -> dict[str, str]:
        values = {
            "route": route,
            "prefill": prefill.name if prefill else "",
            "decode": decode.name if decode else "",
            "why": why,
        }
        return {f"x-kvferry-{name}": header_value(value) for name, value in values.items() if value}

    def _note(self, failure: WorkerFailed, stage: str) -> None:
        worker = failure.worker
        self._tried.failures.append(failure)
        (self._tried.decode if stage == "decode" else self._tried.prefill).add(worker)
        if stage == "prefill" and (failure.answered or not failure.reached):
            self._offer = None  # it has offered nothing
        elif stage == "prefill":
            self._give_up(str(failure))
        worker.num_failures += 1
        self._metrics.on_failure(worker.url, stage)
        logger.warning(
            "worker failed request=%s peer=%s stage=%s cause=%s", request_id_of(self._request), worker.name, stage,
            failure,
        )  # fmt: skip
        if not failure.reached:
            self._fleet.mark_down(worker, str(failure))


def _new_transfer_id() -> str:
    return f"xfer-{secrets.token_hex(12)}"


def _recomputed(headers: Mapping[str, str]) -> bool:
    """Decode says that nothing was handed over, and why: it may never have told prefill."""
    return headers.get("x-kvferry-handed-over") == "0" and bool(headers.get("x-kvferry-why"))


def _nothing(_: Mapping[str, str]) -> None:
    """An error of the client has no route."""


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
