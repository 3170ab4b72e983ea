"""The connector as an engine sees it: two halves that share no object.

The scheduler half knows requests, ids and counts, and no memory. The worker half knows memory, and never decides who
runs. The methods follow vLLM's KVConnectorBase_V1, so that both engines' plug-ins stay thin.

Life of a request on prefill:  on_new_request -> (computed(...) after each chunk) -> request_finished -> blocks are kept
                               -> update() names the transfer in `released` -> the engine frees them.
Life of a request on decode:   on_new_request -> match -> after_alloc -> update(): landed | failed -> (released)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.handoff.orders import Failed, Landed, PeerAccepted, PeerGone, StepOrders, StepReport
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import BlockTable
from kvferry.layout.description import CacheLayout
from kvferry.settings import FailurePolicy
from kvferry.wire.first_token import FirstToken
from kvferry.wire.hello import RankHello
from kvferry.wire.layout_codec import encode_layout
from kvferry.wire.params import HandoffParams
from kvferry.wire.prompt_digest import Prompt

__all__ = [
    "EngineIdentity",
    "Failed",
    "HeldPrefix",
    "Landed",
    "Match",
    "Outcome",
    "PeerAccepted",
    "PeerGone",
    "PrefixHolder",
    "RankRecord",
    "RequestView",
    "SchedulerHalf",
    "StepOrders",
    "StepReport",
    "WorkerHalf",
]


class RequestView(Protocol):
    """What the scheduler half reads of an engine's request."""

    @property
    def request_id(self) -> RequestId:
        """The request's name, unique in the engine."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        ...

    @property
    def prompt(self) -> Prompt:
        """All tokens of the prompt, also those that prefill leaves to decode, and what else its KV depends on (a cache
        salt, an adapter, images): `Prompt.of(token_ids, salt)`. The same object each time: it is packed and hashed
        once."""
        ...

    @property
    def handoff(self) -> HandoffParams | None:
        """The request's kv_transfer_params, decoded; None for an ordinary request."""
        ...

    @property
    def on_failure(self) -> FailurePolicy | None:
        """What the client wants if its KV does not arrive (R29). None means what the engine's settings say."""
        ...


@dataclass(frozen=True, slots=True)
class Match:
    """How many tokens after the engine's own prefix hits another engine will bring."""

    num_tokens: int = 0
    """0 means that nothing comes from outside: compute the prompt."""
    wait: bool = False
    """The peer is not known yet: ask again at the next step. `num_tokens` means nothing."""
    reason: str = ""
    """Why nothing comes although the request names a peer. It is shown in the account of the prompt's tokens."""
    error: str = ""
    """Set if the policy is to fail: end the request with this message."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became known since the last step, over all ranks. A transfer is in `landed`, `failed` or `fatal` once.

    `Landed.note`, if not empty, is the first token (wire.first_token), which in push mode no router could carry. If
    `Landed.difference` is not empty, prefill's prompt is not the request's: nothing but `Landed.arrived` may be used,
    and no first token, wherever it came from (R51).
    """

    landed: tuple[Landed, ...] = ()
    failed: tuple[Failed, ...] = ()
    """The engine computes these requests itself. Their blocks stay the connector's until `released`: give the requests
    fresh ones, or, if `released` names the transfer in the same outcome, keep what arrived whole."""
    fatal: tuple[Failed, ...] = ()
    """The engine ends these requests with the reason, for their policy is to fail. Their blocks are kept as above."""
    released: tuple[TransferId, ...] = ()
    """Blocks that were kept for these transfers are the engine's again."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What an engine's scheduler needs to know of one rank: `start_worker` makes it. Picklable, for other processes."""

    layout: CacheLayout
    incarnation: Incarnation
    transport: str
    """The transport's name."""
    transport_metadata: bytes
    """What the transport of a peer needs to connect to this rank's."""

    def hello(self) -> RankHello:
        """The same, as peers receive it."""
        return RankHello(
            layout=encode_layout(self.layout), transport=self.transport, transport_metadata=self.transport_metadata
        )


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Who an engine is and where it listens: this is what the parameters that prefill returns say of it."""

    engine: EngineId
    incarnation: Incarnation
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1
    mode_remedy: str = "start both with the same --transfer-mode"
    """What to do about a peer of the other transfer mode, in the words of this engine's settings."""

    @property
    def num_ranks(self) -> int:
        """The number of worker halves that report."""
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """The KV of the tokens [0, num_tokens), which an engine keeps for another one."""

    num_tokens: int
    tables: tuple[BlockTable, ...]
    """One per cache group, as if a request had computed these tokens and no more: of a window the last ones, of states
    those after the last token."""


