"""Time lines from events and workers' reports, without I/O."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.observe.timeline import Span, Timelines, WorkerPart, spans_of
from kvferry.router.observe.timeline_breakdown import breakdown
from kvferry.web.stages import Stage, StageReport

PUSH: list[tuple[str, float, dict[str, Any]]] = [
    ("arrived", 10.000, {"request_id": "r1", "path": "/v1/completions", "stream": 1}),
    ("chosen", 10.001, {"route": "push", "prefill": "p0", "decode": "d0"}),
    ("prefill.sent", 10.002, {"worker": "p0", "transfer_id": "x"}),
    ("decode.sent", 10.002, {"worker": "d0", "transfer_id": "x"}),
    ("prefill.answered", 10.060, {"worker": "p0", "status": 200}),
    ("decode.began", 10.070, {"worker": "d0", "status": 200}),
    ("first_byte", 10.071, {"source": "decode"}),
    ("ended", 10.100, {"status": 200, "route": "push", "prefill": "p0", "decode": "d0", "handed_over": "512"}),
]


def timelines_of(events: list[tuple[str, float, dict[str, Any]]], number: int = 1, **limits: int) -> Timelines:
    lines = Timelines(**limits)
    for name, at_s, fields in events:
        lines.on_event(number, name, at_s, fields)
    return lines


def part(engine: str, offset_s: float, *stages: tuple[str, float, float], error_s: float = 0.0) -> WorkerPart:
    """Returns a report with stages given in the router's time, as the worker reports them on its own clock."""
    shifted = tuple(Stage(name, begin_s + offset_s, end_s + offset_s) for name, begin_s, end_s in stages)
    first, last = shifted[0].begin_s, shifted[-1].end_s
    report = StageReport(
        request_id="r1", received_s=first, began_s=last, ended_s=last, status=200, stages=shifted, num_tokens=1
    )
    return WorkerPart(engine, report, offset_s, error_s)


def test_a_request_is_open_until_it_has_ended_and_shows_what_it_waits_for() -> None:
    lines = Timelines()
    stages = []
    for name, at_s, fields in PUSH:
        lines.on_event(1, name, at_s, fields)
        stages.append((lines.open.get(1) or lines.ended[1]).stage)
    assert stages == [
        "choosing", "choosing", "prefill", "prefill+decode", "decode", "decode", "streaming", "ended",
    ]  # fmt: skip
    assert not lines.open
    assert lines.num_ended == 1
    line = lines.find("r1")
    assert line is not None
    assert line.value("handed_over") == "512"
    assert line.text("route") == "push"
    assert lines.find("r2") is None


def test_stages_of_workers_with_other_clocks_are_at_the_right_place() -> None:
    parts = [
        part("p0", 5_000.0, ("queue", 10.003, 10.010), ("prefill", 10.010, 10.058)),
        part("d0", -3.5, ("handshake", 10.004, 10.018), ("transfer", 10.018, 10.069), ("decode", 10.069, 10.099)),
    ]
    line = timelines_of(PUSH).find("r1")
    assert line is not None
    spans = spans_of(line, parts)
    found = {(one.lane, one.name): (round(one.begin_s, 6), round(one.end_s, 6), one.parent) for one in spans}
    assert found == {
        ("router", "request"): (10.0, 10.1, ""),
        ("router", "choose"): (10.0, 10.002, "request"),
        ("prefill", "prefill request"): (10.002, 10.06, "request"),
        ("prefill", "queue"): (10.003, 10.01, "prefill request"),
        ("prefill", "prefill"): (10.01, 10.058, "prefill request"),
        ("decode", "decode request"): (10.002, 10.1, "request"),
        ("decode", "handshake"): (10.004, 10.018, "decode request"),
        ("decode", "transfer"): (10.018, 10.069, "decode request"),
        ("decode", "decode"): (10.069, 10.099, "decode request"),
    }
    shares = {(one.lane, one.name): round(1e3 * one.seconds, 3) for one in breakdown(spans)}
    # Decode registers and waits for its blocks while prefill computes, so that time is prefill's.
    assert shares[("prefill", "prefill")] == 48.0
    assert shares[("prefill", "queue")] == 7.0
    assert ("decode", "handshake") not in shares
    assert shares[("decode", "transfer")] == 11.0
    assert sum(shares.values()) == pytest.approx(100.0)


