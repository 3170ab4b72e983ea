"""What the router tells of its fleet: GET /v1/kvferry, and the word of /health."""

from kvferry.router.context import RouterContext
from kvferry.router.fleet.worker import Worker

__all__ = ["fleet_view", "health_of"]


def health_of(shared: RouterContext, now_s: float) -> tuple[str, str]:
    """`ok`, `degraded` or `unavailable`, and why. Degraded: requests are answered, and nothing is handed over."""
    fleet = shared.fleet
    decode = [worker for worker in fleet.decode if worker.why_unusable is None]
    if not decode:
        reasons = "; ".join(str(worker.why_unusable) for worker in fleet.decode)
        return "unavailable", f"no decode worker: {reasons or 'none is configured'}"
    if not any(fleet.has_prefill(one) for one in decode):
        return "degraded", f"decode only: {fleet.why_no_prefill(decode[0])}"
    if shared.alarm.rings(now_s):
        share = shared.alarm.share(now_s)
        return "degraded", f"decode only for {share:.0%} of the latest requests; the last: {shared.alarm.last_why}"
    return "ok", "ready"


def fleet_view(shared: RouterContext, now_s: float) -> dict[str, object]:
    """Every worker, every pair with its numbers, and how requests are spread."""
    fleet, settings = shared.fleet, shared.settings
    status, reason = health_of(shared, now_s)
    line = shared.cost.line()
    return {
        "status": status,
        "reason": reason,
        "workers": [_worker(worker, now_s) for worker in fleet.workers],
        "pairs": [_pair(shared, prefill, decode, now_s) for prefill in fleet.prefill for decode in fleet.decode],
        "policies": {"prefill": settings.prefill_policy, "decode": settings.decode_policy},
        "local_below_tokens": shared.local_below_tokens,
        "measured": {
            "prefill_s": None if line is None else line[0],
            "prefill_s_per_token": None if line is None else line[1],
            "handoff_s": shared.cost.handoff_s,
        },
        "waiting": shared.num_waiting,
        "decode_only_share": shared.alarm.share(now_s),
    }


def _worker(worker: Worker, now_s: float) -> dict[str, object]:
    info = worker.info
    return {
        "url": worker.url,
        "wanted": worker.wanted,
        "source": worker.source,
        "engine": info.engine if info else None,
        "incarnation": info.incarnation if info else None,
        "kind": info.kind if info else None,
        "version": info.version if info else None,
        "role": info.role if info else None,
        "mode": worker.mode,
        "model": info.model if info else None,
        "usable": worker.why_unusable is None,
        "why": worker.why_unusable or "",
        "breaker": worker.breaker.state(now_s),
        "open_requests": worker.num_open,
        "load": worker.load,
        "free_blocks": worker.free_blocks,
        "blocks": info.limits.blocks if info else 0,
        "cached_blocks": len(worker.cached.blocks) or (info.cache.blocks if info and info.cache else 0),
        "failures": worker.num_failures,
    }


def _pair(shared: RouterContext, prefill: Worker, decode: Worker, now_s: float) -> dict[str, object]:
    pair = shared.fleet.pairs.of(prefill, decode)
    return {
        "prefill": prefill.name,
        "decode": decode.name,
        "prefill_url": prefill.url,
        "decode_url": decode.url,
        "why_not": shared.fleet.why_not(prefill, decode),
        "breaker": pair.breaker.state(now_s),
        "open": pair.open,
        "landed": pair.landed,
        "failed": pair.failed,
        "handed_over_tokens": pair.handed_over_tokens,
        "last_why": pair.last_why,
    }
