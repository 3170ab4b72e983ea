"""Records of GET /v1/kvferry/trace: the stages of the requests that a worker answered lately.

Every time is read from the worker's own monotonic clock, in seconds, and means nothing to another process by itself.
The answer therefore says when the question arrived and when the answer left, by that clock. Together with the times at
which the router sent the question and received the answer, this is a sample of the offset between the two clocks
(RFC 5905, section 8).
"""

import msgspec

from kvferry.stats import StageTimes

__all__ = ["MAX_ASKED", "TRACE_PATH", "HandoffTotals", "Stage", "StageReport", "TraceAnswer", "stages_of"]

TRACE_PATH = "/v1/kvferry/trace"
"""Takes `?request=ID`, repeated up to MAX_ASKED times. Without it, only the clock and the totals are returned."""
MAX_ASKED = 64


class Stage(msgspec.Struct, frozen=True):
    """One part of a request's time on a worker.

    `queue`: until the request has blocks, and is computed or waits for KV. `handshake`: from there until the transfer
    begins, while engines shake hands and prefill may still compute (pull begins when prefill has ended; push when the
    blocks are registered). `transfer`: until the last byte has landed. `prefill`: the prompt, or the rest of it, is
    computed, until the first token. `decode`: from the first token to the last.
    """

    name: str
    begin_s: float
    end_s: float


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The stages of one request on this worker."""

    request_id: str
    received_s: float
    """When its HTTP request had been read."""
    began_s: float
    """When its answer began."""
    ended_s: float
    status: int
    stages: tuple[Stage, ...] = ()
    num_tokens: int = 0
    bytes: int = 0
    runs: int = 0
    transfer_s: float = 0.0


class HandoffTotals(msgspec.Struct, frozen=True):
    """What decode has received from one prefill engine since decode started."""

    landed: int = 0
    failed: int = 0
    bytes: int = 0
    transfer_s: float = 0.0

    def plus(self, *, landed: bool, num_bytes: int, transfer_s: float) -> "HandoffTotals":
        """Returns the totals with one more hand-off."""
        return HandoffTotals(
            self.landed + landed, self.failed + (not landed), self.bytes + num_bytes, self.transfer_s + transfer_s
        )


class TraceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to GET /v1/kvferry/trace. Unknown fields are skipped."""

    engine: str
    incarnation: str = ""
    received_s: float
    """When the question arrived, by the worker's clock."""
    now_s: float
    """When the answer left, by the worker's clock."""
    requests: tuple[StageReport, ...] = ()
    handoffs: dict[str, HandoffTotals] = {}
    """Maps the id of a prefill engine to its totals."""


def stages_of(times: StageTimes) -> tuple[Stage, ...]:
    """Returns the stages between the moments that an engine recorded, in the order in which they began."""
    found: list[Stage] = []

    def add(name: str, begin_s: float | None, end_s: float | None) -> None:
        if begin_s is not None and end_s is not None and end_s >= begin_s:
            found.append(Stage(name, begin_s, end_s))

    begins = [one for one in (times.reserved_s, times.computing_s) if one is not None]
    add("queue", times.arrived_s, min(begins, default=None))
    add("handshake", times.reserved_s, times.landing_s)
    add("transfer", times.landing_s, times.landed_s)
    add("prefill", times.computing_s, times.first_token_s)  # absent if prefill chose the first token: it came before
    add("decode", times.first_token_s, times.ended_s)
    return tuple(found)
