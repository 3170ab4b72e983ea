"""The engine's side of speculation: what is asked of drafters after each step, and how many drafts stood.

One step of a request that decodes: its last known token and its drafts are computed together with everybody else's;
`verify` says which stand; `note` keeps what the drafter must be told; once the tokens are appended, `draft` has the
next drafts made. On the engine's thread.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.connector.lookahead import prefill_backoff
from kvferry.engines.mini.compute.sampling import GREEDY_BELOW
from kvferry.engines.mini.ranks.executor import Executor
from kvferry.engines.mini.scheduling.batch import ScheduledChunk
from kvferry.engines.mini.scheduling.request import Request, State
from kvferry.engines.mini.speculation.acceptance import Acceptance, AcceptanceCounter
from kvferry.engines.mini.speculation.draft_records import DraftChunk, DraftInput, DraftSampling
from kvferry.engines.mini.speculation.drafter_info import DrafterInfo
from kvferry.engines.mini.speculation.ngram import NgramDrafter, TextDrafter
from kvferry.engines.mini.speculation.suffix import SuffixDrafter
from kvferry.ids import RequestId
from kvferry.layout.blocks import BlockTable

__all__ = ["ComputedChunk", "Speculation"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """A request as it stands behind a step, before it may have ended."""

    request: Request
    first: int
    """Where the step began for it."""
    num_computed: int
    tables: tuple[BlockTable, ...]


class Speculation:
    """Of one engine, for as long as its ranks live."""

    def __init__(
        self, card: DrafterInfo, executor: Executor, *, max_model_len: int, seed_of: Callable[[Request], int]
    ) -> None:
        """`seed_of`: what a request's choices by chance come from."""
        self.card = card
        self._seed_of = seed_of
        self._draft_probs: dict[RequestId, torch.Tensor] = {}
        """From which the drafts of a request were drawn, if they were."""
        self._executor = executor
        self._max_model_len = max_model_len
        self._counter = AcceptanceCounter()
        self._keys: dict[RequestId, str] = {}
        self._forgotten: list[str] = []
        if card.starts_cold:
            logger.warning(
                "drafter starts cold method=%s: behind a prompt that was handed over it has nothing to read at first, "
                "and fewer drafts are accepted",
                card.speculative.settings.method,
            )
        if card.speculative.settings.unsafe_without_backoff:
            logger.warning(
                "UNSAFE: speculation.unsafe_without_backoff is on: prefill hands over the whole prompt with unverified "
                "drafts in the drafter's cache, and decode's drafter reads tokens %d places off; answers stay right, "
                "and nearly all drafts are rejected. For `python -m benchmarks.spec` alone: take it away to serve",
                prefill_backoff(mamba=False, lookahead=card.speculative.num_prefill_lookahead_tokens),
            )
        self._text = None if card.config is not None else _text_drafter(card)

    @property
    def acceptance(self) -> Acceptance:
        """Since the start."""
        return self._counter.read()

    def key(self, request: Request) -> str:
        """Under which a drafter keeps what it knows of a request; another one after each new start."""
        key = f"{request.request_id}#{request.num_preemptions}"
        old = self._keys.get(request.request_id)
        if old is not None and old != key:
            self._forgotten.append(old)
        self._keys[request.request_id] = key
        return key

    def take_forgotten(self) -> tuple[str, ...]:
        """Keys for StepInput.forget."""
        now, self._forgotten = self._forgotten, []
        return tuple(now)

    def ended(self, request: Request) -> None:
        """Every request, once."""
        self._draft_probs.pop(request.request_id, None)
        key = self._keys.pop(request.request_id, None)
        if key is not None:
            self._forgotten.append(key)
        if self._text is not None:
            self._text.forget(request.request_id, request.tokens[request.num_prompt_tokens :])

    def draft_probs(self, chunks: Sequence[ScheduledChunk]) -> list[torch.Tensor | None]:
        """For `verify`: from which the drafts of these shares were drawn; None for likeliest tokens."""
        found = [self._draft_probs.get(chunk.request.request_id) if chunk.drafts else None for chunk in chunks]
        return [None if each is None else each[: len(chunk.drafts)] for each, chunk in zip(found, chunks, strict=True)]

    def count(self, chunk: ScheduledChunk, num_chosen: int) -> None:
        """A share's drafts were verified: that many tokens came out of it."""
        self._counter.count(len(chunk.drafts), num_chosen - 1)
        chunk.request.drafts = ()

    def note(self, chunks: Sequence[ScheduledChunk], computed: Sequence[int]) -> list[ComputedChunk]:
        """`computed`: tokens of each request whose KV is that of known tokens."""
        if self._text is not None:
            return [ComputedChunk(chunk.request, 0, count, ()) for chunk, count in zip(chunks, computed, strict=True)]
        pairs = zip(chunks, computed, strict=True)
        return [ComputedChunk(chunk.request, chunk.start, count, chunk.request.tables) for chunk, count in pairs]

    def draft(self, notes: Sequence[ComputedChunk]) -> None:
        """The tokens of the step are appended, and some requests have ended: make the next drafts."""
        if self._text is not None:
            for note in notes:
                request = note.request
                if count := self._num_drafts(note):
                    request.drafts = tuple(self._text.propose(request.request_id, request.tokens, count))
            return
        wanted = [note for note in notes if note.request.for_remote or note.request.state is State.RUNNING]
        if wanted:
            output = self._executor.draft(DraftInput(tuple(map(self._draft_chunk, wanted))))
            draft_probs = output.draft_probs or (None,) * len(wanted)
            for note, drafts, each in zip(wanted, output.drafts, draft_probs, strict=True):
                if note.request.state is not State.RUNNING:
                    continue
                note.request.drafts = drafts
                if each is not None:
                    self._draft_probs[note.request.request_id] = each

    def adopted(self, request: Request) -> None:
        """Prefill's first token was taken over, and nothing was computed: whoever drafts from the text can do so now;
        others have no hidden state yet."""
        if self._text is not None:
            self.draft([ComputedChunk(request, 0, request.num_computed, ())])

    def _num_drafts(self, note: ComputedChunk) -> int:
        """No more than can be of use: the last token of an answer is never computed."""
        request = note.request
        if request.state is not State.RUNNING or request.for_remote or note.num_computed != len(request.tokens) - 1:
            return 0
        left = request.num_prompt_tokens + request.sampling.max_tokens - len(request.tokens)
        return max(0, min(self.card.speculative.num_tokens, left - 1, self._max_model_len - len(request.tokens)))

    def _draft_chunk(self, note: ComputedChunk) -> DraftChunk:
        request, speculative = note.request, self.card.speculative
        cold = request.draft_cache_start > 0
        model = speculative.settings.method == "draft_model"
        first = 0 if cold and model else max(0, note.first - speculative.num_modules)
        # As many tokens as any module can read behind what is computed; of a long prompt that is not all.
        stop = max(note.num_computed, note.first) + 1 + speculative.num_modules
        num_drafts = self._num_drafts(note)
        return DraftChunk(
            key=self._keys.get(request.request_id) or f"{request.request_id}#{request.num_preemptions}",
            first=first,
            tokens=tuple(request.tokens[first : len(request.tokens) if num_drafts else stop]),
            num_computed=note.num_computed,
            tables=note.tables,
            num_drafts=num_drafts,
            base=0 if model else request.draft_cache_start,
            cold=cold and model,
            draft_sampling=self._draft_sampling(request) if num_drafts else None,
        )

    def _draft_sampling(self, request: Request) -> DraftSampling | None:
        probabilistic = self.card.speculative.settings.draft_sample_method == "probabilistic"
        if not probabilistic or request.sampling.temperature < GREEDY_BELOW:
            return None
        return DraftSampling(request.sampling, self._seed_of(request), len(request.tokens) - request.num_prompt_tokens)


def _text_drafter(card: DrafterInfo) -> TextDrafter:
    settings = card.speculative.settings
    if settings.method == "ngram":
        return NgramDrafter(shortest=settings.prompt_lookup_min, longest=settings.prompt_lookup_max)
    return SuffixDrafter(
        depth=settings.suffix_decoding_max_tree_depth,
        max_cached_tokens=settings.suffix_decoding_max_cached_tokens,
        max_factor=settings.suffix_decoding_max_spec_factor,
        min_share=settings.suffix_decoding_min_token_prob,
    )
