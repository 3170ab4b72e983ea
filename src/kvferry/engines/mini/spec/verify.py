"""Which drafts stand, and what is chosen behind them: greedy and by chance, with the target's distribution kept.

Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): a draft d that was drawn from q stands with probability
min(1, p(d) / q(d)); where it falls, the token is drawn from what of p lies above q. Our drafters name their likeliest
token: q is all on d. Then a draft stands with probability p(d), and the token instead is drawn from p without d. That
is the same as to draw one token from p and to see whether it is the draft. So we draw as without speculation, with the
same numbers from the same seeds: not only the distribution, but every single answer is the one that the request would
have had without drafts.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvferry.engines.mini.sampling import Chosen, Row, choose

__all__ = ["rows_of", "verify"]


def rows_of(row: Row, drafts: Sequence[int]) -> list[Row]:
    """`row` behind the last known token, and behind each draft, as if the drafts before it stood."""
    answer = list(row.answer)
    return [row, *(replace(row, answer=[*answer, *drafts[: i + 1]]) for i in range(len(drafts)))]


@torch.inference_mode()
def verify(logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> list[list[Chosen]]:
    """The new tokens of each request: drafts that stand, and the one behind them. 1 to 1 + number of drafts.

    `logits`: [sum of 1 + drafts, vocab_size], float32, of each request the last known token's and its drafts';
    overwritten. All are chosen in one go, as of one batch.
    """
    flat = [each for row, proposed in zip(rows, drafts, strict=True) for each in rows_of(row, proposed)]
    chosen = choose(logits, flat)
    out: list[list[Chosen]] = []
    at = 0
    for proposed in drafts:
        kept = 0
        while kept < len(proposed) and chosen[at + kept].token == proposed[kept]:
            kept += 1
        out.append(chosen[at : at + kept + 1])
        at += 1 + len(proposed)
    return out
