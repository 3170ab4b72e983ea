"""Sampling: each setting alone, distributions, and draws that depend only on seed and place."""

from typing import Any

import pytest
import torch

from kvferry.engines.mini.api import SamplingParams
from kvferry.engines.mini.compute.sampling import SamplingRow, sample_tokens, uniform
from kvferry.errors import RequestError


def _row(
    seed: int = 0, prompt: list[int] | None = None, answer: list[int] | None = None, **sampling: Any
) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=100, **sampling), seed, prompt or [], answer or [], frozenset((0,)))


def _pick(logits: list[float], row: SamplingRow) -> int:
    return sample_tokens(torch.tensor([logits]), [row])[0].token


def _histogram(logits: list[float], draws: int = 4000, **sampling: Any) -> list[float]:
    rows = [_row(seed=i, temperature=1.0, **sampling) for i in range(draws)]
    chosen = sample_tokens(torch.tensor([logits]).repeat(draws, 1), rows)
    counts = torch.bincount(torch.tensor([c.token for c in chosen]), minlength=len(logits))
    return (counts / draws).tolist()


def test_greedy_takes_the_most_likely() -> None:
    assert _pick([0.0, 3.0, 1.0], _row(temperature=0.0)) == 1
    assert _pick([0.0, 3.0, 1.0], _row(temperature=1e-9)) == 1


def test_draws_follow_the_distribution() -> None:
    want = torch.softmax(torch.tensor([0.0, 1.0, 2.0, -1.0]), 0).tolist()
    assert _histogram([0.0, 1.0, 2.0, -1.0]) == pytest.approx(want, abs=0.03)


def test_temperature_sharpens() -> None:
    rows = [_row(seed=i, temperature=0.5) for i in range(4000)]
    chosen = sample_tokens(torch.tensor([[0.0, 1.0]]).repeat(4000, 1), rows)
    share = sum(c.token for c in chosen) / 4000
    assert share == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item(), abs=0.03)


def test_top_k_keeps_the_k_most_likely() -> None:
    found = _histogram([0.0, 3.0, 2.0, 2.5], top_k=2)
    assert found[0] == found[2] == 0
    assert found[1] == pytest.approx(torch.sigmoid(torch.tensor(0.5)).item(), abs=0.03)


def test_top_k_of_equal_tokens_keeps_k() -> None:
    assert sum(share > 0 for share in _histogram([1.0] * 8, top_k=3)) == 3


def test_top_p_keeps_the_fewest_that_make_it_up() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert [share > 0 for share in _histogram(logits, top_p=0.7)] == [True, True, False, False]
    assert [share > 0 for share in _histogram(logits, top_p=0.81)] == [True, True, True, False]
    assert [share > 0 for share in _histogram(logits, top_p=0.01)] == [True, False, False, False]


def test_min_p_drops_what_is_far_below_the_best() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert [share > 0 for share in _histogram(logits, min_p=0.2)] == [True, True, True, False]


def test_settings_of_one_row_leave_the_others_alone() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.9]] * 3)
    rows = [_row(temperature=0.0), _row(temperature=1.0, top_k=1), _row(temperature=0.0, logit_bias={2: 1.0})]
    assert [c.token for c in sample_tokens(logits, rows)] == [1, 1, 2]


def test_a_draw_depends_only_on_seed_and_place() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    alone = [sample_tokens(logits[None].clone(), [_row(seed=s, temperature=1.0)])[0].token for s in range(20)]
    batch = sample_tokens(logits.repeat(20, 1), [_row(seed=s, temperature=1.0) for s in range(20)])
    assert [c.token for c in batch] == alone
    assert len(set(alone)) > 5
    later = [
        sample_tokens(logits[None].clone(), [_row(seed=s, answer=[1], temperature=1.0)])[0].token for s in range(20)
    ]
    assert later != alone, "draw 1 is another one than draw 0"


