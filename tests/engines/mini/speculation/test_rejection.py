"""Sampled drafts: whatever the drafter's distribution is, the answers have the target's."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch

from kvferry.engines.mini.api import SamplingParams
from kvferry.engines.mini.compute.sampling import SamplingRow, probabilities, sample_tokens
from kvferry.engines.mini.speculation import rejection
from kvferry.engines.mini.speculation import sampled_drafts as draws
from kvferry.engines.mini.speculation.draft_records import DraftSampling
from kvferry.engines.mini.speculation.sampled_drafts import Drafts, draft_next
from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.errors import ConfigError
from tests.engines.mini.speculation.conftest import MakeServing, accepted, ask, engine, text, tokens
from tests.engines.mini.speculation.test_shapes import eagle3_head
from tests.harness.serving import Alone, Pair, Serving

pytestmark = pytest.mark.engine

VOCAB, DEPTH, DRAWS, FEWER = 6, 2, 20_000, 4_000
FILTERS = [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}, {"temperature": 1.4, "top_k": 4, "top_p": 0.9}]


class World:
    """A target and a drafter whose next token depends only on the last one."""

    def __init__(self, **filters: float) -> None:
        random = torch.Generator().manual_seed(7)
        self.target, noise = (torch.randn(VOCAB, VOCAB, generator=random) * 1.3 for _ in range(2))
        self.drafter = 0.7 * self.target + 0.7 * noise
        self.sampling = SamplingParams(**{"temperature": 0.9, **filters})  # type: ignore[arg-type]

    def exact(self) -> torch.Tensor:
        """Returns the distribution that the request asks for: [last token, next token]."""
        probs = probabilities(self.target.clone(), [self.sampling] * VOCAB)
        return probs / probs.sum(-1, keepdim=True)

    def answers(self, num: int, *, claimed: "World | None" = None) -> tuple[list[list[int]], int]:
        """Runs one step of `num` requests after token 0; also returns how many drafts were accepted. `claimed`: a
        world whose drafter's probabilities the verification gets, instead of the right ones."""
        rows, drafts, draft_probs, logits = [], [], [], []
        for seed in range(num):
            rows.append(SamplingRow(self.sampling, seed, [0], [], frozenset()))
        made = [Drafts(DraftSampling(self.sampling, seed, 0)) for seed in range(num)]
        others = [Drafts(one.draft_sampling) for one in made]
        for _ in range(DEPTH):
            last = [one.tokens[-1] if one.tokens else 0 for one in made]
            draft_next(self.drafter[last].clone(), made)
            if claimed is not None:
                draft_next(claimed.drafter[last].clone(), others)
        for one, other in zip(made, others if claimed is not None else made, strict=True):
            drafts.append(one.result(DEPTH)[0])
            draft_probs.append(other.result(DEPTH)[1])
            logits.append(self.target[[0, *drafts[-1]]])
        chosen = rejection.verify(torch.cat(logits), rows, drafts, draft_probs)
        return [[each.token for each in one] for one in chosen], sum(len(one) - 1 for one in chosen)

    def worst(self, answers: list[list[int]]) -> float:
        """Returns the largest distance, in sigmas, of a frequency from its probability, over all pairs of tokens."""
        counts = torch.zeros(VOCAB, VOCAB)
        for answer in answers:
            for last, token in zip([0, *answer], answer, strict=False):
                counts[last, token] += 1
        seen, exact = counts.sum(-1, keepdim=True), self.exact()
        assert not counts[exact == 0].any()  # nothing that a filter has removed
        sigma = (exact * (1 - exact) / seen.clamp(min=1)).sqrt()
        return float(
            ((counts / seen.clamp(min=1) - exact).abs() / sigma.clamp(min=1e-4))[(exact > 0) & (seen > 0)].max()
        )


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_distribution_is_the_targets(filters: dict[str, float]) -> None:
    """20,000 draws without filters, each frequency within 4 sigma: at most 1.4 % for the first token."""
    world, draws = World(**filters), DRAWS if not filters else FEWER
    answers, num_stood = world.answers(draws)
    assert 0.05 < num_stood / (DEPTH * draws) < 0.95
    assert world.worst(answers) < 4
    if not filters:  # two answers of a hundred differ
        assert world.worst([[(token + (i % 50 == 0)) % VOCAB for token in one] for i, one in enumerate(answers)]) > 4


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("accept_number", lambda seed, place: 0.0),  # every draft is accepted
        ("accept_number", lambda seed, place: 1.0),  # only drafts that the target finds more likely are accepted
        ("accept_number", draws.draft_number),  # the random number that sampled the draft is used again
        ("above", lambda target, draft_probs: target),  # the replacement comes from the target's own distribution
        ("replacement_number", draws.accept_number),  # the random number that rejected it is used again
    ],
    ids=["all", "likelier", "same number", "no residual", "number twice"],
)
def test_a_wrong_sampler_is_detected(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., object]) -> None:
    monkeypatch.setattr(rejection, name, wrong)
    world = World()
    assert world.worst(world.answers(FEWER)[0]) > 4