def test_a_clock_that_is_off_never_puts_a_stage_outside_its_request() -> None:
    line = timelines_of(PUSH).find("r1")
    assert line is not None
    off = part("p0", 0.0, ("prefill", 9.990, 10.080), error_s=0.05)
    spans = [span for span in spans_of(line, [off]) if span.name == "prefill"]
    assert [(one.begin_s, one.end_s) for one in spans] == [(10.002, 10.060)]


def test_a_request_itself_narrows_the_offset() -> None:
    line = timelines_of(PUSH).find("r1")
    assert line is not None
    # The clock is 20 ms off, and by the exchange up to 30 ms either way; the request leaves room for 6 ms.
    honest = part("p0", 0.0, ("queue", 10.004, 10.010), ("prefill", 10.010, 10.056))
    off = WorkerPart("p0", honest.report, offset_s=-0.020, error_s=0.030)
    spans = {one.name: one for one in spans_of(line, [off])}
    assert spans["queue"].error_s == pytest.approx(0.006)
    assert abs(spans["queue"].begin_s - 10.004) <= spans["queue"].error_s + 1e-9
    assert spans["prefill"].end_s <= 10.060


def test_the_same_id_sent_again_later_is_another_request() -> None:
    line = timelines_of(PUSH).find("r1")
    assert line is not None
    later = part("p0", 0.0, ("prefill", 20.0, 20.1))
    assert not [span for span in spans_of(line, [later]) if span.name == "prefill"]


def test_a_failed_attempt_is_a_span_of_its_own_with_its_cause() -> None:
    events: list[tuple[str, float, dict[str, Any]]] = [
        ("arrived", 1.0, {"request_id": "r1"}),
        ("prefill.sent", 1.1, {"worker": "p0"}),
        ("failed", 1.2, {"worker": "p0", "stage": "prefill", "cause": "broke the connection"}),
        ("prefill.sent", 1.3, {"worker": "p1"}),
        ("prefill.answered", 1.4, {"worker": "p1"}),
        ("ended", 1.5, {"status": 200}),
    ]
    line = timelines_of(events).find("r1")
    assert line is not None
    asked = [(one.engine, one.begin_s, one.end_s, one.failed) for one in spans_of(line) if one.lane == "prefill"]
    assert asked == [("p0", 1.1, 1.2, "broke the connection"), ("p1", 1.3, 1.4, "")]


def test_an_open_stage_ends_now() -> None:
    line = timelines_of(PUSH[:4]).find("r1")
    assert line is not None
    assert {(one.name, one.end_s) for one in spans_of(line, now_s=12.0) if one.name != "choose"} == {
        ("request", 12.0), ("prefill request", 12.0), ("decode request", 12.0),
    }  # fmt: skip


def test_memory_is_bounded() -> None:
    lines = Timelines(max_kept=3)
    for number in range(10):
        lines.on_event(number, "arrived", 1.0, {"request_id": f"r{number}"})
        for _ in range(500):
            lines.on_event(number, "failed", 1.0, {"worker": "p0"})
        lines.on_event(number, "ended", 2.0, {"status": 502})
        lines.on_event(number, "released", 3.0, {})
    assert list(lines.ended) == [7, 8, 9]
    assert not lines.open
    assert all(len(line.events) <= 65 and line.ended_s == 2.0 for line in lines.ended.values())


def test_an_event_of_an_unknown_dispatch_is_dropped() -> None:
    lines = timelines_of([("first_byte", 1.0, {}), ("ended", 2.0, {})])
    assert not lines.open
    assert not lines.ended


NAMES = st.sampled_from(["queue", "prefill", "transfer", "x"])


@given(st.lists(st.tuples(st.sampled_from(["prefill", "decode"]), NAMES, st.integers(0, 50), st.integers(0, 50))))
def test_shares_add_up_to_the_whole(stages: list[tuple[str, str, int, int]]) -> None:
    spans = [Span("router", "request", 10.0, 40.0)]
    spans += [Span(lane, name, min(a, b), max(a, b), parent="request") for lane, name, a, b in stages]
    shares = breakdown(spans)
    assert sum(one.seconds for one in shares) == pytest.approx(30.0)
    assert all(one.seconds >= 0 for one in shares)
