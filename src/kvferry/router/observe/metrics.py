"""Prometheus metrics of the router. Names and meanings are listed in docs/reference/metrics.md."""

import asyncio
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.router.fleet.workers import Fleet

__all__ = ["RouterMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SOURCES = {
    "handed_over": "x-kvferry-handed-over",
    "fetched": "x-kvferry-fetched",
    "cached": "x-kvferry-cached",
    "recomputed": "x-kvferry-recomputed",
}


class RouterMetrics:
    """The counters of one router, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvferry_router_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvferry_router_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"kvferry_router_{name}_seconds", text, buckets=_SECONDS, registry=registry)

        self._requests = counter("requests", "Requests that ended", "endpoint", "status")
        self._routes = counter(
            "routes",
            "Answers by route: pull, push, prefill (its token was the whole answer), local (decode computed the prompt "
            "by choice), alone (decode only)",
            "route",
        )
        self._decode_only = counter("decode_only", "Answers that decode gave without a prefill worker")
        self._failures = counter("worker_failures", "Attempts that failed", "worker", "stage")
        self._tokens = counter("prompt_tokens", "Prompt tokens by where their KV came from", "source")
        self._prefill = seconds("prefill", "Time from the request to prefill to its answer")
        self._handoff = seconds("handoff", "Time from prefill's answer to decode's first byte, of streams")
        self._first_byte = seconds("first_byte", "Time from a request's arrival to the first byte of a stream")
        self._pairs = counter(
            "pair_handoffs",
            "Hand-offs of a pair: landed, failed, or unknown (decode does not say, as a vLLM server)",
            "prefill",
            "decode",
            "outcome",
        )
        self._pair_tokens = counter("pair_tokens", "Prompt tokens that a pair handed over", "prefill", "decode")
        self._up = gauge("worker_up", "1 if the worker is used for new requests", "worker", "role")
        self._open = gauge("worker_open", "Open requests of this router", "worker", "role")
        self._room = gauge("worker_free_blocks", "Blocks that are neither in use nor reserved", "worker", "role")
        self._breaker = gauge("worker_breaker_open", "1 if left alone after failures in a row", "worker", "role")
        self._pair_open = gauge("pair_breaker_open", "1 if the pair is left alone", "prefill", "decode")
        self._waiting = gauge("waiting", "Requests that wait for room on decode")
        self._alarm = gauge("decode_only_alarm", "1 if too many requests are served decode-only, not by choice")
        self._threshold = gauge("local_below_tokens", "Prompts with fewer uncached tokens are computed by decode")
        self._writing = asyncio.Lock()
        self._children: dict[tuple[Counter, *tuple[str, ...]], Counter] = {}

    def on_end(self, endpoint: str, status: int) -> None:
        """Counts a request that ended; status 499 means that its client hung up."""
        self._child(self._requests, endpoint, str(status)).inc()

    def on_route(self, route: str) -> None:
        """Counts an answer that has begun, by its route."""
        self._child(self._routes, route).inc()
        if route == "alone":
            self._decode_only.inc()

    def on_failure(self, worker: str, stage: str) -> None:
        """Counts an attempt that failed."""
        self._child(self._failures, worker, stage).inc()

    def on_prefill(self, after_s: float) -> None:
        """Notes that prefill answered `after_s` after it was asked."""
        self._prefill.observe(after_s)

    def on_handoff(self, after_s: float) -> None:
        """Notes that decode began to answer `after_s` after prefill had answered."""
        self._handoff.observe(after_s)

    def on_first_byte(self, after_s: float) -> None:
        """Notes that a stream began `after_s` after its request arrived."""
        self._first_byte.observe(after_s)

    def on_tokens(self, headers: Mapping[str, str]) -> None:
        """Counts prompt tokens by source, if the worker's `headers` say how the prompt was served."""
        for source, name in _SOURCES.items():
            value = headers.get(name, "")
            if value.isascii() and value.isdigit() and len(value) < 10:
                self._child(self._tokens, source).inc(int(value))

    def on_pair(self, prefill: str, decode: str, *, outcome: str, headers: Mapping[str, str]) -> None:
        """Counts a hand-off of a pair; `outcome` is landed, failed or unknown."""
        self._child(self._pairs, prefill, decode, outcome).inc()
        value = headers.get(_SOURCES["handed_over"], "")
        if value.isascii() and value.isdigit() and len(value) < 10:
            self._child(self._pair_tokens, prefill, decode).inc(int(value))

    def _child(self, counter: Counter, *labels: str) -> Counter:
        """Returns the counter of these labels. It is kept, because finding it costs as much as all other counting for a
        request."""
        key: tuple[Counter, *tuple[str, ...]] = (counter, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = counter.labels(*labels)
        return child

    def forget(self, name: str, url: str) -> None:
        """Drops the series of a worker that has left the fleet. Otherwise a changing fleet would fill the memory."""
        for key in [key for key in self._children if name in key[1:] or url in key[1:]]:
            del self._children[key]
            key[0].remove(*key[1:])

    async def text(self, fleet: Fleet, *, now_s: float, num_waiting: int, alarm: bool, local_below: int) -> bytes:
        """Returns all metrics in Prometheus's text format. `now_s` is monotonic.

        A large fleet has thousands of pairs, so the text is written on another thread. One is written at a time.
        """
        async with self._writing:
            values: list[tuple[Gauge, tuple[str, ...], float]] = []
            for worker in fleet.workers:
                labels = (worker.url, worker.assigned_role)
                values.append((self._up, labels, worker.unusable_reason is None))
                values.append((self._open, labels, worker.num_open))
                values.append((self._breaker, labels, not worker.breaker.permits(now_s)))
                if worker.free_blocks is not None:
                    values.append((self._room, labels, worker.free_blocks))
            for prefill in fleet.prefill:
                for decode in fleet.decode:
                    open_now = not fleet.pairs.of(prefill, decode).breaker.permits(now_s)
                    values.append((self._pair_open, (prefill.name, decode.name), open_now))
            return await asyncio.to_thread(self._text, values, num_waiting, alarm, local_below)

    def _text(
        self, values: Sequence[tuple[Gauge, tuple[str, ...], float]], num_waiting: int, alarm: bool, local_below: int
    ) -> bytes:
        for gauge in (self._up, self._open, self._room, self._breaker, self._pair_open):
            gauge.clear()  # drops the labels of workers that have gone
        for gauge, labels, value in values:
            gauge.labels(*labels).set(value)
        self._waiting.set(num_waiting)
        self._alarm.set(alarm)
        self._threshold.set(local_below)
        return generate_latest(self._registry)
