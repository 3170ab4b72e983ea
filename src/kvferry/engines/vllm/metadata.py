"""The three records that cross between vLLM's scheduler and its workers. vLLM pickles them."""

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
    """What a worker sends the scheduler at the start: everything that peers and the facts need to know about its
    rank.
    """

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
    """Pairs of (canonical layer name, index of its cache group)."""
    channel_address: str = ""
    """The address of this worker's WorkerChannel; empty if there is none."""


@dataclass(frozen=True)
class Orders(KVConnectorMetadata):  # type: ignore[misc]  # as above
    """What the scheduler sends to all workers, once per step."""

    orders: StepOrders = field(default_factory=StepOrders)
    failing: frozenset[str] = frozenset()
    """Requests that every worker must report as failed, so that vLLM ends them with an error."""
    report_expected: bool = False
    """Workers must send a report even if it is empty: vLLM calls update_connector_output only if there is a report, and
    the scheduler half has, or will have, something to pass to vLLM there."""


@dataclass(frozen=True)
class Reports(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """What workers send to the scheduler with a step: reports that could not go through the worker channel."""

    reports: tuple[StepReport, ...] = ()
    lost: tuple[PeerGone, ...] = ()
    """Peers that a worker found to be gone."""

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "Reports":
        """Joins the reports of two ranks, in order."""
        assert isinstance(other, Reports), "the workers of one engine run one connector"
        return Reports(self.reports + other.reports, self.lost + other.lost)
