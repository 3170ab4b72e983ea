"""Drafts change no greedy answer, and sampled answers keep the target's distribution."""

from typing import Any

import pytest
import torch

from kvferry.engines.mini.api import SamplingParams
from kvferry.engines.mini.compute.sampling import SamplingRow, sample_tokens
from kvferry.engines.mini.speculation.acceptance import Acceptance, AcceptanceCounter
from kvferry.engines.mini.speculation.rejection import verify

VOCAB = 8
NO_EOS: frozenset[int] = frozenset()


def row(seed: int = 0, *, temperature: float = 0.0, answer: list[int] | None = None, **sampling: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(temperature=temperature, **sampling), seed, [1, 2], answer or [], NO_EOS)


def one_hot(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float() * 9


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    logits = one_hot(3, 4, 5, 6, 7, 1)
    out = verify(logits, [row(), row()], [[3, 4, 0], [2]])
    assert [[chosen.token for chosen in each] for each in out] == [[3, 4, 5], [7]]


def test_without_a_draft_there_is_one_token() -> None:
    assert [c.token for c in verify(one_hot(3), [row()], [[]])[0]] == [3]


def test_penalties_count_the_drafts_before() -> None:
    """The result is the same as without drafts: a frequency penalty counts accepted drafts."""
    logits = one_hot(3, 3)
    logits[:, 2] = 8.0
    out = verify(logits.clone(), [row(frequency_penalty=1.5)], [[3]])
    assert [c.token for c in out[0]] == [3, 2]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}], ids=str)
def test_the_distribution_is_the_targets(filters: dict[str, float]) -> None:
    """20,000 draws of two tokens: each of the 64 pairs within 4 sigma (at most 1.4 %) of its probability, whatever was
    drafted; a verification that is wrong by 2 % would fail."""
    torch.manual_seed(5)
    num = 20_000
    first, second = torch.randn(VOCAB) * 1.5, torch.randn(VOCAB, VOCAB) * 1.5
    drafts = [int(first.argmax()), int(first.argsort()[-3])]  # the likeliest token, and another one
    sampling: dict[str, Any] = {"temperature": 0.9, **filters}

    def one(logits: torch.Tensor) -> torch.Tensor:
        rows = [row(seed, **sampling) for seed in range(num)]
        tokens = torch.tensor([c.token for c in sample_tokens(logits.expand(num, -1).clone(), rows)])
        return torch.bincount(tokens, minlength=VOCAB) / num

    for draft in drafts:
        rows = [row(seed, **sampling) for seed in range(num)]
        logits = torch.stack([first, second[draft]]).repeat(num, 1)
        counts = torch.zeros(VOCAB, VOCAB)
        left = torch.zeros(VOCAB)
        for chosen in verify(logits, rows, [[draft]] * num):
            left[chosen[0].token] += 1
            if len(chosen) == 2:
                counts[draft, chosen[1].token] += 1
        exact = torch.softmax(first / 0.9, -1) if not filters else one(first)
        sigma = (exact * (1 - exact) / num).sqrt()
        assert ((left / num - exact).abs() <= 4 * sigma + (0.0 if not filters else 0.01)).all()
        after = torch.softmax(second[draft] / 0.9, -1) if not filters else one(second[draft])
        if left[draft]:
            off = (counts[draft] / left[draft] - after).abs()
            assert (off <= 4 * (after * (1 - after) / left[draft]).sqrt() + (0.0 if not filters else 0.01)).all()


def test_each_answer_is_the_one_without_drafts() -> None:
    """Not only on average: the numbers that a seed gives are used up position by position, drafts or not."""
    torch.manual_seed(1)
    table = torch.randn(VOCAB, VOCAB)
    for seed in range(200):
        plain: list[int] = []
        for _ in range(4):
            logits = table[plain[-1] if plain else 0][None].clone()
            plain.append(sample_tokens(logits, [row(seed, temperature=1.0, answer=plain)])[0].token)
        drafts = [*plain[:2], (plain[2] + 1) % VOCAB]
        logits = torch.stack([table[0], *(table[d] for d in drafts)])
        out = verify(logits, [row(seed, temperature=1.0)], [drafts])[0]
        assert [c.token for c in out] == plain[:3]


def test_acceptance_by_position() -> None:
    counter = AcceptanceCounter()
    for drafts, accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        counter.count(drafts, accepted)
    got = counter.read()
    assert got == Acceptance(3, (3, 3, 2), (2, 1, 1))
    assert (got.rate, got.length, got.by_position) == (0.5, 1 + 4 / 3, (2 / 3, 1 / 3, 1 / 2))
    counter.count(3, 3)
    assert counter.read().since(got) == Acceptance(1, (1, 1, 1), (1, 1, 1))
    assert Acceptance().length == Acceptance().rate == 0.0
