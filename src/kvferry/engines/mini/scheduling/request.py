"""One request inside the engine: its tokens, its blocks, how far it is, and where its prompt's KV came from."""

from dataclasses import dataclass, field
from enum import Enum

from kvferry.engines.mini.api import GenerateRequest, SamplingParams, TokenLogprobs
from kvferry.engines.mini.scheduling.block_manager import BlockHash
from kvferry.engines.mini.scheduling.output import Answer
from kvferry.ids import RequestId
from kvferry.layout.blocks import BlockTable
from kvferry.settings import FailurePolicy
from kvferry.stats import HandoffTiming, PromptAccount, StageTimes
from kvferry.wire.first_token import FirstToken
from kvferry.wire.params import HandoffParams

__all__ = ["GroupBlocks", "Request", "State"]


class State(Enum):
    """See scheduler.py for who moves a request from one to the next."""

    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class GroupBlocks:
    """One request's blocks in one cache group: block `first + i` of its tokens is `ids[i]`."""

    first: int = 0
    """WINDOW: the blocks before it are not there (any more)."""
    ids: list[int] = field(default_factory=list)
    state: bool = False
    """One block, which holds the state after all tokens that are computed; and, of a request with drafts, a second one:
    the state before its last step, which is what there is if a draft falls."""
    first_complete_block: int = 0
    """Blocks before this one may lack tokens that no window at the end of a hand-off needs: not for other requests."""

    @property
    def end(self) -> int:
        """The first block that is not there yet."""
        return self.first + len(self.ids)


class Request:
    """Satisfies connector.base.RequestView."""

    def __init__(self, spec: GenerateRequest, answer: Answer, *, number: int, arrived_s: float) -> None:
        self.spec = spec
        self.answer = answer
        self.number = number
        """Order of arrival."""
        self.arrived_s = arrived_s
        self.state = State.WAITING
        self.tokens = list(spec.prompt_token_ids)
        """Prompt and answer."""
        self.num_computed = 0
        """Tokens whose KV is in our blocks, from the first."""
        self.blocks: list[GroupBlocks] = []
        """One a cache group; none while the request has no blocks."""
        self.block_tokens = 0
        self.state_tokens = 0
        """The states in our blocks are the ones after so many tokens; -1: they are not known."""
        self.hashes: list[BlockHash] = []
        self.num_remembered = 0
        """Blocks whose content was given to the prefix cache, from the first."""
        self.answer_snapshot: BlockHash | None = None
        """Up to where a snapshot of the states was taken while the answer grew."""
        self.num_deferred = 0
        """Prefill: so many tokens at the end of the prompt are decode's to compute. Set once (R33)."""
        self.remote_stop = 0
        """Decode: the other engine brings the tokens before this one."""
        self.in_flight = False
        """A step that computes it is on its way: it is not planned, and not preempted."""
        self.drafts: tuple[int, ...] = ()
        """What the tokens behind the known ones may be; verified by the next step."""
        self.draft_cache_start = 0
        """Decode: the drafter's cache begins at this token, for prefill has no drafter. 0: it is whole."""
        self.num_preemptions = 0
        self.handoff_over = False
        """Decode: the other engine's KV has landed, failed, or will not come: not to be asked for again."""
        self.handoff_open = False
        """The connector may still work on our blocks: no preemption."""
        self.first_token: FirstToken | None = None
        """Decode: what prefill chose after the prompt; checked."""
        self.chosen: TokenLogprobs | None = None
        """Of the last token chosen."""
        self.num_cached = 0
        self.num_handed_over = 0
        self.reason = ""
        self.timing: HandoffTiming | None = None
        self.stages = StageTimes(arrived_s)
        self.accounted = False

    @property
    def request_id(self) -> RequestId:
        """Unique in the engine."""
        return self.spec.request_id

    @property
    def sampling(self) -> SamplingParams:
        """As the client asked."""
        return self.spec.sampling

    @property
    def handoff(self) -> HandoffParams | None:
        """kv_transfer_params; None for an ordinary request."""
        return self.spec.handoff

    @property
    def on_failure(self) -> FailurePolicy | None:
        """The client's own policy for a hand-off that fails."""
        return self.spec.on_failure

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def num_target_tokens(self) -> int:
        """Tokens to compute before the next one can be chosen, or before another engine goes on."""
        return len(self.tokens) - self.num_deferred

    @property
    def num_uncomputed(self) -> int:
        """Those that are still to be computed; 1 while decoding."""
        return self.num_target_tokens - self.num_computed

    @property
    def block_ids(self) -> list[int]:
        """All its blocks, group by group."""
        return [block for held in self.blocks for block in held.ids]

    @property
    def from_remote(self) -> bool:
        """Decode: another engine computed the prompt."""
        return self.handoff is not None and self.handoff.do_remote_prefill

    @property
    def for_remote(self) -> bool:
        """Prefill: another engine will decode."""
        return self.handoff is not None and self.handoff.do_remote_decode

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """A copy of the block tables, one a cache group; states as they are now."""
        return self.tables_at(self.num_computed)

    def tables_at(self, num_tokens: int) -> tuple[BlockTable, ...]:
        """The same; states are, or will be, those after `num_tokens`."""
        return tuple(
            BlockTable(
                group,
                num_tokens if held.state else held.first * self.block_tokens,
                tuple(held.ids[:1] if held.state else held.ids),
            )
            for group, held in enumerate(self.blocks)
        )

    def computed(self, stop: int) -> None:
        """The tokens before `stop` are computed here, and the states are those after them."""
        self.num_computed = self.state_tokens = stop

    @property
    def account(self) -> PromptAccount:
        """Where the KV of each prompt token came from."""
        return PromptAccount(
            handed_over=self.num_handed_over,
            cached=self.num_cached,
            recomputed=self.num_prompt_tokens - self.num_handed_over - self.num_cached,
            reason=self.reason,
        )
