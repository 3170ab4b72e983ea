"""OpenTelemetry: one trace over router, prefill and decode; with an exporter in memory, and with a real receiver."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from kvferry.cli.main import ExitCode, main
from kvferry.errors import ConfigError
from kvferry.router.app import Router
from kvferry.router.observe import tracing
from kvferry.web.listen import Listener
from tests.harness.scripted_worker import FAST, cutting
from tests.harness.traced_worker import TracedWorker, a_decode, a_prefill
from tests.harness.until import until_async

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


@asynccontextmanager
async def traced(*workers: TracedWorker) -> AsyncIterator[tuple[str, InMemorySpanExporter]]:
    """Yields a router whose spans stay here. Leaving the context ends the router, so that all spans are there."""
    for worker in workers:
        await worker.start()
    prefill = [worker.url for worker in workers if worker.role == "prefill"]
    router = Router(prefill, [worker.url for worker in workers if worker.role == "decode"], FAST)
    exporter = InMemorySpanExporter()
    router.trace_by(tracing.Tracing(exporter, *router.seen_by_tracing, processor=SimpleSpanProcessor(exporter)))
    listener = Listener(router.app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    try:
        yield listener.url, exporter
    finally:
        await listener.stop()
        for worker in workers:
            await worker.stop()


async def complete(url: str, request_id: str = "r1", status: int = 200, **headers: str) -> None:
    body = {"prompt": "hello", "max_tokens": 4}
    async with aiohttp.ClientSession() as session:
        headers = {"X-Request-Id": request_id, **headers}
        async with session.post(url + "/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            await answer.read()


def by_name(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    found = {span.name: span for span in spans}
    assert len(found) == len(spans), [span.name for span in spans]
    return found


def id_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"{context.span_id:016x}"


def attributes_of(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def times_of(span: ReadableSpan) -> tuple[int, int]:
    """Returns when the span began and ended, in Unix nanoseconds."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def parent_of(span: ReadableSpan) -> str:
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def pair(mode: str = "push") -> tuple[TracedWorker, TracedWorker]:
    """Workers whose clocks are a day ahead and an hour slow."""
    prefill = a_prefill("p0", ("queue", 0.01), ("prefill", 0.03), mode=mode, ahead_s=86_400.0)
    return prefill, a_decode(
        "d0", ("handshake", 0.01), ("transfer", 0.02), ("decode", 0.01), mode=mode, ahead_s=-3600.0
    )


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_one_trace_joins_router_prefill_and_decode(mode: str) -> None:
    prefill, decode = pair(mode)
    began_ns = time.time_ns()
    async with traced(prefill, decode) as (url, exporter):
        await complete(url, traceparent=SAMPLED)
        # Workers are asked soon after that, without a further request.
        await until_async(lambda: len(exporter.get_finished_spans()) == 8)
        spans = by_name(exporter.get_finished_spans())
    ended_ns = time.time_ns()
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    root = spans["POST /v1/completions"]
    assert (root.kind, parent_of(root)) == (SpanKind.SERVER, PARENT)
    for lane, worker, stages in (
        ("prefill", prefill, ("queue", "prefill")),
        ("decode", decode, ("handshake", "transfer", "decode")),
    ):
        asked = spans[f"{lane} request"]
        assert (asked.kind, parent_of(asked)) == (SpanKind.CLIENT, id_of(root))
        # W3C: the worker got the context of just this span.
        assert worker.asked[0].headers["traceparent"] == f"00-{TRACE}-{id_of(asked)}-01"
        at_ns = 0
        for name in stages:
            span = spans[name]
            error_ns = int(1e6 * attributes_of(span)["kvferry.clock_error_ms"]) + 1000
            assert parent_of(span) == id_of(asked)
            assert span.resource.attributes["service.name"] == "kvferry-worker"
            assert span.resource.attributes["service.instance.id"] == worker.name
            (asked_ns, answered_ns), (start_ns, end_ns) = times_of(asked), times_of(span)
            assert asked_ns <= start_ns <= end_ns <= answered_ns
            assert start_ns >= at_ns - 2 * error_ns
            assert end_ns - start_ns >= 9_000_000 - 2 * error_ns
            at_ns = end_ns
    start_ns, end_ns = times_of(root)
    assert began_ns - 1e7 <= start_ns <= end_ns <= ended_ns + 1e7
    assert root.resource.attributes["service.name"] == "kvferry-router"
    assert attributes_of(root)["kvferry.route"] == mode
    assert attributes_of(root)["kvferry.handed_over"] == "507"
    assert attributes_of(root)["http.response.status_code"] == 200
    assert [event.name for event in root.events] == ["first_byte"]


