"""The OpenAI-compatible HTTP server of one worker.

Life of a request: its body is read and checked (request_reader, request_body, prompts) and becomes a Job (generate);
the job's sequences run on the engine thread (engine_thread); their outputs become a body or a stream (replies). Headers
are sent with the first token, so that they can say how the prompt was served, and so that an earlier error still has
its own status. A client that disconnects cancels the handler, which aborts the sequences.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from kvferry.engines.mini.server.draining import Draining, Drains
from kvferry.engines.mini.server.engine_thread import EngineLike, EngineThread
from kvferry.engines.mini.server.generate import Generation, Job, created_of
from kvferry.engines.mini.server.handoff_request import read_handoff
from kvferry.engines.mini.server.metrics import WorkerMetrics, numbers_of
from kvferry.engines.mini.server.prompts import Prompt, TokenizerLike
from kvferry.engines.mini.server.refused_handoffs import DeclinesHandoffs, handoff_of
from kvferry.engines.mini.server.replies import ChatReply, CompletionReply, Reply
from kvferry.engines.mini.server.request_body import (
    DEFAULT_MAX_TOKENS,
    MAX_CHOICES,
    ChatBody,
    CommonBody,
    check_for_decode,
    check_length,
    limit_of,
    sampling_of,
)
from kvferry.engines.mini.server.request_reader import RequestReader
from kvferry.engines.mini.server.request_traces import Traces
from kvferry.engines.mini.server.router_services import MeetBody, packed_hashes, prompt_blocks
from kvferry.engines.mini.server.token_logprobs import TokenNames
from kvferry.engines.mini.settings import ServerSettings
from kvferry.errors import FerryError, Overloaded
from kvferry.ids import TransferId
from kvferry.web.api_errors import ApiError, as_api_error, error_middleware, request_id_of
from kvferry.web.json_body import decode_body
from kvferry.web.models import model_routes, unknown_model
from kvferry.web.origin import no_page
from kvferry.web.records import ModelCard
from kvferry.web.stages import TRACE_PATH
from kvferry.wire.salt import make_salt

__all__ = ["ReleaseBody", "WorkerLike", "WorkerServer"]

logger = logging.getLogger(__name__)

_SNAPSHOT_WAIT_S = 0.25
_MAX_REASON_CHARS = 200
_MEET_LOOKS = 200
_MEET_LOOK_EVERY_S = 0.01


class WorkerLike(Drains, Protocol):
    """What the server needs of a worker: the engine and its description. Called on the engine thread."""

    @property
    def engine(self) -> EngineLike:
        """The engine, which also has `tokenizer` and `stats()`."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns the JSON of GET /v1/kvferry."""
        ...

    def release(self, transfer: TransferId, reason: str) -> bool:
        """Frees the KV of a prefill that no decode worker will take.

        Returns False if no such hand-off is open, or it was withdrawn already.
        """
        ...


class ReleaseBody(msgspec.Struct, frozen=True):
    """The body of POST /v1/kvferry/release."""

    transfer_id: str
    reason: str = ""


