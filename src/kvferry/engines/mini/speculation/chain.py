"""Drafters that read the target's hidden states and keep KV: a chain of MTP modules, or an EAGLE head (a chain of one).

Slot p of module i (the first is 0) is computed from the output of module i - 1 at p (for i = 0: the target's hidden
state at p) and from token p + 1 + i; its output names token p + 2 + i. With known tokens up to m a slot is *final* if
it read known tokens only: p < m - i. One pass over the modules makes all slots final that can be, from hidden states
that wait for their token, and, where drafts are wanted, goes on from there with the drafts of the modules before. What
it writes behind the final slots is computed again when the tokens are known: this is the repair of R35. A request's
state between steps is therefore small: of each module the inputs of the slots that are not final yet, one or two.

Drafts beyond the last module come from that module alone, fed with its own output at the slot before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.engines.mini.models.families.base import Batch
from kvferry.engines.mini.speculation.draft_records import DraftChunk, DraftInput, DraftOutput
from kvferry.engines.mini.speculation.sampled_drafts import Drafts, name_next
from kvferry.engines.mini.step import ChunkInput

__all__ = ["ChainDrafter", "Drafter", "MakeBatch", "Module"]


class MakeBatch(Protocol):
    """How the runner's batches are made."""

    def __call__(self, chunks: Sequence[ChunkInput], /) -> Batch:
        """Of shares of which those of one token come first."""
        ...


class Drafter(Protocol):
    """A drafter of the last pipeline stage. Every tensor-parallel rank of it makes the same calls in the same order."""

    def absorb(self, chunks: Sequence[ChunkInput], hidden: torch.Tensor) -> None:
        """The target has computed these shares: rows of `hidden`, in their order; not all of them may stand.
        `hidden`: what `lift` wants: hidden states before the last norm, or those of the auxiliary layers."""
        ...

    def draft(self, order: DraftInput) -> DraftOutput:
        """See records.py."""
        ...

    def forget(self, keys: Iterable[str]) -> None:
        """Requests that have ended, or start again under another key. Unknown ones are no error."""
        ...


class Module(Protocol):
    """One link of the chain."""

    def lift(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the first module reads, of what the target gave."""
        ...

    def run(self, tokens: torch.Tensor, before: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[rows, hidden], for the next module; stores keys and values."""
        ...

    def choose(self, out: torch.Tensor) -> torch.Tensor:
        """[rows] of the likeliest tokens."""
        ...

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size] of the target's vocabulary; -inf for what this module cannot name."""
        ...


@dataclass(slots=True)
class _State:
    """One request between steps."""

    final: list[int]
    """Of each module: slots [0, final) are final."""
    waiting: list[torch.Tensor]
    """Of each module: inputs of slots from `final` on, themselves final."""
    lost: int
    """See ChainDrafter: 0 in every engine that is to be used."""


@dataclass(slots=True)
class _Job:
    """One request in one call."""

    chunk: DraftChunk
    state: _State
    known: int
    """Position of the last known token."""
    num_drafts: int
    source: torch.Tensor
    """Inputs of the module whose turn it is, from its first slot that is not final."""
    sound: int
    """Of these, slots before `sound` have final inputs."""
    made: Drafts
    last: torch.Tensor | None = None
    """[1, hidden] The output that named the last draft."""

    def token(self, position: int) -> int:
        """A known token, or a draft."""
        position = max(self.chunk.first, position - self.state.lost)
        if position <= self.known:
            return self.chunk.tokens[position - self.chunk.first]
        return self.made.tokens[position - self.known - 1]


class ChainDrafter:
    """See Drafter. Holds the state of each request until it is forgotten."""

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
        """`lost`: UNSAFE, only to show what happens then. A drafter that keeps its place in the text by counting drafts
        and rejections from the prefill on is so many tokens too early where the prefill was somewhere else."""
        self._modules = modules
        self._make_batch = make_batch
        self._device = device
        self._block_tokens = block_tokens
        self._max_positions = max_positions
        self._lost = lost
        self._states: dict[str, _State] = {}

    @torch.inference_mode()
    def absorb(self, chunks: Sequence[ChunkInput], hidden: torch.Tensor) -> None:
        """See Drafter."""
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
            assert held <= len(state.waiting[0]), "a request's shares follow one another"
            # A request with states computes tokens again whose drafts fell: what is final stays.
            state.waiting[0] = torch.cat([state.waiting[0][: max(0, held)], rows[max(0, -held) :]])

    @torch.inference_mode()
    def draft(self, order: DraftInput) -> DraftOutput:
        """See Drafter."""
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
        """See Drafter."""
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
        """Module i: what can be final now, and what drafts go on from."""
        counts, finals = [], []
        for job in jobs:
            begin = job.state.final[i]
            final = max(begin, min(job.sound, job.known - i))
            drafts = job.num_drafts > i
            finals.append(final)
            counts.append(len(job.source) if drafts else final - begin)
        outs = self._run(i, jobs, [job.state.final[i] for job in jobs], counts)
        drafting = [n for n, job in enumerate(jobs) if job.num_drafts > i and counts[n]]
        if drafting:
            self._name(i, [jobs[n] for n in drafting], torch.cat([outs[n][-1:] for n in drafting]))
        for job, final, out in zip(jobs, finals, outs, strict=True):
            state, begin = job.state, job.state.final[i]
            state.waiting[i] = job.source[final - begin : max(0, job.sound - begin)].clone()
            state.final[i] = final
            if i + 1 < len(self._modules):
                job.source = torch.cat([state.waiting[i + 1], out])
                job.sound = final

    def _go_deeper(self, jobs: Sequence[_Job], depth: int) -> None:
        """One more draft of each, from the last module's own output."""
        i = len(self._modules) - 1
        for job in jobs:
            assert job.last is not None, "a request that drafts deeper has drafted"
            job.source = job.last
        begins = [job.known + depth - len(self._modules) for job in jobs]
        outs = self._run(i, jobs, begins, [1] * len(jobs))
        self._name(i, jobs, torch.cat(outs))

    def _name(self, i: int, jobs: Sequence[_Job], last: torch.Tensor) -> None:
        """The next draft of each, from an output of module i each."""
        if any(job.made.draft_sampling is not None for job in jobs):
            name_next(self._modules[i].logits(last), [job.made for job in jobs])
        else:
            for job, token in zip(jobs, self._modules[i].choose(last).tolist(), strict=True):
                job.made.tokens.append(token)
        for row, job in enumerate(jobs):
            job.last = last[row : row + 1]

    def _has_room(self, job: _Job, depth: int) -> bool:
        """Whether the request has blocks for the slot that the next draft writes."""
        slot = job.known + depth - len(self._modules)
        return slot < min(table.first_token + len(table.block_ids) * self._block_tokens for table in job.chunk.tables)

    def _run(self, i: int, jobs: Sequence[_Job], begins: Sequence[int], counts: Sequence[int]) -> list[torch.Tensor]:
        """Outputs of module i for slots [begin, begin + count) of each request, as one batch."""
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
    """A drafter that starts cold: slots before `base` do not exist."""
    for i, final in enumerate(state.final):
        if final < base:
            state.waiting[i] = state.waiting[i][base - final :]
            state.final[i] = base
