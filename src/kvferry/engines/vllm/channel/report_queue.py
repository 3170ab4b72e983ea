"""What a worker has to tell the scheduler: by line, or else with a step, by the thread that runs the model."""

from collections import deque
from collections.abc import Callable

from kvferry.connector.base import PeerGone, StepReport
from kvferry.ids import EngineId, Incarnation

__all__ = ["ReportQueue"]


class ReportQueue:
    """One a worker. `report` and `lost` are the driver's callbacks, `take` is for the thread that runs the model."""

    def __init__(self) -> None:
        self._collect: Callable[[], StepReport] | None = None
        self._tell: Callable[[StepReport | PeerGone], bool] = lambda _news: False
        self._reports: deque[StepReport] = deque()
        self._lost: deque[PeerGone] = deque()

    def open(self, collect: Callable[[], StepReport], tell: Callable[[StepReport | PeerGone], bool]) -> None:
        """`collect`: the worker half's end_step. `tell`: see WorkerChannel.tell."""
        self._tell, self._collect = tell, collect

    def report(self) -> None:
        """There may be something to collect."""
        report = self._collect() if self._collect is not None else None
        if report and not self._tell(report):
            self._reports.append(report)

    def lost(self, engine: EngineId, incarnation: Incarnation, why: str) -> None:
        """A peer was found gone."""
        gone = PeerGone(engine, incarnation, why)
        if not self._tell(gone):
            self._lost.append(gone)

    def take(self) -> tuple[tuple[StepReport, ...], tuple[PeerGone, ...]]:
        """Everything since the last call that could not be told by line."""
        if not self._reports and not self._lost:
            return (), ()
        reports = tuple(self._reports.popleft() for _ in range(len(self._reports)))
        return reports, tuple(self._lost.popleft() for _ in range(len(self._lost)))
