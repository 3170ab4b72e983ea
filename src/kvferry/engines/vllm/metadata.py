"""What crosses between vLLM's scheduler and its workers: three records, as vLLM wants them. Pickled by vLLM."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.connector.base import PeerGone, StepOrders, StepReport

__all__ = ["Orders", "RankInfo", "Reports"]


@dataclass(frozen=True)
class RankInfo(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vllm is not installed where types are checked
    """What a worker tells the scheduler at the start: all that peers, and the facts, need of it."""

    index: int
    incarnation: str
    layout: bytes
    transport: str
    transport_metadata: bytes
    kernel_tokens: tuple[int | None, ...]
    backends: tuple[str, ...]
    packings: tuple[str, ...]
    state_dtypes: tuple[str, ...]
    layer_groups: tuple[tuple[str, int], ...]
    """(canonical layer name, group)."""
    line: str = ""
    """Where the scheduler finds this worker's WorkerChannel; empty: nowhere."""


@dataclass(frozen=True)
class Orders(KVConnectorMetadata):  # type: ignore[misc]  # as above
    """Scheduler to workers, once a step."""

    orders: StepOrders = field(default_factory=StepOrders)
    doomed: frozenset[str] = frozenset()
    """Requests that every worker is to report as failed: vLLM ends them with an error."""
    answer: bool = False
    """Workers are to report, if only nothing: vLLM calls update_connector_output for a report, and the scheduler half
    has something to tell vLLM, or will have."""


@dataclass(frozen=True)
class Reports(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """Workers to scheduler, in a step in which there is something to say that did not go by line."""

    reports: tuple[StepReport, ...] = ()
    lost: tuple[PeerGone, ...] = ()
    """Peers that a worker found gone."""

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "Reports":
        """Of several ranks: behind each other."""
        assert isinstance(other, Reports), "the workers of one engine run one connector"
        return Reports(self.reports + other.reports, self.lost + other.lost)
