"""Time lines of requests: what the router saw of each, joined with what the workers remember of it.

`Timelines` is an Observer. It keeps the events of the open dispatches and of the latest ones that have ended.
`spans_of` turns a time line and the workers' reports, corrected for their clocks, into spans in the router's clock.
Nothing here does I/O: `timeline_collect` asks the workers.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.router.observe.history import History
from kvferry.router.observe.observer import Field
from kvferry.web.stages import StageReport

__all__ = ["MAX_KEPT", "Event", "Span", "Timeline", "Timelines", "WorkerPart", "spans_of"]

MAX_KEPT = 512
_MAX_EVENTS = 64
"""Later events of a dispatch with more than this many are dropped, which bounds the memory."""


class Event(NamedTuple):
    """The arguments of `Observer.on_event`. It is a tuple because each request makes eight of them."""

    name: str
    at_s: float
    fields: Mapping[str, Field]


@dataclass(slots=True)
class Timeline:
    """The events of one dispatch."""

    number: int
    began_s: float
    events: list[Event] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def first_byte_s(self) -> float | None:
        """The time from the request's arrival to the first byte of a streamed answer. None before it, and for an answer
        that is not streamed: it has no first byte before the rest."""
        if not self.value("stream"):
            return None
        at_s = next((event.at_s for event in self.events if event.name == "first_byte"), None)
        return None if at_s is None else at_s - self.began_s

    def count(self, name: str) -> int:
        """Returns a field as a number; 0 if it is none."""
        text = self.text(name)
        return int(text) if text.isascii() and text.isdigit() else 0

    def value(self, name: str) -> Field:
        """Returns a field from the latest event that has it, or None if no event has it."""
        for event in reversed(self.events):
            if (found := event.fields.get(name)) is not None:
                return found
        return None

    def text(self, name: str) -> str:
        """Returns the same as text; empty if there is none."""
        found = self.value(name)
        return "" if found is None else str(found)

    @property
    def stage(self) -> str:
        """What the request waits for, or `ended`."""
        if self.ended_s is not None:
            return "ended"
        names = {event.name for event in self.events}
        if "first_byte" in names:
            return "streaming"
        waits = [one for one in ("prefill", "decode") if f"{one}.sent" in names]
        if "prefill.answered" in names and "prefill" in waits:
            waits.remove("prefill")
        return "+".join(waits) or "choosing"


class Timelines:
    """An Observer that remembers time lines. It costs a request a few microseconds, and its memory is bounded."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self.open: dict[int, Timeline] = {}
        self.ended: OrderedDict[int, Timeline] = OrderedDict()
        """The time lines that have ended; the latest is last."""
        self.num_ended = 0
        self.history = History()
        self._max_kept = max_kept

    def worker_headers(self, dispatch: int, stage: str) -> Mapping[str, str]:
        """Returns no headers."""
        return {}

    def on_event(self, dispatch: int, name: str, at_s: float, fields: Mapping[str, Field]) -> None:
        """Adds an event to the dispatch's time line."""
        line = self.open.get(dispatch)
        if line is None:
            if name != "arrived":
                if (late := self.ended.get(dispatch)) is not None and len(late.events) < _MAX_EVENTS:
                    late.events.append(Event(name, at_s, fields))  # a release that ended after the answer
                return
            line = self.open[dispatch] = Timeline(dispatch, at_s)
        if len(line.events) < _MAX_EVENTS or name == "ended":
            line.events.append(Event(name, at_s, fields))
        if name == "ended":
            line.ended_s = at_s
            self.num_ended += 1
            del self.open[dispatch]
            self.ended[dispatch] = line
            handed_over = line.count("handed_over")
            self.history.add(
                at_s, first_byte_s=line.first_byte_s, handed_over=handed_over,
                prompt_tokens=handed_over + line.count("cached") + line.count("recomputed"),
            )  # fmt: skip
            if len(self.ended) > self._max_kept:
                self.ended.popitem(last=False)

    def find(self, request_id: str) -> Timeline | None:
        """Returns the latest time line with this request id; open ones come first."""
        for lines in (self.open, self.ended):
            for line in reversed(lines.values()):
                if line.events and line.events[0].fields.get("request_id") == request_id:
                    return line
        return None


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """A worker's report of a request, and by how much the worker's clock is ahead of the router's."""

    engine: str
    report: StageReport
    offset_s: float
    error_s: float
    """The largest possible error of the offset."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a request's time, in the router's monotonic clock."""

    lane: str
    """`router`, `prefill` or `decode`."""
    name: str
    begin_s: float
    end_s: float
    engine: str = ""
    """The worker whose time it was; empty for the router's own."""
    parent: str = ""
    """`request`, or the name of the router's request to the worker: `prefill request`, `decode request`."""
    failed: str = ""
    """The reason why it failed; empty if it did not."""
    error_s: float = 0.0
    """Its ends may be off by this much, because clocks differ."""


