"""Verifies drafts: which are accepted, and the token that follows. The answers keep the target's distribution.

Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): a draft d that was sampled from q is accepted with
probability min(1, p(d) / q(d)); if it is rejected, the token is sampled from the part of p above q, max(0, p - q). p is
the target's distribution for the request, after penalties, temperature and filters.

A drafter that drafts its likeliest token (`ngram`, `suffix`, and the others by default) is the special case in which q
is 1 at d. Then a draft is accepted with probability p(d), and a replacement is sampled from p without d: the same as
sampling one token from p and comparing it with the draft. So in this case tokens are sampled as without speculation,
with the same random numbers from the same seeds: not only the distribution but every single answer equals the one
without drafts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from kvferry.engines.mini.compute.sampling import (
    SampledToken,
    SamplingRow,
    logprobs_of,
    penalized,
    probabilities,
    sample,
    sample_tokens,
    uniform,
)
from kvferry.engines.mini.speculation.sampled_drafts import accept_number, replacement_number

__all__ = ["above", "rows_of", "verify"]


def rows_of(row: SamplingRow, drafts: Sequence[int]) -> list[SamplingRow]:
    """Returns `row` after the last known token and after each draft, as if the drafts up to there were accepted."""
    answer = list(row.answer)
    return [row, *(replace(row, answer=[*answer, *drafts[: i + 1]]) for i in range(len(drafts)))]


@torch.inference_mode()
def verify(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    drafts: Sequence[Sequence[int]],
    draft_probs: Sequence[torch.Tensor | None] = (),
) -> list[list[SampledToken]]:
    """Returns the new tokens of each request: its accepted drafts and the token that follows them.

    `logits`: [sum of 1 + drafts, vocab_size], float32: for each request, those of its last known token and of each
    draft; they stay as they are. `draft_probs`: for each request [drafts, vocab_size], the distributions from which its
    drafts were sampled; None if they are the drafter's likeliest tokens. Empty means None for every request.
    """
    probs_of = draft_probs or (None,) * len(rows)
    ends = list(accumulate(1 + len(proposed) for proposed in drafts))
    spans = [range(end - 1 - len(proposed), end) for end, proposed in zip(ends, drafts, strict=True)]
    sampled = [n for n, each in enumerate(probs_of) if each is not None and drafts[n]]
    others = [n for n in range(len(rows)) if n not in sampled]
    out: dict[int, list[SampledToken]] = {}
    for chosen_ones, method in ((others, _compare), (sampled, _reject)):
        if chosen_ones:
            mine = logits if len(chosen_ones) == len(rows) else logits[[i for n in chosen_ones for i in spans[n]]]
            asked = [_Asked(rows_of(rows[n], drafts[n]), drafts[n], probs_of[n]) for n in chosen_ones]
            out.update(zip(chosen_ones, method(mine, asked), strict=True))
    return [out[n] for n in range(len(rows))]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request whose drafts are verified."""

    rows: list[SamplingRow]
    """The sampling rows after its last known token and after each draft."""
    drafts: Sequence[int]
    draft_probs: torch.Tensor | None


def _compare(logits: torch.Tensor, asked: Sequence[_Asked]) -> Iterator[list[SampledToken]]:
    """For likeliest drafts: yields the tokens that would be chosen without drafts, up to the first that differs."""
    chosen = iter(sample_tokens(logits, [row for one in asked for row in one.rows]))
    for one in asked:
        mine = [next(chosen) for _ in one.rows]
        accepted = 0
        while accepted < len(one.drafts) and mine[accepted].token == one.drafts[accepted]:
            accepted += 1
        yield mine[: accepted + 1]


def _reject(logits: torch.Tensor, asked: Sequence[_Asked]) -> Iterator[list[SampledToken]]:
    """For sampled drafts: yields accepted drafts and the token that follows, by rejection sampling."""
    flat = [row for one in asked for row in one.rows]
    with_logprobs = any(row.sampling.logprobs is not None for row in flat)
    unmodified = torch.log_softmax(logits, dim=-1) if with_logprobs else None
    target = probabilities(penalized(logits, flat), [row.sampling for row in flat])
    target /= target.sum(dim=-1, keepdim=True)
    begins = [0, *accumulate(len(one.rows) for one in asked)]
    drafted = [begin + i for begin, one in zip(begins, asked, strict=False) for i in range(len(one.drafts))]
    draft_probs = torch.cat([one.draft_probs for one in asked if one.draft_probs is not None]).to(logits.device)
    ids = torch.tensor([draft for one in asked for draft in one.drafts], device=logits.device)[:, None]
    p, q = (iter(part.gather(1, ids)[:, 0].tolist()) for part in (target[drafted], draft_probs))
    accepted = [_num_accepted(one, [next(p) for _ in one.drafts], [next(q) for _ in one.drafts]) for one in asked]
    weights = target[[begin + count for begin, count in zip(begins, accepted, strict=False)]]
    rejected = [n for n, one in enumerate(asked) if accepted[n] < len(one.drafts)]
    if rejected:
        firsts = [0, *accumulate(len(one.drafts) for one in asked)]
        weights[rejected] = above(weights[rejected], draft_probs[[firsts[n] + accepted[n] for n in rejected]])
    points = [
        (replacement_number if accepted[n] < len(one.drafts) else uniform)(
            one.rows[0].seed, len(one.rows[0].answer) + accepted[n]
        )
        for n, one in enumerate(asked)
    ]
    last = sample(weights, points).tolist()
    for n, (one, count) in enumerate(zip(asked, accepted, strict=True)):
        tokens, wanted = [*one.drafts[:count], last[n]], one.rows[0].sampling.logprobs
        yield [
            SampledToken(
                t, None if unmodified is None or wanted is None else logprobs_of(unmodified[begins[n] + i], t, wanted)
            )
            for i, t in enumerate(tokens)
        ]


def _num_accepted(one: _Asked, p: Sequence[float], q: Sequence[float]) -> int:
    """Returns how many drafts are accepted. `p`, `q`: each draft's probability by the target and by the drafter."""
    for i, row in enumerate(one.rows[:-1]):
        if accept_number(row.seed, len(row.answer)) * q[i] >= p[i]:
            return i
    return len(one.drafts)


def above(target: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Returns the part of the target's distribution above the drafter's, from which replacements come. One row per
    request."""
    rest = (target - draft_probs).clamp_(min=0)
    # Nothing is left if the two are equal up to rounding; then a draft was rejected by rounding alone.
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
