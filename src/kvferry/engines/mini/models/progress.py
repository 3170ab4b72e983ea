"""Reports how far a long piece of work is, such as loading a model.

The engine never prints. Each report goes to the display of this process: a function that a command line sets with
`set_progress_display`, or, by default, the log.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

__all__ = ["Progress", "ProgressDisplay", "ProgressState", "Reporter", "set_progress_display", "show_progress"]

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 0.1
LOG_EVERY_S = 5.0


class ProgressState(Enum):
    """Whether the work goes on."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """The work ended with an error, which is raised where the work was started."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One report. Every report of one piece of work has the same title; the last one is DONE or FAILED."""

    title: str
    num_bytes: int
    total_bytes: int
    """An estimate: a rank reads some tensors twice and others not at all."""
    num_tensors: int
    total_tensors: int
    elapsed_s: float
    state: ProgressState

    def __str__(self) -> str:
        """A line for a log or a pipe."""
        percent = 100 if self.state is ProgressState.DONE else min(100, 100 * self.num_bytes // self.total_bytes)
        return (
            f"{self.title}: {percent:3d} % {self.num_bytes / 1e6:.0f}/{self.total_bytes / 1e6:.0f} MB, "
            f"{self.num_tensors}/{self.total_tensors} tensors, {self.elapsed_s:.1f} s"
        )


ProgressDisplay = Callable[[Progress], None]
"""Called on the thread that does the work, several times per second at most. Must not block."""


class _LogDisplay:
    """Logs a line every LOG_EVERY_S seconds, and one at the end."""

    def __init__(self) -> None:
        self._logged_s = 0.0

    def __call__(self, progress: Progress) -> None:
        since_s = progress.elapsed_s - self._logged_s
        if progress.state is ProgressState.RUNNING and 0 <= since_s < LOG_EVERY_S:
            return
        self._logged_s = progress.elapsed_s if progress.state is ProgressState.RUNNING else 0.0
        if progress.state is not ProgressState.FAILED:
            logger.info("%s", progress)


_display: ProgressDisplay = _LogDisplay()


def set_progress_display(display: ProgressDisplay | None) -> None:
    """Sets the display of this process; None: the log. Set it before work starts."""
    global _display
    _display = _LogDisplay() if display is None else display


def show_progress(progress: Progress) -> None:
    """Passes a report to the display, also one that came from another process."""
    _display(progress)


class Reporter:
    """Counts the tensors of one piece of work and reports: `with Reporter(...) as reporter: reporter.advance(n)`."""

    def __init__(self, title: str, *, total_bytes: int, total_tensors: int, silent: bool = False) -> None:
        """`silent`: count without reporting, on ranks other than the first one."""
        self._title = title
        self._silent = silent
        self._total_bytes = max(1, total_bytes)
        self._total_tensors = total_tensors
        self._num_bytes = 0
        self._num_tensors = 0
        self._started_s = time.monotonic()
        self._reported_s = self._started_s

    def __enter__(self) -> "Reporter":
        return self

    def advance(self, num_bytes: int) -> None:
        """Counts one more tensor of this many bytes."""
        self._num_bytes += num_bytes
        self._num_tensors += 1
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            self._report(ProgressState.RUNNING)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._report(ProgressState.DONE if error is None else ProgressState.FAILED)

    def _report(self, state: ProgressState) -> None:
        if self._silent:
            return
        elapsed_s = time.monotonic() - self._started_s
        show_progress(
            Progress(
                self._title,
                self._num_bytes,
                self._total_bytes,
                self._num_tensors,
                self._total_tensors,
                elapsed_s,
                state,
            )
        )
