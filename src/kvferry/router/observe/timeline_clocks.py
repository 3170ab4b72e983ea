"""Estimates how far a worker's monotonic clock is ahead of the router's, from requests and their answers.

The four times of an exchange (sent, received, answered, returned; the middle two by the worker's clock) bound the
offset: it is ((received - sent) + (answered - returned)) / 2, with an error of at most half of the network time (RFC
5905, section 8). By Mills's clock filter the best of the latest samples is the one with the least network time.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

__all__ = ["ClockSample", "WorkerClocks"]

_NUM_SAMPLES = 8
_MAX_CLOCKS = 1024
_DRIFT = 50e-6
"""How far two clocks may drift apart, in seconds per second; quartz clocks stay well below that."""


@dataclass(frozen=True, slots=True)
class ClockSample:
    """The sample of one exchange."""

    offset_s: float
    """The worker's clock minus the router's."""
    error_s: float
    """The largest possible error of the offset."""
    at_s: float
    """When the sample was taken, by the router's clock."""

    @classmethod
    def of(cls, sent_s: float, received_s: float, answered_s: float, returned_s: float) -> "ClockSample":
        """Makes a sample from the four times of an exchange. The network time is never taken as negative."""
        network_s = max(0.0, (returned_s - sent_s) - max(0.0, answered_s - received_s))
        return cls(((received_s - sent_s) + (answered_s - returned_s)) / 2, network_s / 2, returned_s)

    def error_at(self, now_s: float) -> float:
        """Returns the largest possible error by now, drift included."""
        return self.error_s + _DRIFT * max(0.0, now_s - self.at_s)


class WorkerClocks:
    """The latest samples of each worker process. A restarted worker is another incarnation, with its own clock."""

    def __init__(self) -> None:
        self._samples: OrderedDict[tuple[str, str], deque[ClockSample]] = OrderedDict()

    def add(self, engine: str, incarnation: str, sample: ClockSample) -> None:
        """Adds the sample of another exchange."""
        key = (engine, incarnation)
        samples = self._samples.setdefault(key, deque(maxlen=_NUM_SAMPLES))
        samples.append(sample)
        self._samples.move_to_end(key)
        if len(self._samples) > _MAX_CLOCKS:
            self._samples.popitem(last=False)

    def best(self, engine: str, incarnation: str, now_s: float) -> ClockSample | None:
        """Returns the sample with the smallest error by now, or None if there is none."""
        samples = self._samples.get((engine, incarnation))
        return min(samples, key=lambda one: one.error_at(now_s)) if samples else None
