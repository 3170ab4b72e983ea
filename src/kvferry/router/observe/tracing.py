"""OpenTelemetry: the spans of router, prefill and decode form one trace, with all times in the router's clock.

This module is imported only if tracing is asked for (`kvferry route --otlp`), because it needs the extra kvferry[otel].

A request is a server span, and each request to a worker is a client span below it. That span's context goes to the
worker as `traceparent` (W3C Trace Context), so that a worker with its own tracing, such as vLLM, adds its spans below.
kvferry's workers need no OpenTelemetry: they remember their stages, the router asks for them soon after, and they
become spans of the service `kvferry-worker`, corrected by the offset of the worker's clock.

The caller decides in its `traceparent` whether a request is recorded; without one, the sampler does
(OTEL_TRACES_SAMPLER).
"""

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvferry.router.fleet.worker import Worker
from kvferry.router.observe.observer import Field
from kvferry.router.observe.timeline import Timeline, Timelines, WorkerPart, spans_of
from kvferry.router.observe.timeline_collect import Collector
from kvferry.web.proxies import is_loopback
from kvferry.web.stages import MAX_ASKED

__all__ = ["Tracing", "otlp_exporter"]

logger = logging.getLogger(__name__)

_ATTRIBUTES = ("route", "prefill", "decode", "transfer_id", "why", "handed_over", "cached", "recomputed")
_COLLECT_AFTER_S = 0.25
"""This long after a request has ended, workers are asked about all requests that have ended meanwhile."""
_MAX_WAITING = 4096
"""If more requests than this have ended meanwhile, the rest are traced without their workers' stages."""
_MAX_ENGINES = 64


def otlp_exporter(url: str) -> SpanExporter:
    """Returns an exporter to an OTLP receiver over HTTP. `url` is http://HOST:4318; the protocol's path is added."""
    path = "" if url.rstrip("/").endswith("/v1/traces") else "/v1/traces"
    if is_loopback(url):  # the exporter's own client would ask a proxy of the environment for it
        host = urlsplit(url).hostname
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = f"{os.environ[name]},{host}" if os.environ.get(name) else str(host)
    return OTLPSpanExporter(endpoint=url.rstrip("/") + path)


@dataclass(slots=True)
class _Traced:
    """The spans of one dispatch."""

    root: Span
    wall_less_monotonic_ns: int
    asked: dict[str, Span] = field(default_factory=dict)
    """Maps a stage to the open request to its worker."""
    of_worker: dict[tuple[str, str], Span] = field(default_factory=dict)
    """Maps stage and engine to the latest request to that worker."""
    line: Timeline | None = None

    def wall_ns(self, at_s: float) -> int:
        """Converts a monotonic time into OpenTelemetry's nanoseconds since 1970."""
        return int(at_s * 1e9) + self.wall_less_monotonic_ns


