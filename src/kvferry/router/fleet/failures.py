"""A worker's failure to answer a request, and the record of all such failures of one request."""

from dataclasses import dataclass, field

from kvferry.errors import PeerError
from kvferry.router.fleet.worker import Worker
from kvferry.settings import Role

__all__ = ["FailedAttempts", "WorkerFailed"]


class WorkerFailed(PeerError):
    """A worker did not answer as it should, and nothing of its answer has gone to the client."""

    def __init__(
        self, worker: Worker, reason: str, *, reached: bool, status: int = 502, answered: bool = False
    ) -> None:
        super().__init__(f"{worker.label} {reason.strip() or 'has failed and gave no reason'}")
        self.worker = worker
        self.reached = reached
        """True if the worker may have worked on the request."""
        self.answered = answered
        """True if the worker itself reported the failure: it holds nothing of the request any more."""
        self.status = status
        """The status for the client if no other worker can help: 503 for overload, 504 for a time-out, else 502."""


@dataclass(slots=True)
class FailedAttempts:
    """The workers that failed one request, and how."""

    prefill: set[Worker] = field(default_factory=set)
    decode: dict[Worker, float] = field(default_factory=dict)
    """Maps each worker to the time of its failure (monotonic). A worker that has come up since may be tried again: it
    is another process, or well again."""
    failures: list[WorkerFailed] = field(default_factory=list)

    @property
    def of_decode(self) -> list[WorkerFailed]:
        """The failures of decode workers."""
        return [failure for failure in self.failures if failure.worker.assigned_role is Role.DECODE]
