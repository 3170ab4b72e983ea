"""Numbers as immutable snapshots. Prometheus text is made from them at the edge."""

from dataclasses import dataclass

__all__ = ["HandoffStats", "HandoffTiming", "PromptAccount", "StageTimes"]


@dataclass(frozen=True, slots=True)
class PromptAccount:
    """Where the KV of each prompt token of one request came from. The three counts add up to the prompt."""

    handed_over: int = 0
    cached: int = 0
    recomputed: int = 0
    reason: str = ""
    """Why tokens were recomputed, where another engine should have brought them."""


@dataclass(frozen=True, slots=True)
class HandoffTiming:
    """What one hand-off cost, as decode saw it."""

    num_bytes: int = 0
    num_runs: int = 0
    transfer_s: float = 0.0
    """From the first post (pull) or the registration (push) to the last byte."""
    wait_s: float = 0.0
    """From the request's arrival until its KV had landed."""
    verified_cells: int = 0
    """Pieces of KV compared with prefill's by digest."""
    grant_s: float = 0.0
    """From the request's arrival until prefill had granted its blocks (pull), or held a grant on ours (push)."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """When one request got how far, by the engine's own monotonic clock; None: it did not."""

    arrived_s: float
    reserved_s: float | None = None
    """It had blocks, and began to wait for the KV that another engine was to bring."""
    landing_s: float | None = None
    """The first post of that transfer (pull), or its registration (push)."""
    landed_s: float | None = None
    computing_s: float | None = None
    """It was first part of a step."""
    first_token_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Counters of one worker since its start."""

    landed: int = 0
    failed: int = 0
    bytes: int = 0
    transfer_s: float = 0.0
    open_grants: int = 0
    quarantined_blocks: int = 0
    expired_leases: int = 0
    peers: int = 0
    refused_peers: int = 0
