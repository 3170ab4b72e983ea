"""What a worker remembers of the requests that it answered lately, stage by stage: GET /v1/kvferry/trace.

Every time is of the worker's own monotonic clock, in seconds; nobody else can read it as it is. The answer therefore
says when the question came and when the answer left, by that clock: with the times at which the router sent the
question and had the answer, that is a sample of the offset between the two clocks (RFC 5905, section 8).
"""

import msgspec

from kvferry.stats import StageTimes

__all__ = ["MAX_ASKED", "TRACE_PATH", "HandoffTotals", "Stage", "StageReport", "TraceAnswer", "stages_of"]

TRACE_PATH = "/v1/kvferry/trace"
"""`?request=ID`, repeated: at most MAX_ASKED. Without one: only the clock and the totals."""
MAX_ASKED = 64


class Stage(msgspec.Struct, frozen=True):
    """One part of a request's time on a worker.

    `queue`: until it has blocks, and is computed or waits for KV. `handshake`: from there until the transfer begins:
    the peer is met, prefill may still work (pull begins when it has ended; push when the blocks are registered).
    `transfer`: until the last byte is there. `prefill`: the prompt, or what is left of it, is computed, to the first
    token. `decode`: from the first token to the last.
    """

    name: str
    begin_s: float
    end_s: float


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as this worker saw it."""

    request_id: str
    received_s: float
    """Its HTTP request had been read."""
    began_s: float
    """Its answer began."""
    ended_s: float
    status: int
    stages: tuple[Stage, ...] = ()
    num_tokens: int = 0
    bytes: int = 0
    runs: int = 0
    transfer_s: float = 0.0


class HandoffTotals(msgspec.Struct, frozen=True):
    """What decode has had from one prefill engine since decode's start."""

    landed: int = 0
    failed: int = 0
    bytes: int = 0
    transfer_s: float = 0.0

    def plus(self, *, landed: bool, num_bytes: int, transfer_s: float) -> "HandoffTotals":
        """With one more hand-off that was asked for."""
        return HandoffTotals(
            self.landed + landed, self.failed + (not landed), self.bytes + num_bytes, self.transfer_s + transfer_s
        )


class TraceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Unknown fields are skipped."""

    engine: str
    incarnation: str = ""
    received_s: float
    """When this question came, by the worker's clock."""
    now_s: float
    """When this answer left."""
    requests: tuple[StageReport, ...] = ()
    handoffs: dict[str, HandoffTotals] = {}
    """By the id of the prefill engine."""


def stages_of(times: StageTimes) -> tuple[Stage, ...]:
    """The stages between the moments that an engine noted, in the order in which they began."""
    found: list[Stage] = []

    def add(name: str, begin_s: float | None, end_s: float | None) -> None:
        if begin_s is not None and end_s is not None and end_s >= begin_s:
            found.append(Stage(name, begin_s, end_s))

    begins = [one for one in (times.reserved_s, times.computing_s) if one is not None]
    add("queue", times.arrived_s, min(begins, default=None))
    add("handshake", times.reserved_s, times.landing_s)
    add("transfer", times.landing_s, times.landed_s)
    add("prefill", times.computing_s, times.first_token_s)  # not if prefill chose the first token: it came before
    add("decode", times.first_token_s, times.ended_s)
    return tuple(found)
