"""What the engine sends to the drafter on the last pipeline stage, and what comes back. Picklable, like a step.

Order in one step: the network computes the step's chunks and the drafter absorbs their hidden states; the engine
chooses tokens; then a DraftInput says which tokens were chosen, and the drafter brings its cache up to date and drafts.
"""

from dataclasses import dataclass

import torch

from kvferry.engines.mini.api import SamplingParams
from kvferry.layout.blocks import BlockTable

__all__ = ["DraftChunk", "DraftInput", "DraftOutput", "DraftSampling"]


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How to sample a request's drafts. Used if `draft_sample_method` is `probabilistic` and the request is not
    greedy."""

    sampling: SamplingParams
    seed: int
    place: int
    """The position of the first draft in the answer."""


@dataclass(frozen=True, slots=True)
class DraftChunk:
    """One request after a step that computed a chunk of it."""

    key: str
    """The key in the step's ChunkInput."""
    first: int
    """Position of tokens[0]: at most the first token of the step's chunk minus the number of modules."""
    tokens: tuple[int, ...]
    """All known tokens from there on, of prompt and answer, without drafts. Of a long prompt, at least as many tokens
    after the computed ones as the drafter has modules."""
    num_computed: int
    """The target has computed tokens [0, num_computed). Less than the chunk's stop if drafts were rejected."""
    tables: tuple[BlockTable, ...]
    num_drafts: int
    """How many drafts to make. 0: only bring the cache up to date. Above 0 only if all but the last token are
    computed."""
    base: int = 0
    """Cold start of a chain: its cache begins at this token, the first of a block. Earlier slots are never read."""
    cold: bool = False
    """Cold start of a draft model: its cache of the prompt is empty, `first` is 0, and it computes the whole prompt."""
    draft_sampling: DraftSampling | None = None
    """None: the drafts are the drafter's likeliest tokens."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """The input of one call of the drafter."""

    chunks: tuple[DraftChunk, ...]


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """The drafts for each chunk of a DraftInput, in its order."""

    drafts: tuple[tuple[int, ...], ...]
    draft_probs: tuple[torch.Tensor | None, ...] = ()
    """Per chunk, the distributions from which its drafts were sampled: [drafts, vocab_size], float32 on the CPU. None
    for a chunk without `draft_sampling` or without drafts."""