class PrefixHolder(Protocol):
    """What an engine does for others that fetch from it (R39). Called on the engine's thread; never blocks."""

    def hold(self, transfer: TransferId, prompt: Prompt, *, more_than: int, share: float) -> HeldPrefix | str:
        """Keep the longest prefix of a prompt that is in the cache under its salt, until `update` releases the
        transfer. Return the reason if that is not more than `more_than` tokens, or if more than `share` of the cache
        would be kept for other engines. The token ids are a peer's: they may be out of the vocabulary."""
        ...


class SchedulerHalf(Protocol):
    """Called on the engine's thread only. It never blocks, and does no I/O."""

    def handoff_tokens(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt prefill computes and hands over; decode computes the others (R32).

        Both sides must count alike; connector.lookahead has the counts.
        """
        ...

    def on_new_request(self, request: RequestView) -> None:
        """A request has arrived. Called once per request, before anything else about it."""
        ...

    def carried_first_token(self, request: RequestView) -> FirstToken | None:
        """Return the first token in the request's parameters, if they are for this very prompt (R51).

        Called at most once, after `on_new_request`.
        """
        ...

    def match(self, request: RequestView, num_cached_tokens: int) -> Match:
        """Return how many tokens after the engine's own `num_cached_tokens` come from outside. May be called often."""
        ...

    def after_alloc(self, request: RequestView, tables: Sequence[BlockTable], num_cached_tokens: int) -> None:
        """Blocks for the matched tokens are allocated: start the hand-off into them. The request waits for `update`.

        The blocks are the connector's from here until `landed`, or until `released` after `failed` or an abort.
        """
        ...

    def computed(self, request: RequestView, tables: Sequence[BlockTable], num_computed_tokens: int) -> None:
        """Prefill: the KV of [0, num_computed_tokens) is stored. Called after each chunk of such a request."""
        ...

    def request_finished(
        self,
        request: RequestView,
        tables: Sequence[BlockTable],
        num_computed_tokens: int,
        *,
        first_token: FirstToken | None,
        aborted: bool,
        complete: bool = False,
    ) -> tuple[TransferId | None, HandoffParams | None]:
        """The request has ended. Called once for every request, whatever it was doing.

        If a transfer id is returned, keep the request's blocks until `update` releases it. If parameters are returned,
        they are the answer's `kv_transfer_params`. `aborted` is also true for a prefill request that an error ended.
        `complete` says of a prefill request that its first token ended the answer. In pull no engine will decode it. In
        push an engine waits for it already, so it is handed over: then decode gives the answer, with that token.
        """
        ...

    def preempted(self, request: RequestView) -> TransferId | None:
        """The engine wants the request's blocks back, to run it again later.

        If a transfer id is returned, a peer may be reading them: keep them until `update` releases it. Else they are
        free at once.
        """
        ...

    def withdraw(self, transfer: TransferId, reason: str) -> bool:
        """Take back a prefill's offer that no decode engine will claim: the router has said so.

        Returns True if `update` will release its blocks, which is sooner than the lease would; False if no such offer
        is open. Any id may be asked for.
        """
        ...

    def decline(self, params: HandoffParams, reason: str) -> None:
        """Decode: the engine has refused a request with these parameters, so `on_new_request` is not called for it.

        The prefill engine's grant is freed. Any parameters may be given.
        """
        ...

    def hold_prefixes(self, holder: PrefixHolder) -> None:
        """From now on other engines may fetch what is in this engine's cache. Without this call they are refused."""
        ...

    def build_orders(self) -> StepOrders:
        """Return all that the worker halves have to know. Called once per step."""
        ...

    def update(self, reports: Sequence[StepReport]) -> Outcome:
        """Take the worker halves' reports, and return what became known."""
        ...

    def has_pending_work(self) -> bool:
        """True if the engine must keep stepping although no request runs."""
        ...


class WorkerHalf(Protocol):
    """Called on the thread that runs the model. It never raises and never blocks: a driver thread does the work."""

    def start_step(self, orders: StepOrders) -> None:
        """Take orders. Called once per step, before or after the forward pass."""
        ...

    def end_step(self) -> StepReport:
        """Return what has ended since the last call. Called after the forward pass."""
        ...

    def close(self) -> None:
        """End the driver, the transport and every registration."""
        ...
