"""Sampled drafts: the distribution that they come from, and the random numbers that are used.

Besides the stream of random numbers that plain decoding uses, a seed gives three more: for the draft at a position of
the answer, for whether it is accepted, and for the token that replaces it. A position is decided once, before any
number of a later position is used; so a position may be drafted again with the same number after its first draft was
discarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvferry.engines.mini.compute.sampling import probabilities, sample, uniform
from kvferry.engines.mini.speculation.draft_records import DraftSampling

__all__ = ["Drafts", "accept_number", "draft_next", "draft_number", "replacement_number"]

_STREAM = 1 << 40
"""No answer is this long, so the streams never overlap."""


def draft_number(seed: int, place: int) -> float:
    """Returns a number in [0, 1) that decides which token is drafted for a position of the answer."""
    return uniform(seed, _STREAM + place)


def accept_number(seed: int, place: int) -> float:
    """Returns a number in [0, 1) that decides whether the draft for a position is accepted."""
    return uniform(seed, 2 * _STREAM + place)


def replacement_number(seed: int, place: int) -> float:
    """Returns a number in [0, 1) that decides which token replaces a rejected draft."""
    return uniform(seed, 3 * _STREAM + place)


@dataclass(slots=True)
class Drafts:
    """The drafts of one request in one call."""

    draft_sampling: DraftSampling | None
    tokens: list[int] = field(default_factory=list)
    draft_probs: list[torch.Tensor] = field(default_factory=list)
    """Per draft, if drafts are sampled, the distribution that it was sampled from: [vocab_size]."""

    def result(self, count: int) -> tuple[tuple[int, ...], torch.Tensor | None]:
        """Returns the first `count` drafts and their distributions, for a DraftOutput."""
        draft_probs = torch.stack(self.draft_probs[:count]).cpu() if self.draft_probs[:count] else None
        return tuple(self.tokens[:count]), draft_probs


def draft_next(logits: torch.Tensor, drafts: Sequence[Drafts]) -> None:
    """Adds one draft to each request. `logits`: [len(drafts), vocab_size]; -inf for tokens that cannot be drafted.

    The request's temperature and filters apply, so that the drafter's distribution is close to the target's. The
    answers keep the target's distribution whatever the drafter's is, because `verify` takes it into account.
    """
    tokens = logits.argmax(dim=-1)
    random = [(row, one, one.draft_sampling) for row, one in enumerate(drafts) if one.draft_sampling is not None]
    if random:
        rows = [row for row, _, _ in random]
        draft_probs = probabilities(logits[rows].float(), [draft_sampling.sampling for _, _, draft_sampling in random])
        draft_probs /= draft_probs.sum(dim=-1, keepdim=True)
        points = [
            draft_number(draft_sampling.seed, draft_sampling.place + len(one.tokens))
            for _, one, draft_sampling in random
        ]
        tokens[rows] = sample(draft_probs, points)
        for (_, one, _), row in zip(random, draft_probs, strict=True):
            one.draft_probs.append(row)
    for one, token in zip(drafts, tokens.tolist(), strict=True):
        one.tokens.append(token)