class Tracing:
    """An Observer that exports spans. It must be added after `Timelines`: once a request has ended, it turns its time
    line into the workers' spans."""

    def __init__(
        self,
        exporter: SpanExporter,
        timelines: Timelines,
        collector: Collector,
        workers: Callable[[], Iterable[Worker]],
        session: Callable[[], aiohttp.ClientSession],
        version: str,
        *,
        processor: SpanProcessor | None = None,
    ) -> None:
        """`version` is kvferry's own. Without a `processor`, spans are exported in batches on a thread of its own."""
        self._version = version
        self._processor = processor or BatchSpanProcessor(exporter)
        self._provider = TracerProvider(resource=_resource("kvferry-router", version))
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("kvferry", version)
        self._workers_tracers: OrderedDict[str, Tracer] = OrderedDict()
        self._timelines = timelines
        self._collector = collector
        self._workers = workers
        self._session = session
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[int, _Traced] = {}
        self._ended: list[_Traced] = []
        self._collecting: asyncio.Task[None] | None = None
        self._num_dropped = 0

    async def stop(self) -> None:
        """Asks for the last stages and sends what is left. Waits for the receiver; see OTEL_BSP_EXPORT_TIMEOUT."""
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.gather(self._collecting, return_exceptions=True)
        await self._collect()
        await asyncio.to_thread(self._provider.shutdown)
        if self._num_dropped:
            logger.warning("stages of workers were left out of traces requests=%d", self._num_dropped)

    # ---- Observer ----

    def worker_headers(self, dispatch: int, stage: str) -> Mapping[str, str]:
        """Begins the span of a request to a worker, and returns its context as headers."""
        traced = self._open.get(dispatch)
        if traced is None:
            return {}
        span = self._tracer.start_span(
            f"{stage} request",
            context=set_span_in_context(traced.root),
            kind=SpanKind.CLIENT,
            start_time=traced.wall_ns(time.monotonic()),
        )
        traced.asked[stage] = span
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context=set_span_in_context(span))
        return headers

    def on_event(self, dispatch: int, name: str, at_s: float, fields: Mapping[str, Field]) -> None:
        """Begins, describes or ends spans, as the event says."""
        if name == "arrived":
            self._open[dispatch] = self._begin(at_s, fields)
            return
        traced = self._open.get(dispatch)
        if traced is None:
            return
        stage, _, what = name.partition(".")
        if what == "sent" and (span := traced.asked.get(stage)) is not None:
            worker = str(fields.get("worker") or "")
            span.set_attribute("kvferry.engine", worker)
            traced.of_worker[stage, worker] = span
        elif name == "prefill.answered":
            self._end_asked(traced, "prefill", at_s)
        elif name == "failed":
            self._end_asked(traced, str(fields.get("stage") or ""), at_s, str(fields.get("cause") or ""))
        elif name == "chosen":
            _describe(traced.root, fields)
        elif name in ("first_byte", "released"):
            described = {key: value for key, value in fields.items() if value not in (None, "")}
            traced.root.add_event(name, described, timestamp=traced.wall_ns(at_s))
        elif name == "ended":
            del self._open[dispatch]
            self._end(traced, dispatch, at_s, fields)

    def _begin(self, at_s: float, fields: Mapping[str, Field]) -> _Traced:
        given = str(fields.get("traceparent") or "")
        context = self._propagator.extract({"traceparent": given}) if given else Context()
        wall_less_monotonic_ns = time.time_ns() - int(time.monotonic() * 1e9)
        root = self._tracer.start_span(
            f"POST {fields.get('path') or ''}",
            context=context,
            kind=SpanKind.SERVER,
            start_time=int(at_s * 1e9) + wall_less_monotonic_ns,
            attributes={
                "http.request.method": "POST",
                "url.path": str(fields.get("path") or ""),
                "kvferry.request_id": str(fields.get("request_id") or ""),
                "kvferry.stream": bool(fields.get("stream")),
            },
        )
        return _Traced(root, wall_less_monotonic_ns)

    def _end_asked(self, traced: _Traced, stage: str, at_s: float, cause: str = "") -> None:
        span = traced.asked.pop(stage, None)
        if span is not None:
            if cause:
                span.set_status(StatusCode.ERROR, cause)
            span.end(traced.wall_ns(at_s))

    def _end(self, traced: _Traced, dispatch: int, at_s: float, fields: Mapping[str, Field]) -> None:
        for stage in list(traced.asked):
            self._end_asked(traced, stage, at_s)
        _describe(traced.root, fields)
        status = int(fields.get("status") or 0)
        traced.root.set_attribute("http.response.status_code", status)
        if status >= 500:
            traced.root.set_status(StatusCode.ERROR)
        traced.root.end(traced.wall_ns(at_s))
        traced.line = self._timelines.ended.get(dispatch)
        if not traced.root.is_recording() and not traced.root.get_span_context().trace_flags.sampled:
            return
        if len(self._ended) >= _MAX_WAITING:
            self._num_dropped += 1
            return
        self._ended.append(traced)
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.get_running_loop().create_task(self._collect_soon())

    # ---- workers' stages ----

    async def _collect_soon(self) -> None:
        while self._ended:
            await asyncio.sleep(_COLLECT_AFTER_S)
            await self._collect()

    async def _collect(self) -> None:
        traced, self._ended = self._ended, []
        wanted: dict[str, dict[str, None]] = {}
        for one in traced:
            for _, engine in one.of_worker:
                if one.line is not None:
                    wanted.setdefault(engine, {})[one.line.text("request_id")] = None
        workers = [worker for worker in self._workers() if worker.name in wanted]
        parts = await asyncio.gather(*(self._ask(worker, list(wanted[worker.name])) for worker in workers))
        by_id: dict[str, list[WorkerPart]] = {}
        for part in (one for some in parts for one in some):
            by_id.setdefault(part.report.request_id, []).append(part)
        for one in traced:
            if one.line is not None:
                self._add_stages(one, one.line, by_id.get(one.line.text("request_id"), ()))

    async def _ask(self, worker: Worker, ids: list[str]) -> list[WorkerPart]:
        found: list[WorkerPart] = []
        for at in range(0, len(ids), MAX_ASKED):
            found += await self._collector.ask(self._session(), worker, ids[at : at + MAX_ASKED])
        return found

    def _add_stages(self, traced: _Traced, line: Timeline, parts: Iterable[WorkerPart]) -> None:
        for span in spans_of(line, parts):
            parent = traced.of_worker.get((span.lane, span.engine))
            if parent is None or span.parent != f"{span.lane} request":
                continue
            self._tracer_of(span.engine).start_span(
                span.name,
                context=set_span_in_context(parent),
                start_time=traced.wall_ns(span.begin_s),
                attributes={"kvferry.engine": span.engine, "kvferry.clock_error_ms": round(1e3 * span.error_s, 3)},
            ).end(traced.wall_ns(span.end_s))

    def _tracer_of(self, engine: str) -> Tracer:
        """Returns the tracer of one worker. Each is a service instance of its own, so that viewers show them apart."""
        tracer = self._workers_tracers.get(engine)
        if tracer is None:
            # Whether to record was decided for the request, and holds for its parts.
            resource = _resource("kvferry-worker", self._version, engine)
            provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            tracer = self._workers_tracers[engine] = provider.get_tracer("kvferry", self._version)
            if len(self._workers_tracers) > _MAX_ENGINES:
                self._workers_tracers.popitem(last=False)
        return tracer


def _resource(service: str, version: str, instance: str | None = None) -> Resource:
    attributes = {"service.name": service, "service.version": version}
    return Resource.create(attributes if instance is None else {**attributes, "service.instance.id": instance})


def _describe(span: Span, fields: Mapping[str, Field]) -> None:
    for name in _ATTRIBUTES:
        value = fields.get(name)
        if value not in (None, ""):
            span.set_attribute(f"kvferry.{name}", value if value is not None else "")
