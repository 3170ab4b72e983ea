"""A worker's failure to answer a request, and the record of all such failures of one request."""

from dataclasses import dataclass, field

from kvferry.errors import PeerError
from kvferry.router.fleet.outcomes import OUTCOMES, Consequence, Counts, Outcome, Retry
from kvferry.router.fleet.pair_records import Pair
from kvferry.router.fleet.worker import Worker
from kvferry.settings import Role
from kvferry.web.api_errors import ApiError

__all__ = ["FailedAttempts", "WorkerFailed"]


class WorkerFailed(PeerError):
    """A worker did not answer as it should, and nothing of its answer has gone to the client."""

    def __init__(self, worker: Worker, reason: str, outcome: Outcome) -> None:
        self.reason = reason.strip() or "has failed and gave no reason"
        super().__init__(f"{worker.label} {self.reason}")
        self.worker = worker
        self.outcome = outcome

    @property
    def consequence(self) -> Consequence:
        """What follows from the failure."""
        return OUTCOMES[self.outcome]

    @property
    def reached(self) -> bool:
        """True if the worker may have worked on the request."""
        return self.consequence.reached


@dataclass(slots=True)
class FailedAttempts:
    """The workers that failed one request, and how."""

    prefill: set[Worker] = field(default_factory=set)
    decode: dict[Worker, float] = field(default_factory=dict)
    """Maps each worker to the time of its failure (monotonic). A worker that has come up since may be tried again: it
    is another process, or well again."""
    failures: list[WorkerFailed] = field(default_factory=list)
    _uncounted: list[tuple[Worker, str]] = field(default_factory=list)
    """Failures that count against their workers only if another one serves the request."""

    @property
    def of_decode(self) -> list[WorkerFailed]:
        """The failures of decode workers."""
        return [failure for failure in self.failures if failure.worker.assigned_role is Role.DECODE]

    def note(self, failure: WorkerFailed, now_s: float, pair: Pair | None) -> bool:
        """Notes a failure and lets the breaker count it that is to. `pair` is the pair of the hand-off, if there was
        one. Returns True if this has opened the worker's breaker."""
        worker, counts = failure.worker, failure.consequence.counts
        failure.__traceback__ = None  # its frames hold the request's body
        self.failures.append(failure)
        if worker.assigned_role is Role.DECODE:
            self.decode[worker] = now_s
        else:
            self.prefill.add(worker)
        worker.num_failures += 1
        if counts is Counts.WORKER:
            return worker.breaker.failed(now_s, failure.reason)
        if counts is Counts.IF_SERVED:
            self._uncounted.append((worker, failure.reason))
        elif counts is Counts.PAIR and pair is not None:
            pair.fail(now_s, str(failure))
        return False

    def served(self, by: Worker, now_s: float) -> list[Worker]:
        """Notes that a worker serves the request: those that could not were at fault. Returns the workers whose
        breakers this has opened."""
        uncounted, self._uncounted = self._uncounted, []
        return [one for one, reason in uncounted if one is not by and one.breaker.failed(now_s, reason)]

    def check_retry(self) -> None:
        """Raises ApiError if no other worker may be tried after the latest failure."""
        latest = self.failures[-1]
        consequence = latest.consequence
        if consequence.retry is Retry.NO:
            raise ApiError(consequence.status, latest.reason, code=consequence.code)
        broke_down = [failure for failure in self.failures if failure.consequence.retry is Retry.ONCE]
        if consequence.retry is Retry.ONCE and len(broke_down) > 1:
            what = " and ".join(str(failure) for failure in broke_down)
            raise ApiError(
                max(failure.consequence.status for failure in broke_down),
                f"{what}: the request is not given to a third worker, because it may be what they broke down of. "
                "Look at their logs before you send it again",
                code=consequence.code,
            )
