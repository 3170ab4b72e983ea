"""Adds kvferry's series to vLLM's /metrics, through vLLM's own hooks."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.connector.base import Failed, Landed
from kvferry.stats import HandoffStats

__all__ = ["FerryMetrics", "FerryStats", "of_ended", "of_unstarted", "of_worker"]

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
_COUNTERS = {
    "handoffs_landed": "Hand-offs whose KV cache arrived whole here",
    "handoffs_failed": "Hand-offs that ended without their KV cache",
    "handoff_bytes": "Bytes of KV cache that arrived here",
    "handoff_runs": "Byte runs that they came in",
    "verified_cells": "Pieces of KV cache compared with prefill's by digest",
    "expired_leases": "Grants that ended because their holder did not renew the lease",
}
_GAUGES = {
    "open_grants": "Finished prefills whose blocks are kept for a peer, added up over all ranks",
    "quarantined_blocks": "Blocks that are not reused because a peer that vanished may still write to them",
    "peers": "Peer ranks that this engine's ranks know",
}


@dataclass
class FerryStats(KVConnectorStats):  # type: ignore[misc]  # vllm is not installed where types are checked
    """One half's numbers. `data` holds `counts` (since the last report), `now` (gauges) and `transfer_s` (per hand-
    off).
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Sets all numbers to nothing."""
        self.data: dict[str, Any] = {"counts": {}, "now": {}, "transfer_s": []}

    def aggregate(self, other: "KVConnectorStats") -> "FerryStats":
        """Adds the numbers of another rank, or of the scheduler."""
        for part in ("counts", "now"):
            for name, value in other.data[part].items():
                self.data[part][name] = self.data[part].get(name, 0) + value
        self.data["transfer_s"].extend(other.data["transfer_s"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the numbers for vLLM's periodic log line."""
        counts, times = self.data["counts"], self.data["transfer_s"]
        mean_ms = round(1e3 * sum(times) / len(times), 3) if times else 0.0
        if not (counts.get("handoffs_landed") or counts.get("handoffs_failed")):
            return {name.replace("_", " "): value for name, value in counts.items() if value}
        return {
            "landed": counts.get("handoffs_landed", 0),
            "failed": counts.get("handoffs_failed", 0),
            "MB": round(counts.get("handoff_bytes", 0) / 1e6, 3),
            "mean transfer (ms)": mean_ms,
        }

    def is_empty(self) -> bool:
        """Whether no hand-off has ended: vLLM then writes no line into its log. The gauges are in its metrics."""
        return not (any(self.data["counts"].values()) or self.data["transfer_s"])


def of_ended(landed: tuple[Landed, ...], failed: tuple[Failed, ...]) -> FerryStats | None:
    """Returns the numbers of the hand-offs that ended in one step, or None if none ended."""
    if not landed and not failed:
        return None
    counts = {
        "handoffs_landed": len(landed),
        "handoffs_failed": len(failed),
        "handoff_bytes": sum(one.num_bytes for one in landed),
        "handoff_runs": sum(one.num_runs for one in landed),
        "verified_cells": sum(one.verified_cells for one in landed),
    }
    return FerryStats({"counts": counts, "now": {}, "transfer_s": [one.transfer_s for one in landed]})


def of_unstarted(num_failed: int) -> FerryStats | None:
    """Returns the numbers of hand-offs that have failed before they had blocks, or None if there were none."""
    return FerryStats({"counts": {"handoffs_failed": num_failed}, "now": {}, "transfer_s": []}) if num_failed else None


def of_worker(now: HandoffStats, before: HandoffStats) -> FerryStats | None:
    """Returns how one rank's numbers have changed, or None if they have not."""
    if now == before:
        return None
    return FerryStats(
        {
            "counts": {"expired_leases": now.expired_leases - before.expired_leases},
            "now": {name: getattr(now, name) for name in _GAUGES},
            "transfer_s": [],
        }
    )


class FerryMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """Creates kvferry's series and feeds them with what vLLM collects."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"kvferry_{name}", documentation=text, labelnames=labelnames), labelvalues
            )
            for name, text in _COUNTERS.items()
        }
        self._gauges = {
            name: create_metric_per_engine(
                self._gauge_cls(name=f"kvferry_{name}", documentation=text, labelnames=labelnames), labelvalues
            )
            for name, text in _GAUGES.items()
        }
        self._transfer = create_metric_per_engine(
            self._histogram_cls(
                name="kvferry_handoff_transfer_seconds",
                documentation="First post (pull) or registration (push) to last byte",
                buckets=_SECONDS,
                labelnames=labelnames,
            ),
            labelvalues,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one step's numbers to the series."""
        for name, value in transfer_stats_data["counts"].items():
            if value:
                self._counters[name][engine_idx].inc(value)
        for name, value in transfer_stats_data["now"].items():
            self._gauges[name][engine_idx].set(value)
        for value in transfer_stats_data["transfer_s"]:
            self._transfer[engine_idx].observe(value)
