"""Prometheus metrics of the router. Names and meanings are listed in docs/reference/metrics.md."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.router.fleet.workers import Fleet

__all__ = ["RouterMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SOURCES = {"handed_over": "x-kvferry-handed-over", "cached": "x-kvferry-cached", "recomputed": "x-kvferry-recomputed"}


class RouterMetrics:
    """One registry a router."""

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
            "Requests by the way they went: pull, push, prefill (its token was the whole answer), local (decode by "
            "choice), alone (decode only)",
            "route",
        )
        self._alone = counter("decode_only", "Requests that decode served alone. Alarm on its rate")
        self._failures = counter("worker_failures", "Failed attempts", "worker", "stage")
        self._tokens = counter("prompt_tokens", "Prompt tokens by where their KV came from", "source")
        self._prefill = seconds("prefill", "Prefill's answer, from its request")
        self._handoff = seconds("handoff", "Prefill's answer to decode's first byte")
        self._first_byte = seconds("first_byte", "Arrival to the first byte to the client")
        self._pairs = counter("pair_handoffs", "Hand-offs of a pair: landed, or failed", "prefill", "decode", "outcome")
        self._pair_tokens = counter("pair_tokens", "Prompt tokens that a pair handed over", "prefill", "decode")
        self._up = gauge("worker_up", "1: used for new requests", "worker", "role")
        self._open = gauge("worker_open", "Requests open", "worker", "role")
        self._room = gauge("worker_free_blocks", "Blocks that are neither taken nor promised", "worker", "role")
        self._breaker = gauge("worker_breaker_open", "1: left alone after failures in a row", "worker", "role")
        self._pair_open = gauge("pair_breaker_open", "1: the pair is left alone", "prefill", "decode")
        self._waiting = gauge("waiting", "Requests that wait for room on decode")
        self._alarm = gauge("decode_only_alarm", "1: the fleet serves decode-only, and nobody chose that")
        self._threshold = gauge("local_below_tokens", "Prompts with fewer uncached tokens are computed by decode")
        self._children: dict[tuple[Counter, *tuple[str, ...]], Counter] = {}

    def on_end(self, endpoint: str, status: int) -> None:
        """A request ended; 499: its client hung up."""
        self._child(self._requests, endpoint, str(status)).inc()

    def on_route(self, route: str) -> None:
        """A way was chosen, and the answer has begun."""
        self._child(self._routes, route).inc()
        if route == "alone":
            self._alone.inc()

    def on_failure(self, worker: str, stage: str) -> None:
        """An attempt failed."""
        self._child(self._failures, worker, stage).inc()

    def on_prefill(self, after_s: float) -> None:
        """Prefill answered."""
        self._prefill.observe(after_s)

    def on_handoff(self, after_s: float) -> None:
        """Decode began, so long after prefill had answered."""
        self._handoff.observe(after_s)

    def on_first_byte(self, after_s: float) -> None:
        """The answer begins."""
        self._first_byte.observe(after_s)

    def on_tokens(self, headers: Mapping[str, str]) -> None:
        """`headers` say how the prompt was served, where the worker says it."""
        for source, name in _SOURCES.items():
            value = headers.get(name, "")
            if value.isascii() and value.isdigit() and len(value) < 10:
                self._child(self._tokens, source).inc(int(value))

    def on_pair(self, prefill: str, decode: str, *, landed: bool, headers: Mapping[str, str]) -> None:
        """A hand-off of a pair has ended."""
        self._child(self._pairs, prefill, decode, "landed" if landed else "failed").inc()
        value = headers.get(_SOURCES["handed_over"], "")
        if value.isascii() and value.isdigit() and len(value) < 10:
            self._child(self._pair_tokens, prefill, decode).inc(int(value))

    def _child(self, counter: Counter, *labels: str) -> Counter:
        """Kept: finding one by its labels costs as much as all else that a request counts."""
        key: tuple[Counter, *tuple[str, ...]] = (counter, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = counter.labels(*labels)
        return child

    def forget(self, name: str, url: str) -> None:
        """A worker has left the fleet: its series go, or a fleet that comes and goes would fill the memory."""
        for key in [key for key in self._children if name in key[1:] or url in key[1:]]:
            del self._children[key]
            key[0].remove(*key[1:])

    def text(self, fleet: Fleet, *, now_s: float, num_waiting: int, alarm: bool, local_below: int) -> bytes:
        """The exposition format. `now_s`: monotonic."""
        for gauge in (self._up, self._open, self._room, self._breaker, self._pair_open):
            gauge.clear()  # workers come and go
        for worker in fleet.workers:
            labels = (worker.url, worker.wanted)
            self._up.labels(*labels).set(worker.why_unusable is None)
            self._open.labels(*labels).set(worker.num_open)
            self._breaker.labels(*labels).set(not worker.breaker.permits(now_s))
            if worker.free_blocks is not None:
                self._room.labels(*labels).set(worker.free_blocks)
        for prefill in fleet.prefill:
            for decode in fleet.decode:
                open_now = not fleet.pairs.of(prefill, decode).breaker.permits(now_s)
                self._pair_open.labels(prefill.name, decode.name).set(open_now)
        self._waiting.set(num_waiting)
        self._alarm.set(alarm)
        self._threshold.set(local_below)
        return generate_latest(self._registry)
