"""Records that workers and the router exchange over HTTP, and show to users."""

import msgspec

from kvferry.settings import Role, TransferMode
from kvferry.stats import HandoffTiming, PromptAccount

__all__ = ["CacheMark", "Limits", "Load", "Room", "Served", "SideChannelAddress", "WorkerInfo", "header_value"]

HEADER_PREFIX = "x-kvferry-"


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How one request was served: where each prompt token's KV came from, what that cost, and who did it.

    The body's `kvferry` object. handed_over + cached + recomputed = prompt tokens.
    """

    handed_over: int = 0
    """Prompt tokens whose KV another engine computed and handed over."""
    cached: int = 0
    """Prompt tokens found in the prefix cache of the engine that answered."""
    recomputed: int = 0
    """Prompt tokens that the engine that answered computed itself."""
    why: str = ""
    """Why it computed them, where another engine should have brought them."""
    bytes: int = 0
    transfer_ms: float = 0.0
    wait_ms: float = 0.0
    grant_ms: float = 0.0
    """From the request's arrival on decode until its KV had landed."""
    runs: int = 0
    """Contiguous pieces that were moved."""
    verified: int = 0
    """Pieces of KV compared with prefill's by digest."""
    mode: TransferMode | None = None
    """None: no hand-off was asked for."""
    prefill: str | None = None
    """The engine that was to compute the prompt."""
    decode: str | None = None
    """The engine that computed the answer; None in an answer of prefill, for a hand-off."""

    @classmethod
    def of(
        cls,
        account: PromptAccount | None,
        timing: HandoffTiming | None,
        *,
        reason: str = "",
        mode: TransferMode | None = None,
        prefill: str | None = None,
        decode: str | None = None,
    ) -> "Served":
        """From the engine's own records; `reason` is what the router knew, if the engine has no reason of its own."""
        account = account or PromptAccount()
        timing = timing or HandoffTiming()
        return cls(
            handed_over=account.handed_over,
            cached=account.cached,
            recomputed=account.recomputed,
            why=account.reason or reason,
            bytes=timing.num_bytes,
            transfer_ms=round(timing.transfer_s * 1e3, 3),
            wait_ms=round(timing.wait_s * 1e3, 3),
            grant_ms=round(timing.grant_s * 1e3, 3),
            runs=timing.num_runs,
            verified=timing.verified_cells,
            mode=mode,
            prefill=prefill,
            decode=decode,
        )

    def headers(self) -> dict[str, str]:
        """What is known before the body, as `x-kvferry-...` headers. Values are made printable ASCII."""
        values: dict[str, object] = {
            "handed-over": self.handed_over,
            "cached": self.cached,
            "recomputed": self.recomputed,
            "why": self.why,
            "mode": self.mode.value if self.mode else None,
            "prefill": self.prefill,
            "decode": self.decode,
        }
        return {HEADER_PREFIX + name: header_value(str(v)) for name, v in values.items() if v not in (None, "")}


def header_value(text: str) -> str:
    """Fit for a header: printable ASCII, at most 400 characters."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:400]


class SideChannelAddress(msgspec.Struct, frozen=True):
    """Where a worker shakes hands."""

    host: str = ""
    port: int = 0


class Load(msgspec.Struct, frozen=True):
    """Requests that a worker holds."""

    open_requests: int = 0


class Room(msgspec.Struct, frozen=True):
    """What is left of a worker's cache."""

    free_blocks: int = 0
    """Of `Limits.blocks`; blocks that only the prefix cache holds count as free."""
    waiting: int = 0
    """Requests that have no blocks yet."""


class Limits(msgspec.Struct, frozen=True):
    """What a worker can hold at all. 0: it does not say."""

    max_model_len: int = 0
    block_tokens: int = 0
    blocks: int = 0


class CacheMark(msgspec.Struct, frozen=True):
    """Which state of the prefix cache `GET /v1/kvferry/blocks` would tell; the same mark means the same blocks."""

    version: int = 0
    blocks: int = 0


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/kvferry, as far as the router reads it. Unknown fields are skipped."""

    engine: str
    incarnation: str
    role: Role
    mode: TransferMode | None = None
    """None: it does not say; the router learns it from what prefill returns."""
    kind: str = "kvferry"
    """Whose server answers: `kvferry`, or `vllm` (which has no GET /v1/kvferry: the router makes this record)."""
    version: str = ""
    side_channel: SideChannelAddress = SideChannelAddress()
    model: str = ""
    state: str = "ready"
    """`ready`; else why it takes no new requests: `draining`, or a sentence."""
    load: Load = Load()
    limits: Limits = Limits()
    room: Room | None = None
    """None: it does not say."""
    cache: CacheMark | None = None
    """None: it does not tell its blocks."""
    abilities: tuple[str, ...] = ()
    """What it can do beyond the first release: `first-token` (an answer to a hand-off begins with prefill's first
    token, alone in its event), `meet` (POST /v1/kvferry/meet), `prompt-blocks` (prefill tells the prompt's block
    hashes if asked)."""
    facts: msgspec.Raw = msgspec.Raw(b"null")
    protocol: msgspec.Raw = msgspec.Raw(b"null")
