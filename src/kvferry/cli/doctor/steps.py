"""The steps of a check: each is tried in its order, up to the first that fails."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvferry.cli.main import ExitCode
from kvferry.errors import FerryError

__all__ = ["Planned", "Step", "StepFailed", "tried"]

logger = logging.getLogger(__name__)


class StepFailed(FerryError):
    """A step found something that has a remedy or an exit code of its own, other than what its plan says."""

    def __init__(self, detail: str, code: ExitCode, remedy: str = "") -> None:
        super().__init__(detail)
        self.code = code
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step."""

    name: str
    ok: bool
    detail: str
    seconds: float
    code: ExitCode = ExitCode.OK
    remedy: str = ""

    def line(self) -> str:
        """Returns a line for people."""
        return f"  {'ok  ' if self.ok else 'FAIL'}  {self.name:44}  {self.detail}"

    def as_dict(self) -> dict[str, object]:
        """Returns the object for --json."""
        row: dict[str, object] = {"step": self.name, "ok": self.ok, "detail": self.detail}
        row["seconds"] = round(self.seconds, 4)
        if not self.ok:
            row["remedy"] = self.remedy
        return row


@dataclass(frozen=True, slots=True)
class Planned:
    """A step that is to be tried: `action` returns what was seen, and raises FerryError or OSError if it fails."""

    name: str
    action: Callable[[], str]
    code: ExitCode
    remedy: str


def tried(planned: Iterable[Planned]) -> Iterator[Step]:
    """Tries each step when it is asked for, and ends after the first that fails."""
    for one in planned:
        step = _try(one)
        yield step
        if not step.ok:
            return


def _try(planned: Planned) -> Step:
    started_s = time.monotonic()
    try:
        detail = planned.action()
    except (FerryError, OSError) as error:
        logger.debug("step failed", exc_info=True)
        code, remedy = planned.code, planned.remedy
        if isinstance(error, StepFailed):
            code, remedy = error.code, error.remedy
        return Step(planned.name, False, str(error).rstrip("."), time.monotonic() - started_s, code, remedy)
    return Step(planned.name, True, detail, time.monotonic() - started_s)
