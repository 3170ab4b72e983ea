"""Drafters that read the target's hidden states and keep KV: a chain of MTP modules, or an EAGLE head (a chain of one).

Slot p of module i (counted from 0) is computed from the output of module i - 1 at p (for i = 0: the target's hidden
state at p) and from token p + 1 + i; its output predicts token p + 2 + i. If the known tokens end at position m, a slot
is *final* if it has read known tokens only: p < m - i. One pass over the modules makes every slot final that can be,
from hidden states that have been waiting for their token; if drafts are wanted, it continues from there with the drafts
of earlier modules. Slots that it writes after the final ones are computed again when the tokens are known: this is the
repair of R35. So a request's state between steps is small: per module, the inputs of one or two slots that are not
final yet.

Drafts beyond the last module come from that module alone, which then reads its own output at the slot before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.engines.mini.models.families.base import Batch
from kvferry.engines.mini.speculation.draft_records import DraftChunk, DraftInput, DraftOutput
from kvferry.engines.mini.speculation.sampled_drafts import Drafts, draft_next
from kvferry.engines.mini.step import ChunkInput

__all__ = ["ChainDrafter", "Drafter", "MakeBatch", "Module"]


class MakeBatch(Protocol):
    """Makes a batch for a network from chunks."""

    def __call__(self, chunks: Sequence[ChunkInput], /) -> Batch:
        """Returns the batch. Chunks of one token must come first."""
        ...


class Drafter(Protocol):
    """A drafter on the last pipeline stage. Each tensor-parallel rank receives the same calls in the same order."""

    def absorb(self, chunks: Sequence[ChunkInput], hidden: torch.Tensor) -> None:
        """Takes the hidden states of chunks that the target has computed, some of which may be rejected drafts.

        `hidden`: one row per token, in the order of the chunks: hidden states before the last norm, or those of the
        auxiliary layers, as `lift` needs them.
        """
        ...

    def draft(self, order: DraftInput) -> DraftOutput:
        """Brings the cache up to date and returns drafts."""
        ...

    def forget(self, keys: Iterable[str]) -> None:
        """Forgets requests that have ended, or that start again under another key. Unknown keys are ignored."""
        ...


class Module(Protocol):
    """One module of the chain."""

    def lift(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what the first module reads, from the target's hidden states."""
        ...

    def run(self, tokens: torch.Tensor, before: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Stores keys and values, and returns the output for the next module: [rows, hidden]."""
        ...

    def choose(self, out: torch.Tensor) -> torch.Tensor:
        """Returns the likeliest token of each output: [rows]."""
        ...

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Returns logits over the target's vocabulary, -inf for tokens that this module cannot draft: [rows,
        vocab_size]."""
        ...


@dataclass(slots=True)
class _State:
    """The state of one request between steps."""

    final: list[int]
    """Per module: slots [0, final) are final."""
    waiting: list[torch.Tensor]
    """Per module: the inputs of slots from `final` on, as far as these inputs are final."""
    lost: int
    """How many places too early tokens are read: 0 unless ChainDrafter shows the fault."""


@dataclass(slots=True)
class _Job:
    """One request during one call of `draft`."""

    chunk: DraftChunk
    state: _State
    known: int
    """Position of the last known token."""
    num_drafts: int
    source: torch.Tensor
    """Inputs of the current module, from its first slot that is not final."""
    num_final_inputs: int
    """Slots before this position have final inputs."""
    made: Drafts
    last: torch.Tensor | None = None
    """The output that gave the last draft: [1, hidden]."""

    def token(self, position: int) -> int:
        """Returns the token at a position: a known one, or a draft."""
        position = max(self.chunk.first, position - self.state.lost)
        if position <= self.known:
            return self.chunk.tokens[position - self.chunk.first]
        return self.made.tokens[position - self.known - 1]


class ChainDrafter:
    """Implements Drafter for a chain of modules. Keeps the state of each request until it is forgotten."""

    def __init__(
        self,
        modules: Sequence[Module],
        make_batch: MakeBatch,
        *,
        device: torch.device,
        block_tokens: int,
        max_positions: int,
        lost: int = 0,
    ) -> None:
        """`lost`: UNSAFE, only to show the fault. A drafter that keeps its place in the text by counting drafts and
        rejections since the prefill reads tokens this many places too early if another engine did the prefill."""
        self._modules = modules
        self._make_batch = make_batch
        self._device = device
        self._block_tokens = block_tokens
        self._max_positions = max_positions
        self._lost = lost
        self._states: dict[str, _State] = {}

    @torch.inference_mode()
    def absorb(self, chunks: Sequence[ChunkInput], hidden: torch.Tensor) -> None:
        """Implements Drafter."""
        lifted = self._modules[0].lift(hidden)
        at = 0
        for chunk in chunks:
            rows = lifted[at : at + chunk.stop - chunk.start]
            at += len(rows)
            state = self._states.get(chunk.key)
            if state is None:
                count = len(self._modules)
                waiting = [rows.clone(), *[lifted[:0]] * (count - 1)]
                self._states[chunk.key] = _State([chunk.start] * count, waiting, self._lost if chunk.start else 0)
                continue
            held = chunk.start - state.final[0]
            assert held <= len(state.waiting[0]), "the chunks of a request must be consecutive"
            # A request with recurrent states computes accepted drafts again: final slots stay as they are.
            state.waiting[0] = torch.cat([state.waiting[0][: max(0, held)], rows[max(0, -held) :]])

    @torch.inference_mode()
    def draft(self, order: DraftInput) -> DraftOutput:
        """Implements Drafter."""
        jobs = [self._job(chunk) for chunk in order.chunks]
        for i in range(len(self._modules)):
            self._pass(i, jobs)
        depth = len(self._modules)
        while deeper := [job for job in jobs if job.num_drafts > depth and self._has_room(job, depth)]:
            self._go_deeper(deeper, depth)
            depth += 1
        results = [job.made.result(job.num_drafts) for job in jobs]
        return DraftOutput(tuple(tokens for tokens, _ in results), tuple(draft_probs for _, draft_probs in results))

    def forget(self, keys: Iterable[str]) -> None:
        """Implements Drafter."""
        for key in keys:
            self._states.pop(key, None)

    def _job(self, chunk: DraftChunk) -> _Job:
        state = self._states[chunk.key]
        _skip_to(state, chunk.base)
        known = chunk.first + len(chunk.tokens) - 1
        state.waiting[0] = state.waiting[0][: max(0, chunk.num_computed - state.final[0])]
        num_drafts = min(chunk.num_drafts, self._max_positions - 1 - known)
        if chunk.num_computed != known or not len(state.waiting[0]):
            num_drafts = 0  # nothing can be drafted in the middle of a prompt, nor without a new hidden state
        made = Drafts(chunk.draft_sampling)
        return _Job(chunk, state, known, max(0, num_drafts), state.waiting[0], chunk.num_computed, made)

    def _pass(self, i: int, jobs: Sequence[_Job]) -> None:
        """Runs module i: makes final what can be, and drafts from the last slot."""
        counts, finals = [], []
        for job in jobs:
            begin = job.state.final[i]
            final = max(begin, min(job.num_final_inputs, job.known - i))
            drafts = job.num_drafts > i
            finals.append(final)
            counts.append(len(job.source) if drafts else final - begin)
        outs = self._run(i, jobs, [job.state.final[i] for job in jobs], counts)
        drafting = [n for n, job in enumerate(jobs) if job.num_drafts > i and counts[n]]
        if drafting:
            self._draft_next(i, [jobs[n] for n in drafting], torch.cat([outs[n][-1:] for n in drafting]))
        for job, final, out in zip(jobs, finals, outs, strict=True):
            state, begin = job.state, job.state.final[i]
            state.waiting[i] = job.source[final - begin : max(0, job.num_final_inputs - begin)].clone()
            state.final[i] = final
            if i + 1 < len(self._modules):
                job.source = torch.cat([state.waiting[i + 1], out])
                job.num_final_inputs = final

    def _go_deeper(self, jobs: Sequence[_Job], depth: int) -> None:
        """Makes one more draft per request, from the last module's own output."""
        i = len(self._modules) - 1
        for job in jobs:
            assert job.last is not None, "a request that drafts deeper has drafted"
            job.source = job.last
        begins = [job.known + depth - len(self._modules) for job in jobs]
        outs = self._run(i, jobs, begins, [1] * len(jobs))
        self._draft_next(i, jobs, torch.cat(outs))

    def _draft_next(self, i: int, jobs: Sequence[_Job], last: torch.Tensor) -> None:
        """Adds the next draft of each request. `last`: the output of module i for each: [jobs, hidden]."""
        if any(job.made.draft_sampling is not None for job in jobs):
            draft_next(self._modules[i].logits(last), [job.made for job in jobs])
        else:
            for job, token in zip(jobs, self._modules[i].choose(last).tolist(), strict=True):
                job.made.tokens.append(token)
        for row, job in enumerate(jobs):
            job.last = last[row : row + 1]

    def _has_room(self, job: _Job, depth: int) -> bool:
        """Returns whether the request has a block for the slot that the next draft writes to."""
        slot = job.known + depth - len(self._modules)
        return slot < min(table.first_token + len(table.block_ids) * self._block_tokens for table in job.chunk.tables)

    def _run(self, i: int, jobs: Sequence[_Job], begins: Sequence[int], counts: Sequence[int]) -> list[torch.Tensor]:
        """Returns the outputs of module i for slots [begin, begin + count) of each request, computed as one batch."""
        order = sorted((n for n, count in enumerate(counts) if count), key=lambda n: counts[n] > 1)
        outs = [job.source[:0] for job in jobs]
        if not order:
            return outs
        chunks: list[ChunkInput] = []
        tokens: list[int] = []
        for n in order:
            job, begin, end = jobs[n], begins[n], begins[n] + counts[n]
            ids = tuple(job.token(slot + 1 + i) for slot in range(begin, end))
            tokens += ids
            tables, base = job.chunk.tables, job.chunk.base
            chunks.append(ChunkInput(token_ids=ids, start=begin, stop=end, tables=tables, num_logits=0, base=base))
        before = torch.cat([jobs[n].source[: counts[n]] for n in order])
        out = self._modules[i].run(torch.tensor(tokens, device=self._device), before, self._make_batch(chunks))
        for n, rows in zip(order, torch.split(out, [counts[n] for n in order]), strict=True):
            outs[n] = rows
        return outs


def _skip_to(state: _State, base: int) -> None:
    """Drops slots before `base`, which do not exist for a drafter that starts cold."""
    for i, final in enumerate(state.final):
        if final < base:
            state.waiting[i] = state.waiting[i][base - final :]
            state.final[i] = base
