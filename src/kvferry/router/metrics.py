"""Prometheus metrics of the router. Names and meanings are listed in docs/reference/metrics.md."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.router.workers import Fleet

__all__ = ["RouterMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    """One registry a router."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "kvferry_router_requests", "Requests that ended", ["endpoint", "status"], registry=registry
        )
        self._routes = Counter(
            "kvferry_router_routes",
            "Requests by the way they went: pull, push, prefill (its token was the whole answer), alone (decode only)",
            ["route"],
            registry=registry,
        )
        self._alone = Counter(
            "kvferry_router_decode_only", "Requests that decode served alone. Alarm on its rate", registry=registry
        )
        self._failures = Counter(
            "kvferry_router_worker_failures", "Failed attempts", ["worker", "stage"], registry=registry
        )
        self._tokens = Counter(
            "kvferry_router_prompt_tokens", "Prompt tokens by where their KV came from", ["source"], registry=registry
        )
        self._prefill = Histogram(
            "kvferry_router_prefill_seconds", "Prefill's answer, pull mode", buckets=_SECONDS, registry=registry
        )
        self._first_byte = Histogram(
            "kvferry_router_first_byte_seconds", "Arrival to the first byte to the client", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._up = Gauge("kvferry_router_worker_up", "1: used for new requests", ["worker", "role"], registry=registry)
        self._open = Gauge("kvferry_router_worker_open", "Requests open", ["worker", "role"], registry=registry)

    def on_end(self, endpoint: str, status: int) -> None:
        """A request ended; 499: its client hung up."""
        self._requests.labels(endpoint, str(status)).inc()

    def on_route(self, route: str) -> None:
        """A way was chosen, and the answer has begun."""
        self._routes.labels(route).inc()
        if route == "alone":
            self._alone.inc()

    def on_failure(self, worker: str, stage: str) -> None:
        """An attempt failed."""
        self._failures.labels(worker, stage).inc()

    def on_prefill(self, after_s: float) -> None:
        """Prefill answered."""
        self._prefill.observe(after_s)

    def on_first_byte(self, after_s: float, headers: Mapping[str, str]) -> None:
        """The answer begins; `headers` say how the prompt was served, where the worker says it."""
        self._first_byte.observe(after_s)
        for source in ("handed_over", "cached", "recomputed"):
            value = headers.get("x-kvferry-" + source.replace("_", "-"), "")
            if value.isascii() and value.isdigit() and len(value) < 10:
                self._tokens.labels(source).inc(int(value))

    def text(self, fleet: Fleet) -> bytes:
        """The exposition format."""
        for worker in fleet.workers:
            self._up.labels(worker.url, worker.wanted).set(worker.why_unusable is None)
            self._open.labels(worker.url, worker.wanted).set(worker.num_open)
        return generate_latest(self._registry)
