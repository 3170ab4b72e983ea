"""What the engine tells the drafter on the last pipeline stage, and what comes back. Picklable, like a step.

Order in one step: the network runs over the step's shares and the drafter absorbs their hidden states; the engine
chooses tokens; then one DraftInput says what those tokens are, and the drafter brings its cache up to date and drafts.
"""

from dataclasses import dataclass

import torch

from kvferry.engines.mini.api import SamplingParams
from kvferry.layout.blocks import BlockTable

__all__ = ["DraftChunk", "DraftInput", "DraftOutput", "DraftSampling"]


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """Drafts are drawn, not the likeliest: `draft_sample_method` is `probabilistic`, and the request is not greedy."""

    sampling: SamplingParams
    seed: int
    place: int
    """Of the first draft in the answer."""


@dataclass(frozen=True, slots=True)
class DraftChunk:
    """One request after a step in which it had a share."""

    key: str
    """As in the step's ChunkInput."""
    first: int
    """Position of tokens[0]; not behind the first token of the step's share less the number of modules."""
    tokens: tuple[int, ...]
    """All that is known from there on: prompt and chosen tokens, no drafts. Of a long prompt at least as many tokens
    beyond the computed ones as the drafter has modules."""
    num_computed: int
    """Tokens [0, num_computed) have been computed by the target. Behind a verification: less than the share's stop."""
    tables: tuple[BlockTable, ...]
    num_drafts: int
    """0: bring the cache up to date, and draft nothing. More only where num_computed is all but the last token."""
    base: int = 0
    """A chain's cache begins here, at the first token of a block: a cold start. Its slots before are never read."""
    cold: bool = False
    """A draft model's cache of the prompt is empty: `first` is 0, and it computes all of it."""
    draft_sampling: DraftSampling | None = None
    """None: the drafts are the likeliest tokens."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """One call of the drafter."""

    chunks: tuple[DraftChunk, ...]


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """The drafts of each share of a DraftInput, in its order."""

    drafts: tuple[tuple[int, ...], ...]
    draft_probs: tuple[torch.Tensor | None, ...] = ()
    """Per chunk, the distributions from which its drafts were sampled: [drafts, vocab_size], float32 on the CPU. None
    for a chunk without `draft_sampling` or without drafts."""