def spans_of(line: Timeline, parts: Iterable[WorkerPart] = (), *, now_s: float | None = None) -> list[Span]:
    """Returns all spans in the order in which they began; open ones end at `now_s`."""
    last_s = line.events[-1].at_s if line.events else line.began_s
    end_s = line.ended_s if line.ended_s is not None else max(last_s, now_s or 0.0)
    spans = [Span("router", "request", line.began_s, end_s)]
    first_sent_s = next((event.at_s for event in line.events if event.name.endswith(".sent")), None)
    if first_sent_s is not None:
        spans.append(Span("router", "choose", line.began_s, first_sent_s, parent="request"))
    asked = [*_requests(line, "prefill", end_s), *_requests(line, "decode", end_s)]
    spans += asked
    for part in parts:
        # Clients may send an id again, so the times decide whether a worker's report is about this dispatch.
        for span in asked:
            overlaps = part.report.received_s - part.offset_s < span.end_s + part.error_s
            ends_after = part.report.ended_s - part.offset_s > span.begin_s - part.error_s
            if span.engine == part.engine and overlaps and ends_after:
                spans += _inside(span, part)
    return sorted(spans, key=lambda span: (span.begin_s, -span.end_s))


def _requests(line: Timeline, lane: str, end_s: float) -> list[Span]:
    """Returns the router's requests to workers of one role: one per `.sent` event."""
    done = ("prefill.answered",) if lane == "prefill" else ()
    spans: list[Span] = []
    begun: Event | None = None
    for event in line.events:
        worker = event.fields.get("worker")
        if event.name == f"{lane}.sent":
            begun = event
        elif begun is None or worker != begun.fields.get("worker"):
            continue
        elif event.name in done or event.name == "failed":
            cause = str(event.fields.get("cause") or "failed") if event.name == "failed" else ""
            spans.append(_request(lane, begun, event.at_s, cause))
            begun = None
    if begun is not None:
        spans.append(_request(lane, begun, end_s, ""))
    return spans


def _request(lane: str, begun: Event, end_s: float, failed: str) -> Span:
    engine = str(begun.fields.get("worker") or "")
    return Span(lane, f"{lane} request", begun.at_s, end_s, engine, "request", failed)


def _inside(asked: Span, part: WorkerPart) -> list[Span]:
    """Returns a worker's stages in the router's clock, kept within the router's request to that worker."""
    offset_s, error_s = _bounded(asked, part)

    def here(at_s: float) -> float:
        return min(max(at_s - offset_s, asked.begin_s), asked.end_s)

    return [
        Span(asked.lane, one.name, here(one.begin_s), here(one.end_s), part.engine, asked.name, error_s=error_s)
        for one in part.report.stages
        if (asked.lane, one.name) != ("prefill", "decode")  # its first token is its last
    ]


def _bounded(asked: Span, part: WorkerPart) -> tuple[float, float]:
    """Returns the clock's offset and its error, narrowed by the request itself: no stage began before the request was
    sent, and none ended after its answer."""
    report = part.report
    last_s = max((one.end_s for one in report.stages), default=report.received_s)
    least = max(last_s - asked.end_s, part.offset_s - part.error_s)
    most = min(report.received_s - asked.begin_s, part.offset_s + part.error_s)
    if least > most:
        return part.offset_s, part.error_s
    offset_s = min(max(part.offset_s, least), most)
    return offset_s, max(offset_s - least, most - offset_s)
