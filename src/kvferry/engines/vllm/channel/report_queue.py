"""The reports of one worker, on their way to the scheduler: through the channel, or else with the next step."""

from collections import deque
from collections.abc import Callable

from kvferry.connector.base import PeerGone, StepReport
from kvferry.ids import EngineId, Incarnation

__all__ = ["ReportQueue"]


class ReportQueue:
    """One per worker. The driver calls `report` and `lost`; the thread that runs the model calls `take`."""

    def __init__(self) -> None:
        self._collect: Callable[[], StepReport] | None = None
        self._send: Callable[[StepReport | PeerGone], bool] = lambda _report: False
        self._reports: deque[StepReport] = deque()
        self._lost: deque[PeerGone] = deque()

    def open(self, collect: Callable[[], StepReport], send: Callable[[StepReport | PeerGone], bool]) -> None:
        """Connects the queue: `collect` is the worker half's end_step, `send` is WorkerChannel.send."""
        self._send, self._collect = send, collect

    def report(self) -> None:
        """Collects from the worker half and sends what there is."""
        report = self._collect() if self._collect is not None else None
        if report and not self._send(report):
            self._reports.append(report)

    def lost(self, engine: EngineId, incarnation: Incarnation, reason: str) -> None:
        """Reports that a peer was found to be gone."""
        gone = PeerGone(engine, incarnation, reason)
        if not self._send(gone):
            self._lost.append(gone)

    def take(self) -> tuple[tuple[StepReport, ...], tuple[PeerGone, ...]]:
        """Returns everything since the last call that could not go through the channel."""
        if not self._reports and not self._lost:
            return (), ()
        reports = tuple(self._reports.popleft() for _ in range(len(self._reports)))
        return reports, tuple(self._lost.popleft() for _ in range(len(self._lost)))
