"""Statistics as immutable snapshots. The HTTP server makes Prometheus text from them."""

from dataclasses import dataclass

__all__ = ["HandoffStats", "HandoffTiming", "PromptAccount", "StageTimes"]


@dataclass(frozen=True, slots=True)
class PromptAccount:
    """Where the KV of a request's prompt tokens came from.

    `handed_over`, `fetched`, `cached` and `recomputed` add up to the length of the prompt; on prefill, without the last
    tokens that it leaves to decode; in a request that was cancelled, to what it had by then.
    """

    handed_over: int = 0
    fetched: int = 0
    """Tokens that were fetched from an engine that held them already (R41)."""
    cached: int = 0
    recomputed: int = 0
    computed_again: int = 0
    """Prompt tokens that were computed more often than `recomputed` says: after a preemption."""
    source: str = ""
    """The engine from which tokens were fetched."""
    reason: str = ""
    """Why tokens were recomputed that another engine should have handed over."""


@dataclass(frozen=True, slots=True)
class HandoffTiming:
    """What one hand-off cost, as decode saw it."""

    num_bytes: int = 0
    num_runs: int = 0
    transfer_s: float = 0.0
    """The time from the first read (pull) or the registration (push) to the last byte."""
    wait_s: float = 0.0
    """The time from the request's arrival until its KV had landed."""
    verified_cells: int = 0
    """The number of pieces of KV that were compared with prefill's by digest."""
    grant_s: float = 0.0
    """The time from the request's arrival until prefill had granted its blocks (pull) or held a grant on decode's
    blocks (push)."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """When a request reached each stage, by the engine's own monotonic clock; None for a stage that it did not
    reach."""

    arrived_s: float
    reserved_s: float | None = None
    """It had blocks, and began to wait for the KV from another engine."""
    landing_s: float | None = None
    """The first read of that KV was posted (pull), or its blocks were registered (push)."""
    landed_s: float | None = None
    computing_s: float | None = None
    """It was part of a step for the first time."""
    first_token_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """What one worker has counted since its start."""

    landed: int = 0
    failed: int = 0
    bytes: int = 0
    transfer_s: float = 0.0
    open_grants: int = 0
    quarantined_blocks: int = 0
    expired_leases: int = 0
    peers: int = 0
    refused_peers: int = 0