def test_wrong_draft_probabilities_are_detected() -> None:
    """They must be those of the distribution that the draft was sampled from."""
    world, other = World(), World()
    other.drafter = world.drafter * 1.3
    assert world.worst(world.answers(2 * FEWER, claimed=other)[0]) > 4


def test_requests_of_all_kinds_in_one_step() -> None:
    """Greedy, sampled with likeliest drafts, with sampled drafts, without drafts: each as if it were alone."""
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(9, VOCAB, generator=random)
    draft_probs = torch.softmax(torch.randn(2, VOCAB, generator=random), -1)
    sampled = SamplingParams(temperature=1.0, logprobs=2)
    rows = [
        SamplingRow(sampling, seed, [0], [], frozenset())
        for seed, sampling in enumerate([SamplingParams(temperature=0.0), sampled, sampled, sampled])
    ]
    drafts = [[int(logits[0].argmax())], [2, 3], [4, 1], []]
    together = rejection.verify(logits.clone(), rows, drafts, [None, None, draft_probs, None])
    at = 0
    for row, proposed, got, each in zip(rows, drafts, together, [None, None, draft_probs, None], strict=True):
        mine = logits[at : at + 1 + len(proposed)]
        assert rejection.verify(mine.clone(), [row], [proposed], [each]) == [got]
        for i, chosen in enumerate(got):
            if row.sampling.logprobs is not None:
                assert chosen.logprobs is not None
                assert chosen.logprobs.logprob == pytest.approx(float(torch.log_softmax(mine[i], -1)[chosen.token]))
        at += len(mine)
    assert together[0][0].token == drafts[0][0]
    assert together[3] == sample_tokens(logits[8:].clone(), rows[3:])


def test_penalties_count_the_drafts_before() -> None:
    """An accepted draft is penalised for the tokens after it."""
    logits = torch.tensor([[9.0, 0.0, 0.0], [9.0, 8.0, 0.0]])
    row = SamplingRow(SamplingParams(temperature=0.01, frequency_penalty=2.0), 1, [0], [], frozenset())
    assert [c.token for c in rejection.verify(logits, [row], [[0]], [torch.tensor([[1.0, 0.0, 0.0]])])[0]] == [0, 1]


def test_drafts_of_equal_distributions_are_accepted() -> None:
    """If the drafter is the target, no draft is rejected; if rounding rejects one, its replacement comes from the
    target."""
    world = World()
    world.drafter = world.target
    assert world.answers(100)[1] == DEPTH * 100
    probs = torch.tensor([[0.5, 0.5]])
    assert torch.equal(rejection.above(probs, probs), probs)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="draft_sample_method='lucky' is unknown"):
        SpeculationSettings(method="mtp", num_speculative_tokens=1, draft_sample_method="lucky")
    with pytest.raises(ConfigError, match="method='ngram' names tokens and has no probabilities"):
        SpeculationSettings(method="ngram", num_speculative_tokens=1, draft_sample_method="probabilistic")


