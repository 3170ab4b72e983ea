"""Prometheus metrics of a worker. Names and meanings are listed in docs/reference/metrics.md."""

import dataclasses
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.web.records import Served

__all__ = ["WorkerMetrics", "numbers_of"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TRANSFER_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

_REASON_CHARS = 300
"""The most characters of a refusal in a label: enough for the first facts; /health has all of it."""


class WorkerMetrics:
    """The metrics of one server, in a registry of its own, so that two servers can run in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._requests = Counter(
            "kvferry_requests", "HTTP requests that ended", ["endpoint", "status"], registry=registry
        )
        self._prompt_tokens = Counter(
            "kvferry_prompt_tokens", "Prompt tokens by where their KV came from", ["source"], registry=registry
        )
        self._computed_again = Counter(
            "kvferry_prompt_tokens_computed_again",
            "Prompt tokens that were computed besides those: for further choices, and after preemptions",
            registry=registry,
        )
        self._answer_tokens = Counter("kvferry_generation_tokens", "Tokens generated", registry=registry)
        self._handoffs = Counter(
            "kvferry_handoffs", "Hand-offs asked of this worker as decode", ["outcome"], registry=registry
        )
        self._bytes = Counter("kvferry_handoff_bytes", "Bytes of KV that landed here", registry=registry)
        self._first_token = Histogram(
            "kvferry_time_to_first_token_seconds", "Arrival to first token", buckets=_SECONDS, registry=registry
        )
        self._whole = Histogram("kvferry_request_seconds", "Arrival to last token", buckets=_SECONDS, registry=registry)
        self._transfer = Histogram(
            "kvferry_handoff_transfer_seconds",
            "First post (pull) or registration (push) to last byte",
            buckets=_TRANSFER_SECONDS,
            registry=registry,
        )
        self._wait = Histogram(
            "kvferry_handoff_wait_seconds",
            "Arrival on decode until the KV had landed",
            buckets=_SECONDS,
            registry=registry,
        )
        self._open = Gauge("kvferry_open_sequences", "Sequences that have not ended", registry=registry)
        self._refused = Gauge(
            "kvferry_peer_refused", "1 for each peer that is refused now", ["peer", "reason"], registry=registry
        )
        self._engine: dict[str, Gauge] = {}
        for source in ("handed_over", "fetched", "cached", "recomputed"):
            self._prompt_tokens.labels(source)

    def on_status(self, endpoint: str, status: int) -> None:
        """Counts a request that ended with this status; 499 if its client disconnected."""
        self._requests.labels(endpoint, str(status)).inc()

    def on_first_token(self, after_s: float) -> None:
        """Records the time to first token of a request."""
        self._first_token.observe(after_s)

    def on_answer(self, served: Served, num_tokens: int, after_s: float, *, asked_handoff: bool) -> None:
        """Counts a request that was answered completely."""
        self._prompt_tokens.labels("handed_over").inc(served.handed_over)
        self._prompt_tokens.labels("fetched").inc(served.fetched)
        self._prompt_tokens.labels("cached").inc(served.cached)
        self._prompt_tokens.labels("recomputed").inc(served.recomputed)
        self._computed_again.inc(served.computed_again)
        self._answer_tokens.inc(num_tokens)
        self._whole.observe(after_s)
        if asked_handoff:
            self._handoffs.labels("recomputed" if served.lost else "landed").inc()
            self._bytes.inc(served.bytes)
            self._transfer.observe(served.transfer_ms / 1e3)
            self._wait.observe(served.wait_ms / 1e3)

    def text(
        self, num_open: int, engine_stats: Mapping[str, float], refused_peers: Mapping[str, str] | None = None
    ) -> bytes:
        """Returns the metrics in Prometheus' exposition format.

        `engine_stats`: numbers of the engine by name. `refused_peers`: peers that are refused now, with the reasons.
        """
        self._open.set(num_open)
        self._refused.clear()
        for peer, reason in (refused_peers or {}).items():
            self._refused.labels(peer, reason[:_REASON_CHARS]).set(1)
        for name, value in engine_stats.items():
            if name not in self._engine:
                self._engine[name] = Gauge(f"kvferry_engine_{name}", f"Engine: {name}", registry=self._registry)
            self._engine[name].set(value)
        return generate_latest(self._registry)


def numbers_of(stats: object, prefix: str = "") -> dict[str, float]:
    """Returns the numeric fields of a stats record, with names of nested fields and places in tuples joined by `_`."""
    found: dict[str, float] = {}
    if not dataclasses.is_dataclass(stats) or isinstance(stats, type):
        return found
    for field in dataclasses.fields(stats):
        value = getattr(stats, field.name)
        if isinstance(value, int | float):
            found[prefix + field.name] = float(value)
        elif isinstance(value, tuple):
            found |= {f"{prefix}{field.name}_{i}": float(one) for i, one in enumerate(value)}
        else:
            found |= numbers_of(value, f"{prefix}{field.name}_")
    return found
