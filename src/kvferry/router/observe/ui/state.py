"""What the dashboard shows, as JSON-ready builtins. Times are in milliseconds. It never has a prompt or an answer."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from kvferry.router.observe.observer import Field
from kvferry.router.observe.timeline import Timeline, Timelines, WorkerPart, spans_of
from kvferry.router.observe.timeline_breakdown import breakdown
from kvferry.web.stages import HandoffTotals

__all__ = ["fleet_state", "request_state"]

_MAX_OPEN = 100
_MAX_RECENT = 100


def fleet_state(
    view: Mapping[str, Any],
    timelines: Timelines,
    totals: Mapping[tuple[str, str], HandoffTotals],
    now_s: float,
) -> dict[str, Any]:
    """Returns the page's live part. `view` is `FleetView.state`; `totals` are the hand-offs that decode reports."""
    pairs = [{**pair, **_traffic(totals.get((pair["prefill"], pair["decode"])))} for pair in view["pairs"]]
    opened = list(islice(timelines.open.values(), _MAX_OPEN))
    recent = list(islice(reversed(timelines.ended.values()), _MAX_RECENT))
    return {
        **view,
        "pairs": pairs,
        "num_open": len(timelines.open),
        "num_ended": timelines.num_ended,
        "history": timelines.history.series(now_s),
        "open": [_row(line, now_s) for line in opened],
        "recent": [_row(line, now_s) for line in recent],
    }


def request_state(line: Timeline, parts: Sequence[WorkerPart], now_s: float) -> dict[str, Any]:
    """Returns one request: its spans, the breakdown of its time, and what its workers report about it."""
    spans = spans_of(line, parts, now_s=now_s)
    asked = dict.fromkeys(str(event.fields["worker"]) for event in line.events if event.name.endswith(".sent"))
    reporting = {part.engine for part in parts}
    return {
        **_row(line, now_s),
        "spans": [
            {
                "lane": span.lane,
                "name": span.name,
                "engine": span.engine,
                "begin_ms": _ms(span.begin_s - line.began_s),
                "end_ms": _ms(span.end_s - line.began_s),
                "parent": span.parent,
                "failed": span.failed,
                "error_ms": _ms(span.error_s),
            }
            for span in spans
        ],
        "breakdown": [{"lane": one.lane, "name": one.name, "ms": _ms(one.seconds)} for one in breakdown(spans)],
        "events": [
            {"name": event.name, "at_ms": _ms(event.at_s - line.began_s), "fields": _shown(event.fields)}
            for event in line.events
        ],
        "workers": [
            {
                "engine": part.engine,
                "bytes": part.report.bytes,
                "runs": part.report.runs,
                "transfer_ms": _ms(part.report.transfer_s),
                "tokens": part.report.num_tokens,
                "clock_error_ms": _ms(part.error_s),
            }
            for part in parts
        ],
        "silent": [engine for engine in asked if engine not in reporting],
    }


def _traffic(totals: HandoffTotals | None) -> dict[str, Any]:
    totals = totals or HandoffTotals()
    rate = totals.bytes / totals.transfer_s if totals.transfer_s > 0 else None
    return {"bytes": totals.bytes, "bytes_per_s": rate}


def _row(line: Timeline, now_s: float) -> dict[str, Any]:
    end_s = line.ended_s if line.ended_s is not None else now_s
    first_s = line.first_byte_s
    return {
        "number": line.number,
        "request_id": line.text("request_id"),
        "path": line.text("path"),
        "stream": bool(line.value("stream")),
        "stage": line.stage,
        "route": line.text("route"),
        "prefill": line.text("prefill"),
        "decode": line.text("decode"),
        "status": line.value("status") if line.ended_s is not None else None,
        "ms": _ms(end_s - line.began_s),
        "first_byte_ms": None if first_s is None else _ms(first_s),
        "handed_over": line.value("handed_over"),
        "cached": line.value("cached"),
        "recomputed": line.value("recomputed"),
        "why": line.text("why"),
        "failures": sum(event.name == "failed" for event in line.events),
    }


def _shown(fields: Mapping[str, Field]) -> dict[str, Field]:
    return {name: value for name, value in fields.items() if value not in (None, "") and name != "traceparent"}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
