"""Drafts by chance: from which distribution, and with which numbers.

Three streams of numbers from one seed, beside the one that choosing without drafts uses: for the draft at a place of
the answer, for whether it stands, and for the token instead. A place is decided once, and whoever decides it has looked
at no number of a place behind it: so a place may be drafted again with the number of its first, discarded draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvferry.engines.mini.compute.sampling import probabilities, sample, uniform
from kvferry.engines.mini.speculation.draft_records import DraftSampling

__all__ = ["Drafts", "accept_number", "draft_number", "instead_number", "name_next"]

_STREAM = 1 << 40
"""No answer is as long."""


def draft_number(seed: int, place: int) -> float:
    """In [0, 1): which token is drafted for a place of the answer."""
    return uniform(seed, _STREAM + place)


def accept_number(seed: int, place: int) -> float:
    """In [0, 1): whether the draft for a place stands."""
    return uniform(seed, 2 * _STREAM + place)


def instead_number(seed: int, place: int) -> float:
    """In [0, 1): the token of a place whose draft fell."""
    return uniform(seed, 3 * _STREAM + place)


@dataclass(slots=True)
class Drafts:
    """What was drafted for one request in one call."""

    draft_sampling: DraftSampling | None
    tokens: list[int] = field(default_factory=list)
    draft_probs: list[torch.Tensor] = field(default_factory=list)
    """Of each draft, if there is a chance: [vocab_size]."""

    def result(self, count: int) -> tuple[tuple[int, ...], torch.Tensor | None]:
        """The first `count` drafts for a DraftOutput."""
        draft_probs = torch.stack(self.draft_probs[:count]).cpu() if self.draft_probs[:count] else None
        return tuple(self.tokens[:count]), draft_probs


def name_next(logits: torch.Tensor, drafts: Sequence[Drafts]) -> None:
    """One more draft of each request. `logits`: [len(drafts), vocab_size]; -inf for what the drafter cannot name.

    Temperature and filters are the request's, so that the drafter's distribution is near the target's; any other would
    do as well for the answers' distribution, since `verify` knows it.
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
