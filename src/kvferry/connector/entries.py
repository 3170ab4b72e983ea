"""What the scheduler half remembers of its hand-offs, and the records that it fills. It decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.connector.base import EngineIdentity, Outcome
from kvferry.handoff.orders import Cancel, Failed, Fetch, KeepAlive, Landed, Offer, StepOrders, Withdraw
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import FailurePolicy, TransferMode
from kvferry.wire.first_token import FirstToken
from kvferry.wire.params import HandoffParams
from kvferry.wire.prompt_digest import Prompt, StatedPrompt

__all__ = ["DecodeHandoff", "OrdersBuilder", "OutcomeBuilder", "PrefillHandoff", "answer_params", "is_for", "joined"]


@dataclass(slots=True)
class PrefillHandoff:
    """A prefill request from its first computed chunk until every rank has released it."""

    request: RequestId
    transfer: TransferId
    prompt: Prompt
    finished: bool = False
    """The request has ended, and its blocks are held for the peer."""
    withdrawn_reason: str = ""
    """Why no decode engine will take it. If it is set while the request runs, it is withdrawn when the request ends."""
    released_by: int = 0
    """The number of ranks that have released its blocks."""


def is_for(params: HandoffParams, prompt: Prompt) -> bool:
    """Returns whether prefill's parameters say that they are for this very prompt."""
    return (params.remote_prompt_tokens, params.remote_prompt_digest) == (prompt.num_tokens, prompt.digest.hex())


@dataclass(slots=True)
class DecodeHandoff:
    """A decode request from its arrival until its hand-off has ended on every rank."""

    request: RequestId
    transfer: TransferId
    engine: EngineId
    incarnation: Incarnation | None
    num_tokens: int
    prompt: StatedPrompt
    expected_tokens: int
    """How many tokens prefill hands over of a prompt of this length."""
    policy: FailurePolicy
    fetched: bool = False
    """No prefill engine computes it for this request: another engine holds a prefix of the prompt."""
    answered: bool = False
    """Prefill has answered its own request: only then is the number of tokens known."""
    kept_alive: bool = False
    """The worker halves keep the prefill side's grant alive."""
    started: bool = False
    """It has blocks, and a Fetch was ordered."""
    outcome_reported: bool = False
    """The outcome was already reported to the engine, or the engine cancelled; do not report it again."""
    landed: list[Landed] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    released_by: int = 0
    """The number of ranks that have released its blocks."""

    @property
    def source(self) -> str:
        """The engine that it is fetched from; "" for a hand-off."""
        return self.engine if self.fetched else ""

    def is_for(self, params: HandoffParams, *, counted: bool) -> bool:
        """Returns whether prefill's parameters are for this very prompt. `counted`: if they state none, as those of
        older releases, the number of tokens decides."""
        stated = (params.remote_prompt_tokens, params.remote_prompt_digest)
        if stated == (None, None):
            return counted and params.remote_num_tokens == self.expected_tokens
        return any((num, digest.hex()) == stated for num, digest in self.prompt.marks[:1])


@dataclass(slots=True)
class OrdersBuilder:
    """Collects the orders for the next step."""

    offer: dict[TransferId, Offer] = field(default_factory=dict)
    withdraw: list[Withdraw] = field(default_factory=list)
    keep_alive: list[KeepAlive] = field(default_factory=list)
    fetch: list[Fetch] = field(default_factory=list)
    cancel: list[Cancel] = field(default_factory=list)

    def orders(self) -> StepOrders:
        """Return the record that goes to the worker halves."""
        return StepOrders(
            offer=tuple(self.offer.values()),
            withdraw=tuple(self.withdraw),
            keep_alive=tuple(self.keep_alive),
            fetch=tuple(self.fetch),
            cancel=tuple(self.cancel),
        )


@dataclass(slots=True)
class OutcomeBuilder:
    """Collects what one `update` finds."""

    landed: list[Landed] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    fatal: list[Failed] = field(default_factory=list)
    released: list[TransferId] = field(default_factory=list)

    def outcome(self) -> Outcome:
        """Return the record that goes to the engine."""
        return Outcome(tuple(self.landed), tuple(self.failed), tuple(self.fatal), tuple(self.released))


def joined(entry: DecodeHandoff) -> Landed:
    """Join the records of all ranks into one: bytes add up, and the slowest rank's time counts.

    What a holder has is for a prefix of the prompt, so that the prompt goes on is no difference.
    """
    ranks, first = entry.landed, entry.landed[0]
    stop = min(one.arrived.stop for one in ranks)
    difference = next((one.difference for one in ranks if one.difference), "")
    return Landed(
        transfer=first.transfer,
        request=first.request,
        arrived=TokenRange(first.arrived.start, stop),
        num_bytes=sum(one.num_bytes for one in ranks),
        num_runs=sum(one.num_runs for one in ranks),
        transfer_s=max(one.transfer_s for one in ranks),
        verified_cells=sum(one.verified_cells for one in ranks),
        note=next((one.note for one in ranks if one.note), b""),
        grant_s=max(one.grant_s for one in ranks),
        source=entry.source,
        difference="" if entry.fetched and stop == entry.num_tokens else difference,
    )


def answer_params(
    identity: EngineIdentity,
    mode: TransferMode,
    entry: PrefillHandoff,
    tables: Sequence[BlockTable],
    num_tokens: int,
    first_token: FirstToken | None,
) -> HandoffParams:
    """Make what the router carries to decode, under the names that existing routers read (R15)."""
    return HandoffParams(
        do_remote_prefill=True,
        do_remote_decode=False,
        transfer_mode=mode,
        transfer_id=entry.transfer,
        remote_engine_id=identity.engine,
        remote_incarnation=identity.incarnation,
        remote_request_id=entry.request,
        remote_host=identity.host,
        remote_port=identity.port,
        remote_block_ids=[[int(block) for block in table.block_ids] for table in tables],
        remote_block_first_tokens=[table.first_token for table in tables],
        remote_num_tokens=num_tokens,
        remote_prompt_tokens=entry.prompt.num_tokens,
        remote_prompt_digest=entry.prompt.digest.hex(),
        tp_size=identity.tp_size,
        pp_size=identity.pp_size,
        first_token=first_token.token if first_token else None,
        first_logprob=first_token.logprob if first_token else None,
        first_top_logprobs=list(first_token.top) if first_token else None,
    )
