"""One request inside the engine: its tokens, its blocks, how far it is, and where its prompt's KV came from."""

from enum import Enum

from kvferry.engines.mini.answer import Answer
from kvferry.engines.mini.api import GenerateRequest, SamplingParams, TokenLogprobs
from kvferry.engines.mini.blocks import BlockHash
from kvferry.ids import RequestId
from kvferry.layout.blocks import BlockTable
from kvferry.settings import FailurePolicy
from kvferry.stats import HandoffTiming, PromptAccount, StageTimes
from kvferry.wire.first_token import FirstToken
from kvferry.wire.params import HandoffParams

__all__ = ["Request", "State"]


class State(Enum):
    """See scheduler.py for who moves a request from one to the next."""

    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    RUNNING = "running"
    FINISHED = "finished"


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
        self.block_ids: list[int] = []
        self.hashes: list[BlockHash] = []
        self.num_remembered = 0
        """Blocks whose content was given to the prefix cache."""
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
        self.why = ""
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
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be chosen; 1 while decoding."""
        return len(self.tokens) - self.num_computed

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
        """A copy of the block table, from position 0: one cache group."""
        return (BlockTable(group=0, first_token=0, block_ids=tuple(self.block_ids)),)

    @property
    def account(self) -> PromptAccount:
        """Where the KV of each prompt token came from."""
        return PromptAccount(
            handed_over=self.num_handed_over,
            cached=self.num_cached,
            recomputed=self.num_prompt_tokens - self.num_handed_over - self.num_cached,
            why=self.why,
        )