def test_uniform_is_fixed_for_ever() -> None:
    # Seeded answers must be the same in the next release, and on prefill and decode workers of different builds.
    assert [uniform(0, 0), uniform(0, 1), uniform(-1, 0)] == [
        0.8150393007738989,
        0.05071536621339856,
        0.1588877767634832,
    ]
    many = torch.tensor([uniform(7, i) for i in range(2000)])
    assert 0 <= many.min() < 0.01
    assert 0.99 < many.max() < 1
    assert many.mean().item() == pytest.approx(0.5, abs=0.02)


def test_frequency_and_presence_penalties_count_the_answer_only() -> None:
    logits = [1.0, 1.5, 0.0]
    assert _pick(logits, _row(prompt=[1, 1, 1], temperature=0.0, frequency_penalty=1.0)) == 1
    assert _pick(logits, _row(answer=[1], temperature=0.0, frequency_penalty=0.4)) == 1
    assert _pick(logits, _row(answer=[1, 1], temperature=0.0, frequency_penalty=0.4)) == 0
    assert _pick(logits, _row(answer=[1], temperature=0.0, presence_penalty=0.6)) == 0
    assert _pick(logits, _row(answer=[1, 1, 1], temperature=0.0, presence_penalty=0.4)) == 1


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    assert _pick([1.0, 1.5], _row(prompt=[1], temperature=0.0, repetition_penalty=2.0)) == 0
    assert _pick([1.0, 1.5], _row(answer=[1], temperature=0.0, repetition_penalty=2.0)) == 0
    assert _pick([-1.5, -1.0], _row(answer=[1], temperature=0.0, repetition_penalty=2.0)) == 0, "below 0 it multiplies"


def test_bias_forbids_and_forces() -> None:
    assert _pick([0.0, 9.0], _row(temperature=0.0, logit_bias={1: -100.0})) == 0
    assert _pick([0.0, 9.0], _row(temperature=0.0, logit_bias={0: 100.0})) == 0
    assert _pick([0.0, 9.0], _row(temperature=0.0, logit_bias={70_000: 100.0})) == 1, "beyond the vocabulary: ignored"


def test_no_end_before_min_tokens() -> None:
    logits = [9.0, 8.0, 1.0]
    assert _pick(logits, _row(temperature=0.0, min_tokens=2)) == 1
    assert _pick(logits, _row(temperature=0.0, min_tokens=2, stop_token_ids=(1,))) == 2
    assert _pick(logits, _row(temperature=0.0, min_tokens=2, answer=[2, 2])) == 0
    assert _pick(logits, _row(temperature=0.0, min_tokens=2, ignore_eos=True)) == 0


def test_logprobs_are_of_the_unchanged_logits_best_first() -> None:
    logits = [0.0, 2.0, 1.0]
    want = torch.log_softmax(torch.tensor(logits), 0).tolist()
    found = sample_tokens(torch.tensor([logits]), [_row(temperature=0.0, logprobs=2, logit_bias={0: 50.0})])[0]
    assert found.token == 0
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(want[0])
    assert [token for token, _ in found.logprobs.top] == [1, 2]
    assert [value for _, value in found.logprobs.top] == pytest.approx([want[1], want[2]])
    bare = sample_tokens(torch.tensor([logits]), [_row(temperature=0.0, logprobs=0)])[0].logprobs
    assert bare is not None
    assert bare.top == ()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.1}, r"top_p=1\.1"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 2.0}, r"min_p=2\.0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"min_tokens": 17}, "min_tokens=17"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0"),
        ({"presence_penalty": 2.5}, r"presence_penalty=2\.5"),
        ({"stop": ("",)}, "stop.*empty string"),
        ({"stop": ("x" * 2000,)}, "stop.*1000 characters"),
        ({"logit_bias": {1: 101.0}}, r"logit_bias\[1\]=101\.0"),
        ({"logit_bias": {-1: 1.0}}, "a token id is below 0"),
        ({"stop_token_ids": tuple(range(2000))}, "stop_token_ids has 2000 entries"),
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**wrong)
