"""One request inside the engine: its tokens, blocks and progress, and where its prompt's KV came from."""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from kvferry.engines.mini.api import GenerateRequest, SamplingParams, TokenLogprobs
from kvferry.engines.mini.scheduling.block_manager import BlockHash
from kvferry.engines.mini.scheduling.output import Answer
from kvferry.engines.mini.scheduling.prompt_sources import PromptSources
from kvferry.ids import RequestId
from kvferry.layout.blocks import BlockTable
from kvferry.settings import FailurePolicy
from kvferry.stats import HandoffTiming, PromptAccount, StageTimes
from kvferry.wire.first_token import FirstToken
from kvferry.wire.params import HandoffParams
from kvferry.wire.prompt_digest import Prompt

__all__ = ["GroupBlocks", "Request", "State"]


class State(Enum):
    """The states of a request; scheduler.py says what moves a request from one to the next."""

    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class GroupBlocks:
    """A request's blocks in one cache group: its tokens' block number `first + i` is `ids[i]`."""

    first: int = 0
    """WINDOW: the request does not have the blocks before this one (any more)."""
    ids: list[int] = field(default_factory=list)
    state: bool = False
    """STATE: `ids` is one block, with the state after all computed tokens; and for a request with drafts a second one,
    with the state before its last step, to go back to if a draft is rejected."""
    first_complete_block: int = 0
    """Blocks before this index are incomplete (outside the window that was handed over) and must not enter the prefix
    cache."""

    @property
    def end(self) -> int:
        """The number of the first block that is still to be allocated."""
        return self.first + len(self.ids)


