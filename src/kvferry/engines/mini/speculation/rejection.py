"""Which drafts stand, and what is chosen behind them: greedy and by chance, with the target's distribution kept.

Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): a draft d that was drawn from q stands with probability
min(1, p(d) / q(d)); where it falls, the token is drawn from what of p lies above q. p is the target's distribution as
the request wants it, behind penalties, temperature and filters.

A drafter that names its likeliest token (`ngram`, `suffix`, and the others by default) is the special case in which q
is all on d. Then a draft stands with probability p(d), and the token instead is drawn from p without d. That is the
same as to draw one token from p and to see whether it is the draft. So there we draw as without speculation, with the
same numbers from the same seeds: not only the distribution, but every single answer is the one that the request would
have had without drafts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from kvferry.engines.mini.compute.sampling import (
    SampledToken,
    SamplingRow,
    apply_penalties,
    logprobs_of,
    probabilities,
    sample,
    sample_tokens,
    uniform,
)
from kvferry.engines.mini.speculation.sampled_drafts import accept_number, instead_number

__all__ = ["above", "rows_of", "verify"]


def rows_of(row: SamplingRow, drafts: Sequence[int]) -> list[SamplingRow]:
    """`row` behind the last known token, and behind each draft, as if the drafts before it stood."""
    answer = list(row.answer)
    return [row, *(replace(row, answer=[*answer, *drafts[: i + 1]]) for i in range(len(drafts)))]


@torch.inference_mode()
def verify(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    drafts: Sequence[Sequence[int]],
    draft_probs: Sequence[torch.Tensor | None] = (),
) -> list[list[SampledToken]]:
    """The new tokens of each request: drafts that stand, and the one behind them. 1 to 1 + number of drafts.

    `logits`: [sum of 1 + drafts, vocab_size], float32: for each request, those of its last known token and of each
    draft; overwritten. `draft_probs`: for each request [drafts, vocab_size], the distributions from which its drafts
    were sampled; None if they are the drafter's likeliest tokens. Empty means None for every request.
    """
    drawn = draft_probs or (None,) * len(rows)
    ends = list(accumulate(1 + len(proposed) for proposed in drafts))
    spans = [range(end - 1 - len(proposed), end) for end, proposed in zip(ends, drafts, strict=True)]
    sampled = [n for n, each in enumerate(drawn) if each is not None and drafts[n]]
    others = [n for n in range(len(rows)) if n not in sampled]
    out: dict[int, list[SampledToken]] = {}
    for chosen_ones, method in ((others, _compare), (sampled, _reject)):
        if chosen_ones:
            mine = logits if len(chosen_ones) == len(rows) else logits[[i for n in chosen_ones for i in spans[n]]]
            asked = [_Asked(rows_of(rows[n], drafts[n]), drafts[n], drawn[n]) for n in chosen_ones]
            out.update(zip(chosen_ones, method(mine, asked), strict=True))
    return [out[n] for n in range(len(rows))]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request."""

    rows: list[SamplingRow]
    """Behind its last known token, and behind each draft."""
    drafts: Sequence[int]
    draft_probs: torch.Tensor | None


def _compare(logits: torch.Tensor, asked: Sequence[_Asked]) -> Iterator[list[SampledToken]]:
    """Drafts are the likeliest tokens: what is chosen without them, up to the first that differs."""
    chosen = iter(sample_tokens(logits, [row for one in asked for row in one.rows]))
    for one in asked:
        mine = [next(chosen) for _ in one.rows]
        kept = 0
        while kept < len(one.drafts) and mine[kept].token == one.drafts[kept]:
            kept += 1
        yield mine[: kept + 1]


def _reject(logits: torch.Tensor, asked: Sequence[_Asked]) -> Iterator[list[SampledToken]]:
    """Drafts were drawn from `draft_probs`."""
    flat = [row for one in asked for row in one.rows]
    with_logprobs = any(row.sampling.logprobs is not None for row in flat)
    untouched = torch.log_softmax(logits, dim=-1) if with_logprobs else None
    for i, row in enumerate(flat):
        if row.changes_logits:
            apply_penalties(logits[i], row)
    target = probabilities(logits, [row.sampling for row in flat])
    target /= target.sum(dim=-1, keepdim=True)
    begins = [0, *accumulate(len(one.rows) for one in asked)]
    drafted = [begin + i for begin, one in zip(begins, asked, strict=False) for i in range(len(one.drafts))]
    draft_probs = torch.cat([one.draft_probs for one in asked if one.draft_probs is not None]).to(logits.device)
    ids = torch.tensor([draft for one in asked for draft in one.drafts], device=logits.device)[:, None]
    p, q = (iter(part.gather(1, ids)[:, 0].tolist()) for part in (target[drafted], draft_probs))
    kept = [_num_that_stand(one, [next(p) for _ in one.drafts], [next(q) for _ in one.drafts]) for one in asked]
    weights = target[[begin + count for begin, count in zip(begins, kept, strict=False)]]
    fell = [n for n, one in enumerate(asked) if kept[n] < len(one.drafts)]
    if fell:
        firsts = [0, *accumulate(len(one.drafts) for one in asked)]
        weights[fell] = above(weights[fell], draft_probs[[firsts[n] + kept[n] for n in fell]])
    points = [
        (instead_number if kept[n] < len(one.drafts) else uniform)(one.rows[0].seed, len(one.rows[0].answer) + kept[n])
        for n, one in enumerate(asked)
    ]
    last = sample(weights, points).tolist()
    for n, (one, count) in enumerate(zip(asked, kept, strict=True)):
        tokens, wanted = [*one.drafts[:count], last[n]], one.rows[0].sampling.logprobs
        yield [
            SampledToken(
                t, None if untouched is None or wanted is None else logprobs_of(untouched[begins[n] + i], t, wanted)
            )
            for i, t in enumerate(tokens)
        ]


def _num_that_stand(one: _Asked, p: Sequence[float], q: Sequence[float]) -> int:
    """`p`, `q`: of each draft, by the target and by the drafter."""
    for i, row in enumerate(one.rows[:-1]):
        if accept_number(row.seed, len(row.answer)) * q[i] >= p[i]:
            return i
    return len(one.drafts)


def above(target: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """What of the target's distribution the drafter's does not cover: tokens instead come from it. A row each."""
    rest = (target - draft_probs).clamp_(min=0)
    # Nothing is left where the two are equal but for rounding; then a draft falls by rounding alone.
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