def test_sampled_drafts_in_small_steps_and_with_preemption(serving: MakeServing, byte_mtp: str) -> None:
    """Some steps have no room for all drafts, and requests restart: each answer ends, the same twice from a seed."""
    settings = engine(byte_mtp, "mtp", 5, spec_draft_sample_method="probabilistic", num_blocks=44, max_batch_tokens=14)
    prompts = [text(length, 1500 * i) for i, length in enumerate((1, 5, 16, 17, 40, 63))]
    sampling = {"temperature": 1.1, "top_p": 0.9, "seed": 4, "frequency_penalty": 0.3, "logprobs": 1}
    answers = []
    for _ in range(2):
        one = serving(Alone, settings)
        answers.append(tokens(one.serve(ask(prompts, 60, **sampling))))
        assert one.engine.stats().preemptions > 0
        assert accepted(one).rate > 0.2
        one.engine.check()
        assert not one.engine._speculation._draft_probs  # type: ignore[union-attr]
    assert answers[0] == answers[1]
    assert [len(answer) for answer in answers[0]] == [60] * len(prompts)


PROMPT, TOP = text(9, 5000), 3
REQUESTS = 800


@pytest.fixture(scope="module")
def exact(byte_mtp: str) -> dict[tuple[int, ...], float]:
    """Returns the probability of each answer of three tokens in plain decoding: the product over its tokens."""
    torch.set_num_threads(1)
    one = Alone(engine(byte_mtp))
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        prefixes = list(known)
        served = one.serve(ask([PROMPT + prefix for prefix in prefixes], 1, logprobs=TOP))
        probabilities: dict[tuple[int, ...], float] = {}
        for prefix, each in zip(prefixes, served, strict=True):
            assert each.last is not None
            top = each.last.logprobs[0].top
            total = torch.tensor([value for _, value in top]).exp().sum()
            probabilities |= {
                (*prefix, token): known[prefix] * float(torch.tensor(v).exp() / total) for token, v in top
            }
        known = probabilities
    one.close()
    return known


def _check(one: Serving, exact: dict[tuple[int, ...], float], least: float) -> None:
    sampling = {"temperature": 1.0, "top_k": TOP}
    requests = [ask([PROMPT], 5, seed=seed, **sampling)[0] for seed in range(REQUESTS)]
    got = Counter(tuple(answer[:3]) for answer in tokens(one.serve(requests)))
    assert set(got) <= set(exact)
    for length in (1, 2, 3):
        for prefix in {answer[:length] for answer in exact}:
            expected = sum(p for answer, p in exact.items() if answer[:length] == prefix)
            seen = sum(count for answer, count in got.items() if answer[:length] == prefix) / REQUESTS
            assert abs(seen - expected) < 4 * (expected * (1 - expected) / REQUESTS) ** 0.5 + 1e-3, (
                prefix,
                seen,
                expected,
            )
    assert accepted(one).drafted[0] > REQUESTS
    assert least < accepted(one).rate < 0.999
    again = [[ask([PROMPT], 5, seed=seed, **sampling)[0] for seed in range(8)] for _ in range(2)]
    assert tokens(one.serve(again[0])) == tokens(one.serve(again[1]))  # by its seed, each
    one.engine.check()


@pytest.mark.parametrize(
    ("method", "kind"), [*product(["mtp"], [Alone, Pair]), ("eagle3", Alone), ("draft_model", Pair)]
)
def test_engines_keep_the_distribution(
    serving: MakeServing,
    byte_mtp: str,
    windowed: str,
    exact: dict[tuple[int, ...], float],
    tmp_path_factory: pytest.TempPathFactory,
    method: str,
    kind: type[Serving],
) -> None:
    """With sampled drafts, alone and across the hand-off, each answer of three tokens is as frequent as it should
    be."""
    changes = {}
    if method == "eagle3":
        changes["spec_model"] = eagle3_head(tmp_path_factory.mktemp("head"))
    if method == "draft_model":
        changes["spec_model"] = windowed
    settings = engine(byte_mtp, method, 3, spec_draft_sample_method="probabilistic", max_running=64, **changes)
    _check(serving(kind, *([settings] * (2 if kind is Pair else 1))), exact, -1 if method == "eagle3" else 0.1)
