"""Records that workers and the router exchange over HTTP and show to users."""

import msgspec

from kvferry.settings import Role, TransferMode
from kvferry.stats import HandoffTiming, PromptAccount

__all__ = [
    "CREATED",
    "DECODE_CHECKS",
    "CacheMark",
    "DecodeChecks",
    "Handoffs",
    "Limits",
    "Load",
    "ModelCard",
    "Room",
    "Served",
    "SideChannelAddress",
    "WorkerInfo",
    "header_value",
]

HEADER_PREFIX = "x-kvferry-"


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How one request was served: where the KV of each prompt token came from, at what cost, and by which engines.

    It is the `kvferry` object of a response body. handed_over + fetched + cached + computed = number of prompt tokens:
    each prompt counts once, whatever `n` is. In prefill's answer to a hand-off, the last tokens may be left to decode.
    """

    handed_over: int = 0
    """Prompt tokens whose KV another engine computed and handed over."""
    fetched: int = 0
    """Prompt tokens whose KV another engine held already, and that were fetched from there (`source`)."""
    cached: int = 0
    """Prompt tokens found in the prefix cache of the engine that answered."""
    computed: int = 0
    """Prompt tokens that the engine that answered computed itself: by choice, or because a hand-off failed (`why`)."""
    recomputed: int = 0
    """The older name of `computed`, which suggests that another engine should have computed them. The same count."""
    computed_again: int = 0
    """Prompt tokens that it computed besides those: for further choices (`n`) that did not find the prompt in the
    prefix cache, and after a preemption. Known only at the end of the answer, so it is in no header."""
    why: str = ""
    """Why it computed tokens that another engine should have handed over. Empty if there was no reason to."""
    bytes: int = 0
    """Bytes of KV that were moved to decode."""
    transfer_ms: float = 0.0
    """How long the move took."""
    wait_ms: float = 0.0
    """From the request's arrival on decode until its KV had landed."""
    grant_ms: float = 0.0
    """From the request's arrival on decode until prefill had granted its blocks (pull) or held decode's (push)."""
    runs: int = 0
    """Contiguous pieces that were moved."""
    verified: int = 0
    """Pieces of KV that were compared with prefill's by digest."""
    source: str = ""
    """The engine from which tokens were fetched."""
    mode: TransferMode | None = None
    """None: no hand-off was requested."""
    prefill: str | None = None
    """The engine that was to compute the prompt."""
    decode: str | None = None
    """The engine that computed the answer. None in prefill's own response to a hand-off."""

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
        """Makes the record from the engine's own. `reason` is the router's; the engine's own reason goes first."""
        account = account or PromptAccount()
        timing = timing or HandoffTiming()
        return cls(
            handed_over=account.handed_over,
            fetched=account.fetched,
            source=account.source,
            cached=account.cached,
            computed=account.recomputed,
            recomputed=account.recomputed,
            computed_again=account.computed_again,
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

    @property
    def lost(self) -> bool:
        """Whether nothing was handed over although it was to be, and the prompt was computed here.

        A tail that prefill leaves to decode on purpose is no loss: most of the prompt landed, or all was cached.
        """
        return bool(self.why) and not self.handed_over and self.recomputed > 0

    def headers(self, *, complete: bool = True) -> dict[str, str]:
        """Returns what is known before the body as `x-kvferry-...` headers, in printable ASCII.

        `complete` says whether the counts are: a stream of several prompts begins before all of them are served.
        """
        values: dict[str, object] = {
            "handed-over": self.handed_over if complete else None,
            "fetched": self.fetched if complete and self.fetched else None,
            "source": self.source,
            "cached": self.cached if complete else None,
            "computed": self.computed if complete else None,
            "recomputed": self.recomputed if complete else None,
            "why": self.why,
            "mode": self.mode.value if self.mode else None,
            "prefill": self.prefill,
            "decode": self.decode,
        }
        return {HEADER_PREFIX + name: header_value(str(v)) for name, v in values.items() if v not in (None, "")}


def header_value(text: str) -> str:
    """Returns text that is fit for a header: printable ASCII, at most 400 characters."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:400]


class SideChannelAddress(msgspec.Struct, frozen=True):
    """Where a worker answers handshakes."""

    host: str = ""
    port: int = 0


class Load(msgspec.Struct, frozen=True):
    """How busy a worker is."""

    open_requests: int = 0
    """Sequences that have not ended."""


class Room(msgspec.Struct, frozen=True):
    """How much of a worker's cache is left."""

    free_blocks: int = 0
    """How many of `Limits.blocks` are free, counting blocks that only the prefix cache holds."""
    waiting: int = 0
    """Requests that wait for blocks."""


class Handoffs(msgspec.Struct, frozen=True):
    """How the hand-offs to a vLLM server with kvferry's connector have ended, since it was started."""

    landed: int = 0
    failed: int = 0


class Limits(msgspec.Struct, frozen=True):
    """The most that a worker can hold. 0: not reported."""

    max_model_len: int = 0
    block_tokens: int = 0
    blocks: int = 0
    tokens: int = 0
    """The most tokens of a prompt and its answer together, by the model's context and by the size of the cache."""

    @property
    def longest_request(self) -> int:
        """`tokens`, or for a server that does not report it, what follows from the others."""
        cache = self.blocks * self.block_tokens
        return self.tokens or min(self.max_model_len or cache, cache or self.max_model_len)


CREATED = "x-kvferry-created"
"""The header with the `created` that a worker writes into its answer, in seconds since 1970: prefill and decode write
parts of one stream."""

DECODE_CHECKS = "x-kvferry-decode-checks"
"""The header with `DecodeChecks`, as JSON."""


class DecodeChecks(msgspec.Struct, frozen=True, omit_defaults=True):
    """What decode will check of a request that prefill gets with `max_tokens` 1: the client's own values. None: the
    client did not send it. Prefill refuses what decode would refuse, before it computes the prompt."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    longest_request: int = 0
    """The most tokens of a prompt and its answer together that any decode worker takes. 0: not known."""


class CacheMark(msgspec.Struct, frozen=True):
    """Identifies the state of the prefix cache that `GET /v1/kvferry/blocks` returns: equal marks mean equal blocks."""

    version: int = 0
    blocks: int = 0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A name that requests may give as `model`: an entry of GET /v1/models, with the fields of vLLM's."""

    id: str
    object: str = "model"
    created: int = 0
    """When its server was started, in seconds since 1970."""
    owned_by: str = "kvferry"
    root: str | None = None
    """The model's files or hub name, or those of the adapter, as the server was given them."""
    parent: str | None = None
    """For an adapter, the model that it adapts."""
    max_model_len: int | None = None
    """The most tokens of a prompt and its answer together. None: not reported."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of GET /v1/kvferry that the router reads. Unknown fields are skipped."""

    engine: str
    incarnation: str
    role: Role
    mode: TransferMode | None = None
    """None: not reported; the router learns it from what prefill returns."""
    kind: str = "kvferry"
    """Which server answers: `kvferry`, or `vllm`, which has no GET /v1/kvferry: the router makes this record."""
    version: str = ""
    side_channel: SideChannelAddress = SideChannelAddress()
    model: str = ""
    """The first of its names. It names the model in answers to requests that name none."""
    models: tuple[ModelCard, ...] = ()
    """All names that requests may give. Empty: a worker that takes `model` only."""
    state: str = "ready"
    """`ready`, or why it takes no new requests: `draining`, or a sentence."""
    load: Load = Load()
    limits: Limits = Limits()
    room: Room | None = None
    """None: not reported."""
    handoffs: Handoffs | None = None
    """None: not reported. kvferry's own workers say it in each answer."""
    cache: CacheMark | None = None
    """None: it does not report the blocks in its prefix cache."""
    abilities: tuple[str, ...] = ()
    """Abilities added since the first release: `first-token` (the answer to a hand-off begins with prefill's first
    token, alone in its event), `meet` (POST /v1/kvferry/meet), `prompt-blocks` (prefill returns the hashes of the
    prompt's blocks on request), `decode-checks` (prefill refuses what decode will refuse), `fetch` (it gives KV of its
    cache to other engines, and fetches from the `sources` of a request)."""
    facts: msgspec.Raw = msgspec.Raw(b"null")
    protocol: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may give as `model`. Empty: it does not report them."""
        return tuple(card.id for card in self.models) or ((self.model,) if self.model else ())
