"""What a worker has to tell the scheduler, from the driver's thread to the thread that runs the model."""

from collections import deque
from collections.abc import Callable

from kvferry.connector.base import Depart, StepReport
from kvferry.ids import EngineId, Incarnation

__all__ = ["News"]


class News:
    """One a worker. `report` and `lost` are the driver's callbacks, `take` is for the thread that runs the model."""

    def __init__(self) -> None:
        self._collect: Callable[[], StepReport] | None = None
        self._ring: Callable[[], None] = lambda: None
        self._reports: deque[StepReport] = deque()
        self._lost: deque[Depart] = deque()

    def open(self, collect: Callable[[], StepReport], ring: Callable[[], None]) -> None:
        """`collect`: the worker half's end_step. `ring`: an idle engine is to make a step, and so to `take`."""
        self._ring, self._collect = ring, collect

    def report(self) -> None:
        """There may be something to collect."""
        report = self._collect() if self._collect is not None else None
        if report:
            self._reports.append(report)
            self._ring()

    def lost(self, engine: EngineId, incarnation: Incarnation, why: str) -> None:
        """A peer was found gone."""
        self._lost.append(Depart(engine, incarnation, why))
        self._ring()

    def take(self) -> tuple[tuple[StepReport, ...], tuple[Depart, ...]]:
        """Everything since the last call."""
        if not self._reports and not self._lost:
            return (), ()
        reports = tuple(self._reports.popleft() for _ in range(len(self._reports)))
        return reports, tuple(self._lost.popleft() for _ in range(len(self._lost)))