class WorkerServer:
    """The routes and their handlers. `app` is ready to be served; the engine thread starts and stops with it."""

    def __init__(self, worker: WorkerLike, tokenizer: TokenizerLike, settings: ServerSettings) -> None:
        self._worker = worker
        self._names = TokenNames(tokenizer)
        self._settings = settings
        self._engine = EngineThread(worker.engine)
        self._reader = RequestReader(
            tokenizer,
            max_model_len=settings.max_model_len,
            vocab_size=settings.vocab_size,
            max_body_bytes=settings.max_body_bytes,
            max_waiting=settings.max_open_requests,
        )
        self._metrics = WorkerMetrics()
        self._started_s = int(time.time())
        self._traces = Traces()
        self._serial = itertools.count()
        self._num_answering = 0
        self.draining = Draining(
            self._engine,
            worker,
            num_answering=lambda: self._num_answering + self._reader.num_reading,
            timeout_s=settings.drain_timeout_s,
        )
        # So the process ends, with an exit status that a supervisor sees: nothing here can serve any more.
        self._engine.on_failure = lambda reason: self.draining.begin(f"the engine has ended: {reason}")
        self._description: dict[str, Any] = {}
        self._engine_stats: Mapping[str, float] = {}
        self.app = web.Application(
            client_max_size=settings.max_body_bytes, middlewares=[error_middleware(lambda: uuid.uuid4().hex)]
        )
        self.app.on_startup.append(self._on_startup)
        self.app.on_cleanup.append(self._on_cleanup)
        self.app.add_routes(
            [
                web.post("/v1/completions", self._declining(self._completions)),
                web.post("/v1/chat/completions", self._declining(self._chat)),
                *model_routes(self._cards),
                web.get("/health", self._health),
                web.get("/metrics", self._get_metrics),
                web.get("/v1/kvferry", self._describe),
                web.get(TRACE_PATH, self._trace),
                web.post("/v1/kvferry/drain", no_page(self._drain)),
                web.post("/v1/kvferry/release", no_page(self._release)),
                web.post("/v1/kvferry/meet", no_page(self._meet)),
                web.get("/v1/kvferry/blocks", self._blocks),
            ]
        )

    @property
    def failure(self) -> str | None:
        """Why the engine has failed; None: it has not."""
        return self._engine.failure

    async def _on_startup(self, _: web.Application) -> None:
        self._engine.start()
        self._description = await self._engine.call(self._worker.describe)

    async def _on_cleanup(self, _: web.Application) -> None:
        await self._reader.stop()
        await self._engine.stop()

    # ---- completions ----

    def _declining(self, handler: Handler) -> Handler:
        """Returns a handler that tells the prefill engine of a hand-off that was refused with its request."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except FerryError as error:
                engine = self._worker.engine
                final = 400 <= as_api_error(error).status < 500
                if final and isinstance(engine, DeclinesHandoffs) and (params := await handoff_of(request)):
                    reason = f"decode refused the request: {error}"
                    self._engine.later(lambda: engine.decline(params, reason[:_MAX_REASON_CHARS]))
                raise

        return handle

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body, prompts = await self._reader.completion(request)
        if body.echo and body.logprobs is not None:
            raise ApiError(
                400, "echo=True with logprobs: prompt log probabilities are not supported; drop one of them",
                param="logprobs", code="unsupported",
            )  # fmt: skip
        room = self._settings.max_model_len - max(len(prompt.token_ids) for prompt in prompts)
        asked = limit_of(body)
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, room)) if asked is None else asked
        job = self._job(request, body, prompts, max_tokens, body.logprobs, echo=bool(body.echo))
        return await self._answer(request, job, CompletionReply(job, self._names, self._engine_id))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, prompt = await self._reader.chat(request)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(
                400, f"top_logprobs={body.top_logprobs!r} needs logprobs=true: send it too", param="top_logprobs"
            )
        room = self._settings.max_model_len - len(prompt.token_ids)
        asked = limit_of(body)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        job = self._job(request, body, (prompt,), max(room, 1) if asked is None else asked, num_logprobs)
        return await self._answer(request, job, ChatReply(job, self._names, self._engine_id))

    def _job(
        self,
        request: web.Request,
        body: CommonBody,
        prompts: tuple[Prompt, ...],
        max_tokens: int,
        num_logprobs: int | None,
        *,
        echo: bool = False,
    ) -> Job:
        self._check(body, prompts, max_tokens)
        handoff = read_handoff(
            body.kv_transfer_params,
            request_id=request_id_of(request),
            engine=self._engine_id,
            mode=self._description.get("mode"),
        )
        num_choices, options = 1 if body.n is None else body.n, body.stream_options
        if handoff is not None and handoff.do_remote_decode:
            check_for_decode(request.headers, body, max(len(prompt.token_ids) for prompt in prompts))
        if handoff is not None and len(prompts) > 1:
            raise ApiError(
                400,
                f"kv_transfer_params with {len(prompts)} prompts: one hand-off carries one prompt; "
                "send one request per prompt",
                param="kv_transfer_params",
            )
        if handoff is not None and handoff.do_remote_decode:
            num_choices = 1  # decode makes the choices; prefill computes their prompt
        return Job(
            request_id=request_id_of(request),
            model=self._settings.model_name if body.model is None else body.model,
            prompts=prompts,
            samplings=tuple(
                sampling_of(body, max_tokens=max_tokens, logprobs=num_logprobs, seed_offset=i)
                for i in range(num_choices)
            ),
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            echo=echo,
            num_top_logprobs=num_logprobs,
            return_token_ids=bool(body.return_token_ids),
            salt=make_salt(cache_salt=body.cache_salt),
            handoff=handoff,
            on_failure=body.kv_on_failure,
            reason=request.headers.get("x-kvferry-why", ""),
            first_token_sent=request.headers.get("x-kvferry-first-token") == "sent",
            created=created_of(request.headers),
        )

    def _check(self, body: CommonBody, prompts: tuple[Prompt, ...], max_tokens: int) -> None:
        settings = self._settings
        if body.model is not None and body.model not in settings.names:
            raise unknown_model(body.model, settings.names)
        num_choices = 1 if body.n is None else body.n
        if num_choices * len(prompts) > MAX_CHOICES:
            raise ApiError(
                400,
                f"n={num_choices!r} with {len(prompts)} prompts: send 1 to {MAX_CHOICES} choices over all prompts",
                param="n",
                code="out_of_range",
            )
        for name, ids in (("stop_token_ids", body.stop_token_ids), ("logit_bias", body.logit_bias)):
            beyond = next((one for one in ids or () if str(one).isdigit() and int(one) >= settings.vocab_size), None)
            if beyond is not None:
                raise ApiError(
                    400,
                    f"{name} has the token id {beyond}: this model has ids 0 to {settings.vocab_size - 1}",
                    param=name,
                    code="out_of_range",
                )
        for prompt in prompts:
            check_length(len(prompt.token_ids), max_tokens, settings.max_model_len, chat=isinstance(body, ChatBody))
        limits = getattr(self._worker.engine, "limits", None)
        if limits is not None:
            for_remote = bool(body.kv_transfer_params and body.kv_transfer_params.get("do_remote_decode"))
            for prompt in prompts:
                limits.check_length(len(prompt.token_ids), 1 if for_remote else max(max_tokens, 1))
        if self.draining.begun and self._engine.failure is None:
            raise ApiError(503, "this worker is draining: send the request to another one", code="draining",
                           retry_after_s=1)  # fmt: skip
        if self._engine.num_open + num_choices * len(prompts) > settings.max_open_requests:
            raise Overloaded(
                f"{self._engine.num_open} sequences are open and at most {settings.max_open_requests} are allowed: "
                "try again later, or start the worker with a larger --max-open-requests"
            )

    # ---- answering ----

    async def _answer(self, request: web.Request, job: Job, reply: Reply) -> web.StreamResponse:
        began_s = time.monotonic()
        generation = Generation(self._engine, job, f"{job.request_id[:64]}.{next(self._serial)}")
        status = 499
        self._num_answering += 1
        try:
            if job.stream:
                response: web.StreamResponse = await self._stream(request, job, reply, generation, began_s)
            else:
                async for index, output in generation.outputs():
                    if output.token_ids and not any(choice.token_ids for choice in reply.choices):
                        self._metrics.on_first_token(time.monotonic() - began_s)
                    reply.add(index, output)
                body = reply.whole()
                if job.handoff is not None and request.headers.get("x-kvferry-want") == "prompt-blocks":
                    body["prompt_blocks"] = prompt_blocks(reply.choices[0].prompt_hashes)
                response = web.Response(
                    body=msgspec.json.encode(body),
                    content_type="application/json",
                    headers=reply.headers(),
                )
            status = response.status
            if all(choice.finish_reason for choice in reply.choices):
                num_tokens = sum(len(choice.token_ids) for choice in reply.choices)
                asked = job.handoff is not None and job.handoff.do_remote_prefill
                self._metrics.on_answer(reply.served(), num_tokens, time.monotonic() - began_s, asked_handoff=asked)
        except FerryError as error:
            status = as_api_error(error).status
            raise
        finally:
            self._num_answering -= 1
            generation.close()
            self._metrics.on_status(request.path, status)
            self._traces.remember(job, reply, received_s=began_s, status=status)
        return response

    async def _stream(
        self, request: web.Request, job: Job, reply: Reply, generation: Generation, began_s: float
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        response.headers["X-Request-Id"] = job.request_id
        try:
            async for index, output in generation.outputs():
                chunk = reply.chunk(index, output)
                if not response.prepared:
                    response.headers.update(reply.headers())
                    await response.prepare(request)
                    reply.began_s = time.monotonic()
                    self._metrics.on_first_token(time.monotonic() - began_s)
                if chunk is not None:
                    await response.write(chunk)
        except FerryError as error:
            if not response.prepared:
                raise
            # The status was sent already: the error is an event, as the official client expects, and there is no
            # [DONE].
            logger.warning("stream failed request=%s cause=%s", job.request_id, error)
            await response.write(b"data: " + as_api_error(error).body() + b"\n\n")
        else:
            await response.write(reply.end())
        await response.write_eof()
        return response

    # ---- other endpoints ----

    @property
    def _engine_id(self) -> str:
        return str(self._description.get("engine", ""))

    def _cards(self) -> list[ModelCard]:
        card = ModelCard(
            id="", created=self._started_s, root=self._description.get("model"),
            max_model_len=self._settings.max_model_len,
        )  # fmt: skip
        return [msgspec.structs.replace(card, id=name) for name in self._settings.names]

    async def _health(self, _: web.Request) -> web.Response:
        state = self._state()
        health = {"status": "ok" if state == "ready" else "unavailable", "reason": state}
        # A worker with a refused peer is healthy: it still serves, and pairs with the others.
        return _json({**health, "refused_peers": self._refused_peers()}, state != "ready")

    def _refused_peers(self) -> dict[str, str]:
        """Returns the peers that are refused now, each with the reason."""
        refused = getattr(self._worker, "refused_peers", None)
        return refused() if refused is not None else {}

    def _state(self) -> str:
        if self._engine.failure is not None:
            return f"the engine has ended: {self._engine.failure}. Restart the worker"
        return "draining" if self.draining.begun else "ready"

    async def _get_metrics(self, _: web.Request) -> web.Response:
        stats = getattr(self._worker.engine, "stats", None)
        if stats is not None:
            self._engine_stats = await self._snapshot(lambda: numbers_of(stats()), self._engine_stats)
        handoff_stats = getattr(self._worker, "handoff_stats", None)
        if handoff_stats is not None:
            self._engine_stats = {**self._engine_stats, **numbers_of(handoff_stats(), "handoff_")}
        text = self._metrics.text(self._engine.num_open, self._engine_stats, self._refused_peers())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _describe(self, _: web.Request) -> web.Response:
        self._description = await self._snapshot(self._worker.describe, self._description)
        own = {
            "model": self._settings.model_name,
            "models": self._cards(),
            "state": self._state(),
            "load": {"open_requests": self._engine.num_open},
        }
        return _json({**self._description, **own})

    async def _snapshot(self, function: Any, last: Any) -> Any:
        """Returns what `function` returns between two steps, or `last` if the current step takes too long."""
        if self._engine.failure is not None:
            return last
        try:
            return await asyncio.wait_for(self._engine.call(function), _SNAPSHOT_WAIT_S)
        except TimeoutError:
            return last

    async def _trace(self, request: web.Request) -> web.Response:
        received_s = time.monotonic()
        answer = self._traces.answer(
            request.query.getall("request", []),
            engine=self._engine_id,
            incarnation=str(self._description.get("incarnation", "")),
            received_s=received_s,
        )
        return _json(answer)

    async def _drain(self, _: web.Request) -> web.Response:
        self.draining.begin("POST /v1/kvferry/drain")
        return _json({"state": "draining", "open_requests": self._engine.num_open})

    async def _release(self, request: web.Request) -> web.Response:
        body = decode_body(await request.read(), ReleaseBody)
        reason = f"the router gave it up: {body.reason[:_MAX_REASON_CHARS]}" if body.reason else "the router gave it up"
        released = await self._engine.call(lambda: self._worker.release(TransferId(body.transfer_id), reason))
        return _json({"released": released})

    async def _blocks(self, _: web.Request) -> web.Response:
        """Answers with the hashes of the blocks in the prefix cache, 8 bytes each, concatenated."""
        known = getattr(self._worker, "cached_blocks", None)
        hashes = [] if known is None else await self._engine.call(known)
        packed = await self._reader.threads.run(partial(packed_hashes, hashes))  # a large cache has a million
        return web.Response(body=packed, content_type="application/octet-stream")

    async def _meet(self, request: web.Request) -> web.Response:
        body = decode_body(await request.read(), MeetBody)
        body.check()
        return _json({"state": await self._met(body)})

    async def _met(self, body: MeetBody) -> str:
        """Returns the state of the handshake; `asking` if it is still going on after the wait."""
        meet = getattr(self._worker, "meet", None)
        if meet is None:
            return "unsupported"
        state = "asking"
        for _ in range(_MEET_LOOKS):
            state = await self._engine.call(lambda: meet(body.engine, body.incarnation, body.host, body.port))
            if state != "asking":
                break
            await asyncio.sleep(_MEET_LOOK_EVERY_S)
        return state


def _json(body: object, unavailable: bool = False) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), content_type="application/json", status=503 if unavailable else 200
    )
