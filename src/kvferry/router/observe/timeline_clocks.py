"""How far a worker's monotonic clock is ahead of the router's, from questions and their answers.

The four times of an exchange (sent, received, answered, returned; the middle two by the worker's clock) bound the
offset: it is ((received - sent) + (answered - returned)) / 2, and wrong by at most half of the time on the way (RFC
5905, section 8, and Mills's clock filter: of the latest samples, the one that was fastest on its way is the best).
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

__all__ = ["ClockSample", "WorkerClocks"]

_NUM_SAMPLES = 8
_MAX_CLOCKS = 1024
_DRIFT = 50e-6
"""Seconds a second by which two clocks may part: crystals stay well below that."""


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One exchange."""

    offset_s: float
    """The worker's clock less the router's."""
    error_s: float
    """It is right within this much."""
    at_s: float
    """When it was taken, by the router's clock."""

    @classmethod
    def of(cls, sent_s: float, received_s: float, answered_s: float, returned_s: float) -> "ClockSample":
        """From the four times. A worker that claims to have worked for longer than we waited counts as on its way."""
        on_the_way_s = max(0.0, (returned_s - sent_s) - max(0.0, answered_s - received_s))
        return cls(((received_s - sent_s) + (answered_s - returned_s)) / 2, on_the_way_s / 2, returned_s)

    def error_at(self, now_s: float) -> float:
        """How wrong it may be by now."""
        return self.error_s + _DRIFT * max(0.0, now_s - self.at_s)


class WorkerClocks:
    """The latest samples of each worker process. A restart has a clock of its own: another incarnation."""

    def __init__(self) -> None:
        self._samples: OrderedDict[tuple[str, str], deque[ClockSample]] = OrderedDict()

    def add(self, engine: str, incarnation: str, sample: ClockSample) -> None:
        """Another exchange."""
        key = (engine, incarnation)
        samples = self._samples.setdefault(key, deque(maxlen=_NUM_SAMPLES))
        samples.append(sample)
        self._samples.move_to_end(key)
        if len(self._samples) > _MAX_CLOCKS:
            self._samples.popitem(last=False)

    def best(self, engine: str, incarnation: str, now_s: float) -> ClockSample | None:
        """The sample that is the least wrong by now; None: there is none."""
        samples = self._samples.get((engine, incarnation))
        return min(samples, key=lambda one: one.error_at(now_s)) if samples else None