async def test_a_callers_trace_that_is_not_recorded_is_passed_on_and_costs_nothing_more() -> None:
    prefill, decode = pair()
    async with traced(prefill, decode) as (url, exporter):
        await complete(url, traceparent=f"00-{TRACE}-{PARENT}-00")
    assert exporter.get_finished_spans() == ()
    assert decode.asked[0].headers["traceparent"].startswith(f"00-{TRACE}-")
    assert decode.asked[0].headers["traceparent"].endswith("-00")
    assert (prefill.num_traces, decode.num_traces) == (0, 0)


async def test_an_invalid_traceparent_begins_a_new_trace() -> None:
    prefill, decode = pair()
    async with traced(prefill, decode) as (url, exporter):
        await complete(url, traceparent="00-nonsense")
    root = by_name(exporter.get_finished_spans())["POST /v1/completions"]
    assert root.parent is None
    assert f"{root.context.trace_id:032x}" in prefill.asked[0].headers["traceparent"]


async def test_a_failed_attempt_and_the_next_one_are_separate_spans() -> None:
    bad, good = a_prefill("p-bad"), a_prefill("p-good", ("prefill", 0.0))
    bad.script = cutting
    decode = a_decode("d0", ("decode", 0.0))
    async with traced(bad, good, decode) as (url, exporter):
        for index in range(2):  # whichever is asked first
            await complete(url, f"r{index}")
    asked = [span for span in exporter.get_finished_spans() if span.name == "prefill request"]
    failed = [span for span in asked if not span.status.is_ok and span.status.description]
    assert {attributes_of(span)["kvferry.engine"] for span in failed} == {"p-bad"}
    assert "broke the connection" in str(failed[0].status.description)
    assert [attributes_of(span)["kvferry.engine"] for span in asked if span not in failed] == ["p-good", "p-good"]


async def test_a_request_that_no_worker_can_answer_is_an_error_of_the_trace() -> None:
    decode = a_decode("d0")
    decode.script = cutting
    async with traced(decode) as (url, exporter):
        await complete(url, status=502)
    root = by_name(exporter.get_finished_spans())["POST /v1/completions"]
    assert not root.status.is_ok
    assert attributes_of(root)["http.response.status_code"] == 502


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_a_receiver_gets_the_spans_over_otlp(path: str) -> None:
    got: list[tuple[str, bytes]] = []

    async def receive(request: web.Request) -> web.Response:
        body = await request.read()
        got.append((request.path, body))
        assert request.content_type == "application/x-protobuf"
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/{rest:.*}", receive)
    receiver = Listener(app, "127.0.0.1", 0, shutdown_s=0.2)
    await receiver.start()
    prefill, decode = pair()
    for worker in (prefill, decode):
        await worker.start()
    router = Router([prefill.url], [decode.url], FAST)
    router.trace_to(receiver.url + path)
    listener = Listener(router.app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    try:
        await complete(listener.url, traceparent=SAMPLED)
        await listener.stop()  # it sends its spans before it ends
    finally:
        for one in (prefill, decode, listener, receiver):
            await one.stop()
    assert {one for one, _ in got} == {"/v1/traces"}
    spans: list[Any] = []
    for _, body in got:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            spans += [(names["service.name"], span.name) for scope in resource.scope_spans for span in scope.spans]
    assert sorted(spans) == [
        ("kvferry-router", "POST /v1/completions"), ("kvferry-router", "decode request"),
        ("kvferry-router", "prefill request"), ("kvferry-worker", "decode"), ("kvferry-worker", "handshake"),
        ("kvferry-worker", "prefill"), ("kvferry-worker", "queue"), ("kvferry-worker", "transfer"),
    ]  # fmt: skip


async def test_a_receiver_that_is_gone_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    decode = a_decode("d0", ("decode", 0.0))
    await decode.start()
    router = Router([], [decode.url], FAST)
    router.trace_to("http://127.0.0.1:1")
    listener = Listener(router.app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    try:
        await complete(listener.url)
    finally:
        async with asyncio.timeout(40):
            await listener.stop()
        await decode.stop()


def test_opentelemetry_is_not_imported_without_the_flag() -> None:
    code = (
        "import sys, kvferry.cli.route; from kvferry.router.app import Router; Router([], ['http://127.0.0.1:1']);"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_without_the_packages_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kvferry.router.observe.tracing", None)
    assert main(["route", "--decode", "http://127.0.0.1:1", "--otlp", "http://127.0.0.1:4318"]) == ExitCode.ERROR
    assert "pip install 'kvferry[otel]'" in capsys.readouterr().err


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must begin with http:// or https://"):
        Router([], ["http://127.0.0.1:1"]).trace_to("localhost:4317")