class Request:
    """The engine's record of a request. It satisfies connector.base.RequestView."""

    def __init__(self, spec: GenerateRequest, answer: Answer, *, number: int, arrived_s: float) -> None:
        self.spec = spec
        self.answer = answer
        self.number = number
        """Order of arrival."""
        self.arrived_s = arrived_s
        self.state = State.WAITING
        self.tokens = list(spec.prompt_token_ids)
        """Tokens of the prompt and of the answer so far."""
        self.num_computed = 0
        """The KV of this many tokens, from the first on, is in the request's blocks."""
        self.blocks: list[GroupBlocks] = []
        """One per cache group; empty while the request has no blocks."""
        self.block_tokens = 0
        self.state_tokens = 0
        """The recurrent states in the request's blocks are those after this many tokens; -1: unknown."""
        self.hashes: list[BlockHash] = []
        self.num_remembered = 0
        """This many blocks, from the first on, have entered the prefix cache."""
        self.answer_snapshot: BlockHash | None = None
        """The last block hash at which the states were snapshotted while the answer grew."""
        self.num_deferred = 0
        """Prefill: this many tokens at the end of the prompt are left for decode to compute. Set once (R33)."""
        self.remote_stop = 0
        """Decode: prefill hands over the tokens before this position."""
        self.in_flight = False
        """A submitted step computes this request, so it is neither scheduled nor preempted."""
        self.drafts: tuple[int, ...] = ()
        """Guesses for the tokens after the known ones; the next step verifies them."""
        self.draft_cache_start = 0
        """Decode: the drafter's cache begins at this token, because prefill has no drafter. 0: it is complete."""
        self.num_preemptions = 0
        self.suspect_until = 0
        """A step that computed this request has failed. It runs alone until this many tokens are computed; 0: no."""
        self.handoff_over = False
        """Decode: prefill's KV has landed, failed, or will not come; it is not requested again."""
        self.handoff_open = False
        """A peer may still read or write the request's blocks, so it is not preempted."""
        self.first_token: FirstToken | None = None
        """Decode: the token that prefill chose after the prompt, checked."""
        self.chosen: TokenLogprobs | None = None
        """The log probabilities of the last token chosen."""
        self.sources = PromptSources(len(spec.prompt_token_ids))
        """Where the KV of its prompt came from."""
        self.reason = ""
        self.timing: HandoffTiming | None = None
        self.stages = StageTimes(arrived_s)
        self.accounted = False

    @property
    def request_id(self) -> RequestId:
        """The id, unique in the engine."""
        return self.spec.request_id

    @property
    def sampling(self) -> SamplingParams:
        """The client's sampling parameters."""
        return self.spec.sampling

    @property
    def handoff(self) -> HandoffParams | None:
        """The request's kv_transfer_params; None for an ordinary request."""
        return self.spec.handoff

    @property
    def on_failure(self) -> FailurePolicy | None:
        """The client's policy for a hand-off that fails; None: the worker's."""
        return self.spec.on_failure

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def salt(self) -> str:
        """What the KV depends on besides the tokens (wire.salt)."""
        return self.spec.salt

    @property
    def prompt_hashes(self) -> tuple[BlockHash, ...]:
        """The hashes of the prompt's whole blocks, as far as they are known."""
        return tuple(self.hashes[: self.num_prompt_tokens // self.block_tokens]) if self.block_tokens else ()

    @cached_property
    def prompt(self) -> Prompt:
        """The prompt, packed once: for the hashes of its blocks, and for what a hand-off is bound to."""
        return Prompt.of(self.spec.prompt_token_ids, self.spec.salt, self.spec.packed)

    @property
    def num_target_tokens(self) -> int:
        """The number of tokens to compute before the next one can be chosen, or before decode takes over."""
        return len(self.tokens) - self.num_deferred

    @property
    def num_uncomputed(self) -> int:
        """How many of the target tokens are still to be computed; 1 while decoding."""
        return self.num_target_tokens - self.num_computed

    @property
    def block_ids(self) -> list[int]:
        """The ids of all blocks of the request, group by group."""
        return [block for held in self.blocks for block in held.ids]

    @property
    def from_remote(self) -> bool:
        """Whether another engine computed the prompt (this engine is decode)."""
        return self.handoff is not None and self.handoff.do_remote_prefill

    @property
    def takes_kv(self) -> bool:
        """Whether KV of the prompt may come from another engine: by a hand-off, or fetched from one that holds it."""
        return self.from_remote or (self.handoff is not None and bool(self.handoff.sources))

    @property
    def for_remote(self) -> bool:
        """Whether another engine will decode (this engine is prefill)."""
        return self.handoff is not None and self.handoff.do_remote_decode

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """A copy of the block tables, one per cache group; states are those after the computed tokens."""
        return self.tables_at(self.num_computed)

    def tables_at(self, num_tokens: int) -> tuple[BlockTable, ...]:
        """Returns the same, with states that are, or will be, those after `num_tokens`."""
        return tuple(
            BlockTable(
                group,
                num_tokens if held.state else held.first * self.block_tokens,
                tuple(held.ids[:1] if held.state else held.ids),
            )
            for group, held in enumerate(self.blocks)
        )

    def computed(self, stop: int) -> None:
        """Records that the tokens before `stop` are computed and the states are those after them."""
        self.num_computed = self.state_tokens = stop

    @property
    def suspect(self) -> bool:
        """Whether the request runs alone, because it may be the cause of a step that failed."""
        return self.num_computed < self.suspect_until

    def handed_over_token(self) -> FirstToken | None:
        """Returns the first token of the answer for decode; None if decode computes the prompt's end itself."""
        if self.num_deferred:
            return None
        chosen = self.chosen
        return FirstToken(
            token=self.tokens[self.num_prompt_tokens],
            logprob=chosen.logprob if chosen else None,
            top=chosen.top if chosen else (),
        )

    def start_over(self) -> None:
        """Records that nothing is computed and no block is held: its blocks, or the ranks that had them, are gone."""
        self.blocks, self.drafts, self.draft_cache_start = [], (), 0
        self.num_computed = self.num_remembered = self.state_tokens = 0
        self.in_flight = self.handoff_open = False

    @property
    def account(self) -> PromptAccount:
        """Where the KV of each prompt token came from."""
        return self.sources.account(self.reason)
