"""What the router says about its fleet: the answer to GET /v1/kvferry, and the status in /health."""

from dataclasses import dataclass

from kvferry.router.fleet.admission import Admission
from kvferry.router.fleet.compatibility import differences
from kvferry.router.fleet.handoff_cost import HandoffCost
from kvferry.router.fleet.worker import Worker
from kvferry.router.fleet.workers import Fleet
from kvferry.router.observe.alarm import DecodeOnlyAlarm
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role

__all__ = ["FleetView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """Describes a router's fleet as JSON-ready builtins. It reads the parts that it is given, and changes none."""

    fleet: Fleet
    admission: Admission
    settings: RouterSettings
    cost: HandoffCost
    alarm: DecodeOnlyAlarm

    def health(self, now_s: float) -> tuple[str, str]:
        """Returns `ok`, `degraded` or `unavailable`, and the reason. Degraded: requests are answered without hand-offs,
        all of them or too many."""
        fleet = self.fleet
        decode = [worker for worker in fleet.decode if worker.unusable_reason is None]
        if not decode:
            reasons = "; ".join(str(worker.unusable_reason) for worker in fleet.decode)
            return "unavailable", f"no decode worker: {reasons or 'none is configured'}"
        if not any(fleet.has_prefill(one) for one in decode):
            return "degraded", f"decode only: {fleet.no_prefill_reason(decode[0])}"
        if self.alarm.rings(now_s):
            share, last = self.alarm.share(now_s), self.alarm.last_reason
            return "degraded", f"decode only for {share:.0%} of the latest requests; the last: {last}"
        return "ok", "ready"

    def state(self, now_s: float) -> dict[str, object]:
        """Returns every worker, every pair with its counters, and how requests are spread."""
        fleet, settings = self.fleet, self.settings
        status, reason = self.health(now_s)
        line = self.cost.line()
        return {
            "status": status,
            "reason": reason,
            "workers": [_worker(worker, now_s) for worker in fleet.workers],
            "pairs": [self._pair(prefill, decode, now_s) for prefill in fleet.prefill for decode in fleet.decode],
            "policies": {"prefill": settings.prefill_policy, "decode": settings.decode_policy},
            "local_below_tokens": self.cost.local_below_tokens,
            "measured": {
                "prefill_s": None if line is None else line[0],
                "prefill_s_per_token": None if line is None else line[1],
                "handoff_s": self.cost.handoff_s,
            },
            "waiting": self.admission.num_waiting,
            "decode_only_share": self.alarm.share(now_s),
        }

    def differences(self, prefill_url: str, decode_url: str) -> list[dict[str, str]] | None:
        """Returns in what a pair differs, or None if the fleet has no such pair."""
        prefill = self.fleet.find(prefill_url, Role.PREFILL)
        decode = self.fleet.find(decode_url, Role.DECODE)
        if prefill is None or decode is None:
            return None
        return [] if prefill.info is None or decode.info is None else differences(prefill.info, decode.info)

    def _pair(self, prefill: Worker, decode: Worker, now_s: float) -> dict[str, object]:
        pair = self.fleet.pairs.of(prefill, decode)
        return {
            "prefill": prefill.name,
            "decode": decode.name,
            "prefill_url": prefill.url,
            "decode_url": decode.url,
            "why_not": self.fleet.mismatch_reason(prefill, decode),
            "breaker": pair.breaker.state(now_s),
            "open": pair.open,
            "landed": pair.landed,
            "failed": pair.failed,
            "unknown": pair.unknown,
            "handed_over_tokens": pair.handed_over_tokens,
            "last_why": pair.last_reason,
        }


def _worker(worker: Worker, now_s: float) -> dict[str, object]:
    info = worker.info
    return {
        "url": worker.url,
        "wanted": worker.assigned_role,
        "source": worker.source,
        "engine": info.engine if info else None,
        "incarnation": info.incarnation if info else None,
        "kind": info.kind if info else None,
        "version": info.version if info else None,
        "role": info.role if info else None,
        "mode": worker.mode,
        "model": info.model if info else None,
        "models": list(info.names) if info else [],
        "usable": worker.unusable_reason is None,
        "why": worker.unusable_reason or "",
        "breaker": worker.breaker.state(now_s),
        "open_requests": worker.num_open,
        "load": worker.load,
        "free_blocks": worker.free_blocks,
        "blocks": info.limits.blocks if info else 0,
        "longest_request": info.limits.longest_request if info else 0,
        "cached_blocks": len(worker.cached.blocks) or (info.cache.blocks if info and info.cache else 0),
        "failures": worker.num_failures,
    }
