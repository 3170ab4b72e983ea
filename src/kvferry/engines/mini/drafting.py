"""The engine's side of speculation: it asks the drafter for drafts after each step, and counts accepted ones.

In one step of a decoding request, its last known token and its drafts are computed in the batch of all requests;
`rejection.verify` decides which drafts are accepted; `record` keeps what the drafter will need; after the tokens have
been appended, `draft` gets the next drafts. Everything runs on the engine's thread.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.connector.lookahead import prefill_backoff
from kvferry.engines.mini.compute.sampling import GREEDY_BELOW
from kvferry.engines.mini.ranks.executor import Executor
from kvferry.engines.mini.scheduling.batch import ScheduledChunk, StepPlan
from kvferry.engines.mini.scheduling.request import Request, State
from kvferry.engines.mini.speculation.acceptance import Acceptance, AcceptanceCounter
from kvferry.engines.mini.speculation.draft_records import DraftChunk, DraftInput, DraftSampling
from kvferry.engines.mini.speculation.drafter_info import DrafterInfo
from kvferry.engines.mini.speculation.ngram import NgramDrafter, TextDrafter
from kvferry.engines.mini.speculation.suffix import SuffixDrafter
from kvferry.engines.mini.step import ChunkInput, StepInput
from kvferry.ids import RequestId
from kvferry.layout.blocks import BlockTable

__all__ = ["ComputedChunk", "Speculation", "step_input"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """A request after a step has computed a chunk of it, recorded before the request may end."""

    request: Request
    first: int
    """The first position of the chunk."""
    num_computed: int
    tables: tuple[BlockTable, ...]


class Speculation:
    """Speculation in one engine, for as long as its ranks live."""

    def __init__(
        self, drafter: DrafterInfo, executor: Executor, *, max_model_len: int, seed_of: Callable[[Request], int]
    ) -> None:
        """`seed_of` returns the seed of a request's random choices."""
        self.drafter = drafter
        self._seed_of = seed_of
        self._draft_probs: dict[RequestId, torch.Tensor] = {}
        """Per request, the distributions from which its drafts were sampled."""
        self._executor = executor
        self._max_model_len = max_model_len
        self._counter = AcceptanceCounter()
        self._keys: dict[RequestId, str] = {}
        self._forgotten: list[str] = []
        if drafter.starts_cold:
            logger.warning(
                "drafter starts cold method=%s: after a prompt that was handed over its cache is empty, and fewer "
                "drafts are accepted",
                drafter.speculative.settings.method,
            )
        if drafter.speculative.settings.unsafe_without_backoff:
            logger.warning(
                "UNSAFE: speculation.unsafe_without_backoff is on: prefill hands over the whole prompt with unverified "
                "drafts in the drafter's cache, and decode's drafter reads tokens %d places off. Answers stay right, "
                "and nearly all drafts are rejected. It is only for `python -m benchmarks.spec`: remove it to serve",
                prefill_backoff(mamba=False, lookahead=drafter.speculative.num_prefill_lookahead_tokens),
            )
        self._undrafted: set[RequestId] = set()
        """Requests for which the text drafter has raised: they go on without drafts."""
        self._text = None if drafter.config is not None else _text_drafter(drafter)

    @property
    def acceptance(self) -> Acceptance:
        """The counts since the engine started."""
        return self._counter.read()

    def key(self, request: Request) -> str:
        """Returns the key under which a drafter keeps a request's state; it changes when the request starts again."""
        key = f"{request.request_id}#{request.num_preemptions}"
        old = self._keys.get(request.request_id)
        if old is not None and old != key:
            self._forgotten.append(old)
        self._keys[request.request_id] = key
        return key

    def take_forgotten(self) -> tuple[str, ...]:
        """Returns the keys of requests that drafters can forget, once."""
        now, self._forgotten = self._forgotten, []
        return tuple(now)

    def ended(self, request: Request) -> None:
        """Forgets a request. Called once per request."""
        self._draft_probs.pop(request.request_id, None)
        key = self._keys.pop(request.request_id, None)
        if key is not None:
            self._forgotten.append(key)
        self._undrafted.discard(request.request_id)
        if self._text is not None:
            try:
                self._text.forget(request.request_id, request.tokens[request.num_prompt_tokens :])
            except Exception:
                logger.exception("the drafter cannot take an answer request=%s", request.request_id)

    def draft_probs(self, chunks: Sequence[ScheduledChunk]) -> list[torch.Tensor | None]:
        """Returns the distributions from which each chunk's drafts were sampled; None for the drafter's likeliest
        tokens."""
        found = [self._draft_probs.get(chunk.request.request_id) if chunk.drafts else None for chunk in chunks]
        return [None if each is None else each[: len(chunk.drafts)] for each, chunk in zip(found, chunks, strict=True)]

    def count(self, chunk: ScheduledChunk, num_chosen: int) -> None:
        """Counts a chunk's drafts after their verification, which gave `num_chosen` tokens."""
        self._counter.count(len(chunk.drafts), num_chosen - 1)
        chunk.request.drafts = ()

    def record(self, chunks: Sequence[ScheduledChunk], computed: Sequence[int]) -> list[ComputedChunk]:
        """Returns what `draft` needs after the step. `computed`: per request, how many known tokens have their KV."""
        if self._text is not None:
            return [ComputedChunk(chunk.request, 0, count, ()) for chunk, count in zip(chunks, computed, strict=True)]
        pairs = zip(chunks, computed, strict=True)
        return [ComputedChunk(chunk.request, chunk.start, count, chunk.request.tables) for chunk, count in pairs]

    def draft(self, chunks: Sequence[ComputedChunk]) -> None:
        """Gets the next drafts. Called after the step's tokens were appended and some requests have ended."""
        if self._text is not None:
            for chunk in chunks:
                self._draft_from_text(self._text, chunk)
            return
        wanted = [chunk for chunk in chunks if chunk.request.for_remote or chunk.request.state is State.RUNNING]
        if wanted:
            output = self._executor.draft(DraftInput(tuple(map(self._draft_chunk, wanted))))
            draft_probs = output.draft_probs or (None,) * len(wanted)
            for chunk, drafts, each in zip(wanted, output.drafts, draft_probs, strict=True):
                if chunk.request.state is not State.RUNNING:
                    continue
                chunk.request.drafts = drafts
                if each is not None:
                    self._draft_probs[chunk.request.request_id] = each

    def _draft_from_text(self, drafter: TextDrafter, chunk: ComputedChunk) -> None:
        request = chunk.request
        count = self._num_drafts(chunk)
        if not count or request.request_id in self._undrafted:
            return
        try:
            request.drafts = tuple(drafter.propose(request.request_id, request.tokens, count))
        except Exception:
            logger.exception("a request goes on without drafts request=%s", request.request_id)
            self._undrafted.add(request.request_id)

    def adopted(self, request: Request) -> None:
        """Drafts for a request that has taken over prefill's first token and computed nothing.

        Only drafters that know the text alone can do so; others have no hidden state yet.
        """
        if self._text is not None:
            self.draft([ComputedChunk(request, 0, request.num_computed, ())])

    def _num_drafts(self, chunk: ComputedChunk) -> int:
        """Returns how many drafts can be of use: the last token of an answer is never computed."""
        request = chunk.request
        if request.state is not State.RUNNING or request.for_remote or chunk.num_computed != len(request.tokens) - 1:
            return 0
        left = request.num_prompt_tokens + request.sampling.max_tokens - len(request.tokens)
        return max(0, min(self.drafter.speculative.num_tokens, left - 1, self._max_model_len - len(request.tokens)))

    def _draft_chunk(self, chunk: ComputedChunk) -> DraftChunk:
        request, speculative = chunk.request, self.drafter.speculative
        cold = request.draft_cache_start > 0
        model = speculative.settings.method == "draft_model"
        first = 0 if cold and model else max(0, chunk.first - speculative.num_modules)
        # As many tokens after the computed ones as any module can read: not all of a long prompt.
        stop = max(chunk.num_computed, chunk.first) + 1 + speculative.num_modules
        num_drafts = self._num_drafts(chunk)
        return DraftChunk(
            key=self._keys.get(request.request_id) or f"{request.request_id}#{request.num_preemptions}",
            first=first,
            tokens=tuple(request.tokens[first : len(request.tokens) if num_drafts else stop]),
            num_computed=chunk.num_computed,
            tables=chunk.tables,
            num_drafts=num_drafts,
            base=0 if model else request.draft_cache_start,
            cold=cold and model,
            draft_sampling=self._draft_sampling(request) if num_drafts else None,
        )

    def _draft_sampling(self, request: Request) -> DraftSampling | None:
        probabilistic = self.drafter.speculative.settings.draft_sample_method == "probabilistic"
        if not probabilistic or request.sampling.temperature < GREEDY_BELOW:
            return None
        return DraftSampling(request.sampling, self._seed_of(request), len(request.tokens) - request.num_prompt_tokens)


def step_input(plan: StepPlan, to_clear: Sequence[int], speculation: Speculation | None) -> StepInput:
    """Returns a plan as the ranks receive it."""
    chunks = tuple(
        ChunkInput(
            tuple(chunk.token_ids),
            chunk.start,
            chunk.stop,
            chunk.request.tables,
            chunk.num_logits,
            speculation.key(chunk.request) if speculation is not None else "",
        )
        for chunk in plan.chunks
    )
    forget = speculation.take_forgotten() if speculation is not None else ()
    return StepInput(chunks, clear=tuple(to_clear), copies=tuple(plan.changes.copies), forget=forget)


def _text_drafter(drafter: DrafterInfo) -> TextDrafter:
    settings = drafter.speculative.settings
    if settings.method == "ngram":
        return NgramDrafter(shortest=settings.prompt_lookup_min, longest=settings.prompt_lookup_max)
    return SuffixDrafter(
        depth=settings.suffix_decoding_max_tree_depth,
        max_cached_tokens=settings.suffix_decoding_max_cached_tokens,
        max_factor=settings.suffix_decoding_max_spec_factor,
        min_share=settings.suffix_decoding_min_token_prob,
    )
