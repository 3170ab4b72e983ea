"""Keeps the stages of the requests that this worker answered lately, for GET /v1/kvferry/trace: see web/stages.py."""

import time
from collections import OrderedDict

from kvferry.engines.mini.server.generate import Job
from kvferry.engines.mini.server.replies import Reply
from kvferry.web.stages import MAX_ASKED, HandoffTotals, StageReport, TraceAnswer, stages_of

__all__ = ["Traces"]

_MAX_REMEMBERED = 1024
_MAX_PEERS = 256
_PER_ID = 4
"""The most reports kept per request id: a client may use one id again and again."""


class Traces:
    """The traces of one server. Used on its event loop."""

    def __init__(self) -> None:
        self._reports: OrderedDict[str, tuple[StageReport, ...]] = OrderedDict()
        self._totals: dict[str, HandoffTotals] = {}

    def remember(self, job: Job, reply: Reply, *, received_s: float, status: int) -> None:
        """Records a request that has ended, in whatever way. The oldest record is dropped if there are too many."""
        now_s = time.monotonic()
        served = reply.served()
        times = reply.choices[0].stages
        report = StageReport(
            request_id=job.request_id,
            received_s=received_s,
            began_s=reply.began_s if reply.began_s is not None else now_s,
            ended_s=now_s,
            status=status,
            stages=stages_of(times) if times is not None else (),
            num_tokens=sum(len(choice.token_ids) for choice in reply.choices),
            bytes=served.bytes,
            runs=served.runs,
            transfer_s=served.transfer_ms / 1e3,
        )
        self._reports[job.request_id] = (*self._reports.pop(job.request_id, ()), report)[-_PER_ID:]
        if len(self._reports) > _MAX_REMEMBERED:
            self._reports.popitem(last=False)
        asked = job.handoff is not None and job.handoff.do_remote_prefill
        peer = served.prefill
        if asked and status < 400 and peer and (peer in self._totals or len(self._totals) < _MAX_PEERS):
            self._totals[peer] = self._totals.get(peer, HandoffTotals()).plus(
                landed=not served.lost, num_bytes=served.bytes, transfer_s=served.transfer_ms / 1e3
            )

    def answer(self, asked: list[str], *, engine: str, incarnation: str, received_s: float) -> TraceAnswer:
        """Returns what is known of the first MAX_ASKED of these requests, and the current time of the clock."""
        found = [report for request_id in asked[:MAX_ASKED] for report in self._reports.get(request_id, ())]
        return TraceAnswer(
            engine=engine,
            incarnation=incarnation,
            received_s=received_s,
            now_s=time.monotonic(),
            requests=tuple(found),
            handoffs=self._totals,
        )
