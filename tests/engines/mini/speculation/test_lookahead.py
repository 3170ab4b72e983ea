"""The counts that both sides of a hand-off compute (R31, R32, R34)."""

from itertools import product

import pytest

from kvferry.connector.lookahead import (
    extra_window_tokens,
    handoff_lookahead,
    handoff_tokens,
    num_prefill_lookahead_tokens,
    prefill_backoff,
    verified_tokens,
)


@pytest.mark.parametrize(
    ("method", "tokens", "modules", "lookahead"),
    [
        (None, 3, 1, 0),
        ("ngram", 3, 1, 0),
        ("suffix", 3, 1, 0),
        ("draft_model", 3, 1, 0),
        ("eagle3", 3, 1, 1),
        ("eagle", 1, 1, 1),
        ("mtp", 3, 1, 1),
        ("mtp", 3, 3, 3),
        ("mtp", 5, 3, 5),
        ("mtp", 1, 3, 1),
        ("mtp", 0, 3, 0),
    ],
)
def test_lookahead(method: str | None, tokens: int, modules: int, lookahead: int) -> None:  # R31
    assert num_prefill_lookahead_tokens(method, tokens, modules) == lookahead


def test_the_backoff_is_exactly_that_of_the_rule() -> None:  # R32
    got = {(m, n): prefill_backoff(mamba=m, lookahead=n) for m in (False, True) for n in (0, 1, 2, 3, 5)}
    assert [got[False, n] for n in (0, 1, 2, 3, 5)] == [0, 0, 1, 2, 4]
    assert [got[True, n] for n in (0, 1, 2, 3, 5)] == [1, 1, 1, 2, 4]


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3, 5])
def test_every_slot_handed_over_has_read_known_tokens(lookahead: int) -> None:
    """By brute force: slot p of module i reads token p + 1 + i; known is the prompt, and, where prefill computes all of
    it, the first token of the answer."""
    for prompt, mamba in product(range(1, 40), (False, True)):
        tokens = handoff_tokens(prompt, mamba=mamba, lookahead=lookahead)
        last_known = prompt if tokens == prompt else prompt - 1
        assert all(p + 1 + i <= last_known for p in range(tokens) for i in range(lookahead))
        assert tokens >= prompt - prefill_backoff(mamba=mamba, lookahead=lookahead) - 1
        if tokens and lookahead > 1:  # one token more would not work
            assert tokens + lookahead > prompt - 1


@pytest.mark.parametrize("modules", [1, 2, 3])
def test_with_a_state_both_sides_stop_at_one_token(modules: int) -> None:  # R5 R32
    """This holds whatever their numbers of drafts; and every slot before the cut has read only tokens of the prompt."""
    for prompt in range(1, 30):
        cuts = set()
        for depth in (0, 1, 2, 3, 5):
            lookahead = num_prefill_lookahead_tokens("mtp", depth, modules)
            lookahead = handoff_lookahead(lookahead, num_modules=modules, state=True)
            cuts.add(handoff_tokens(prompt, mamba=True, lookahead=lookahead))
        (cut,) = cuts
        assert all(p + 1 + i <= prompt - 1 for p in range(cut) for i in range(modules))
    assert handoff_lookahead(5, num_modules=3, state=False) == 5


def test_verified_tokens_agree_with_the_handoff() -> None:
    for prompt in range(1, 30):
        for lookahead in (2, 3, 5):
            cut = handoff_tokens(prompt, mamba=False, lookahead=lookahead)
            assert verified_tokens(prompt, prompt, lookahead) == cut
    assert verified_tokens(10, 11, 1) == 10
    assert verified_tokens(10, 10, 0) == 10
    assert verified_tokens(2, 2, 5) == 0


def test_window_keeps_the_tail() -> None:  # R34
    assert [extra_window_tokens(n) for n in (0, 1, 2, 3, 5)] == [0, 0, 1, 2, 4]
    assert [extra_window_tokens(n, num_modules=3) for n in (0, 1, 2, 3, 5)] == [2, 2, 2, 2, 4]
    assert [extra_window_tokens(n, num_modules=1) for n in (0, 1)] == [0, 0]
