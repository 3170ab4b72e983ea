"""How an attempt at a worker can end, and what follows: is another worker tried, which circuit breaker counts it, and
which status does the client get if no other worker can help. This is decided here and nowhere else.

The table is in docs/how-to/route.md, which `make docs` writes from it.

A worker's own 5xx says little about whose fault it was: the request may fail everywhere. So it counts against the
worker only once another worker has served the same request. A worker that breaks down may have done so because of the
request, and the next one might follow: after two such breakdowns the request is not tried again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["OUTCOMES", "Consequence", "Counts", "Outcome", "Retry", "outcome_of", "outcome_table"]


class Outcome(StrEnum):
    """How an attempt ended, other than well."""

    UNREACHABLE = "unreachable"
    OVERLOADED = "overloaded"
    LEAVING = "leaving"
    REFUSED = "refused"
    TOO_LONG = "too long"
    REQUEST_FAILED = "request failed"
    HANDOFF_FAILED = "hand-off failed"
    RECOMPUTED = "recomputed"
    SERVER_ERROR = "server error"
    UNREADABLE = "unreadable"
    RESTARTED = "restarted"
    ENGINE_DEAD = "engine dead"
    ENGINE_CRASHED = "engine crashed"
    DISCONNECTED = "disconnected"
    TIMED_OUT = "timed out"
    CUT_OFF = "cut off"


class Retry(StrEnum):
    """Whether another worker gets the request."""

    YES = "yes"
    ONCE = "one more"
    """Only the first such failure of a request, on prefill or decode, is followed by another try."""
    NO = "no"


class Counts(StrEnum):
    """Which circuit breaker counts the failure."""

    WORKER = "the worker's"
    IF_SERVED = "the worker's, once another worker has served the request"
    PAIR = "the pair's"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Consequence:
    """What follows from an outcome."""

    meaning: str
    """What the worker did, for people."""
    retry: Retry
    counts: Counts
    status: int
    """The status for the client if no other worker helps. 0: the worker's own answer is passed on."""
    code: str
    """The code in the error body; empty if the worker's own answer is passed on."""
    reached: bool = True
    """True if the worker may have worked on the request."""
    reported: bool = False
    """True if the worker itself reported it: it holds nothing of the request any more."""
    goes_on: bool = False
    """True if it is certain that the worker is still up: nothing has to wait until it has been asked again."""


OUTCOMES: Mapping[Outcome, Consequence] = {
    Outcome.UNREACHABLE: Consequence(
        "it takes no connection", Retry.YES, Counts.WORKER, 502, "worker_failed", reached=False
    ),
    Outcome.OVERLOADED: Consequence("it answers 429 or 503", Retry.YES, Counts.NONE, 503, "overloaded", reported=True),
    Outcome.LEAVING: Consequence(
        "it answers 503 because it drains or stops", Retry.YES, Counts.NONE, 503, "worker_failed", reported=True
    ),
    Outcome.REFUSED: Consequence(
        "it answers 4xx: the client has to change the request", Retry.NO, Counts.NONE, 0, "",
        reported=True, goes_on=True,
    ),
    Outcome.TOO_LONG: Consequence(
        "it answers 400 `context_length_exceeded`, and another worker takes longer requests", Retry.YES, Counts.NONE,
        400, "context_length_exceeded", reported=True, goes_on=True,
    ),
    Outcome.REQUEST_FAILED: Consequence(
        "it answers 500 `request_failed`: the request itself cannot be computed", Retry.NO, Counts.NONE, 500,
        "request_failed", reported=True, goes_on=True,
    ),
    Outcome.HANDOFF_FAILED: Consequence(
        "decode answers 500 `handoff_failed`: the KV did not arrive, and its policy is `--on-failure fail`",
        Retry.YES, Counts.PAIR, 500, "handoff_failed", reported=True, goes_on=True,
    ),
    Outcome.RECOMPUTED: Consequence(
        "decode answers, but had to compute what prefill should have handed over", Retry.NO, Counts.PAIR, 0, ""
    ),
    Outcome.SERVER_ERROR: Consequence(
        "it answers any other 5xx", Retry.YES, Counts.IF_SERVED, 502, "worker_failed", reported=True, goes_on=True
    ),
    Outcome.UNREADABLE: Consequence(
        "its answer cannot be read, or ends before it begins", Retry.YES, Counts.IF_SERVED, 502, "worker_failed"
    ),
    Outcome.RESTARTED: Consequence(
        "prefill is another process than the one for which decode waits (push)", Retry.YES, Counts.NONE, 502,
        "worker_failed",
    ),
    Outcome.ENGINE_DEAD: Consequence(
        "it answers `engine_dead`: its engine has ended, and was not computing this request", Retry.YES,
        Counts.WORKER, 502, "worker_failed", reported=True,
    ),
    Outcome.ENGINE_CRASHED: Consequence(
        "it answers `engine_crashed`: its engine ended in a step that computed this request", Retry.ONCE,
        Counts.WORKER, 502, "worker_failed", reported=True,
    ),
    Outcome.DISCONNECTED: Consequence(
        "the connection breaks before an answer: the process may have died of the request", Retry.ONCE, Counts.WORKER,
        502, "worker_failed",
    ),
    Outcome.TIMED_OUT: Consequence(
        "it does not begin to answer in time, or answers no health check meanwhile", Retry.ONCE, Counts.WORKER, 504,
        "worker_failed",
    ),
    Outcome.CUT_OFF: Consequence(
        "its stream breaks off, or pauses for too long, after the first byte", Retry.NO, Counts.NONE, 502,
        "worker_failed",
    ),
}  # fmt: skip
"""What follows from each outcome."""

_BY_CODE = {
    "request_failed": Outcome.REQUEST_FAILED,
    "handoff_failed": Outcome.HANDOFF_FAILED,
    "engine_dead": Outcome.ENGINE_DEAD,
    "engine_crashed": Outcome.ENGINE_CRASHED,
    "draining": Outcome.LEAVING,
    "stopping": Outcome.LEAVING,
    "aborted": Outcome.LEAVING,
}
"""The codes of kvferry's workers."""


def outcome_of(status: int, code: str | None) -> Outcome:
    """Returns the outcome that a worker reported by this error status, of 400 or above, and the code in its body."""
    if status >= 500 and code in _BY_CODE:
        return _BY_CODE[code]
    if status in (429, 503):
        return Outcome.OVERLOADED
    return Outcome.REFUSED if status < 500 else Outcome.SERVER_ERROR


def outcome_table() -> str:
    """Returns OUTCOMES as a table of Markdown."""
    rows = [
        "| what a worker does | another worker? | breaker that counts it | the client gets |",
        "| --- | --- | --- | --- |",
    ]
    for outcome, row in OUTCOMES.items():
        gets = f"{row.status} `{row.code}`" if row.status else "the worker's answer"
        if outcome is Outcome.CUT_OFF:
            gets = f"an error event, `{row.code}`, and no `[DONE]`"
        rows.append(f"| {row.meaning} | {row.retry} | {row.counts} | {gets} |")
    return "\n".join(rows)
