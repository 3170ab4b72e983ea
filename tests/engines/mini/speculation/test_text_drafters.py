"""Drafts from the text alone: n-grams and counted suffixes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines.mini.speculation.ngram import NgramDrafter
from kvferry.engines.mini.speculation.suffix import MAX_COUNTED, MAX_PROMPT_TOKENS, SuffixDrafter
from kvferry.ids import RequestId

A, B = RequestId("a"), RequestId("b")
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def suffix_drafter(*, cached: int = 1000, factor: float = 2.0, share: float = 0.1) -> SuffixDrafter:
    return SuffixDrafter(depth=8, max_cached_tokens=cached, max_factor=factor, min_share=share)


def test_ngram_takes_what_followed_the_last_time() -> None:
    drafter = NgramDrafter(shortest=2, longest=3)
    assert drafter.propose(A, [1, 2, 3, 9, 1, 2, 3, 7, 8, 1, 2, 3], 3) == [7, 8, 1]
    assert drafter.propose(A, [1, 2, 3, 9, 1, 2, 3, 7, 8, 1, 2, 3, 7], 6) == [8, 1, 2, 3, 7, 8]
    assert drafter.propose(B, [1, 2, 3], 3) == []


def test_ngram_prefers_the_longest_run() -> None:
    # 2, 3 were last followed by 5; 1, 2, 3 was followed by 4.
    assert NgramDrafter(shortest=2, longest=3).propose(A, [1, 2, 3, 4, 0, 2, 3, 5, 0, 1, 2, 3], 1) == [4]


def by_search(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                following = tokens[end:]
                return (following * count)[:count]
    return []


@given(tokens=TEXTS, cut=st.integers(1, 60))
def test_ngram_index_agrees_with_a_search(tokens: list[int], cut: int) -> None:
    drafter = NgramDrafter(shortest=1, longest=4)
    drafter.propose(A, tokens[:cut], 4)  # the index grows with the text
    assert drafter.propose(A, tokens, 4) == by_search(tokens, 1, 4, 4)


def test_suffix_prefers_the_more_frequent_continuation() -> None:
    text = [1, 2, 5, 1, 2, 6, 1, 2, 6, 1, 2]
    assert suffix_drafter().propose(A, text, 1) == [6]


def test_suffix_drafts_more_after_a_long_match() -> None:
    text = [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert suffix_drafter(factor=1.0).propose(A, [7, 1, 2, 8, 7], 4) == [1]
    assert suffix_drafter(factor=1.0).propose(A, text, 8) == [4, 5, 6, 7]


def test_suffix_stops_where_the_share_is_small() -> None:
    text = [1, 2, 1, 3, 1, 4, 1, 5, 1]
    assert suffix_drafter(share=0.5).propose(A, text, 4) == []


def test_suffix_remembers_answers_of_other_requests_and_drops_the_oldest() -> None:
    drafter = suffix_drafter(cached=6)
    drafter.propose(A, [1, 2, 3, 4, 5], 2)
    drafter.forget(A, [1, 2, 3, 4, 5])
    assert drafter.propose(B, [9, 1, 2, 3], 2) == [4, 5]
    drafter.forget(B, [6, 7, 6, 7])
    assert drafter.propose(A, [9, 1, 2, 3], 2) == []  # six tokens at most, so the first answer is gone


@given(texts=st.lists(TEXTS, min_size=1, max_size=6))
def test_suffix_counts_are_gone_with_their_texts(texts: list[list[int]]) -> None:
    drafter = suffix_drafter(cached=60)
    for text in texts:
        drafter.propose(A, text, 1)
        drafter.forget(A, text)
    while drafter._kept:
        drafter._to_count.append(drafter._answers.add(drafter._kept.popleft(), -1))
    while drafter._to_count:
        drafter._count_answers()
    assert not drafter._answers._root.children


def nodes(tree: Any) -> int:
    """Counts the nodes of a suffix drafter's tree."""
    return sum(int(node.count) for node in tree._root.children.values())


def test_suffix_counts_a_long_text_over_several_steps() -> None:
    """Counting is slow: no step waits for a whole prompt, or for a whole earlier answer."""
    drafter, text = suffix_drafter(cached=10_000), [number * 7919 % 1009 for number in range(1000)]
    counted = []
    for _ in range(9):
        drafter.propose(A, text, 1)
        counted.append(nodes(drafter._own[A]))
    assert counted == [*range(MAX_COUNTED, 1000, MAX_COUNTED), 1000, 1000]
    drafter.forget(A, text)
    drafter.propose(B, [1], 1)
    assert nodes(drafter._answers) == MAX_COUNTED


def test_suffix_counts_only_the_end_of_a_very_long_prompt() -> None:
    drafter = suffix_drafter()
    drafter.propose(A, range(3 * MAX_PROMPT_TOKENS), 1)
    assert min(drafter._own[A]._root.children) == 2 * MAX_PROMPT_TOKENS


@given(tokens=TEXTS)
def test_drafts_are_tokens_of_the_text(tokens: list[int]) -> None:
    for drafter in (suffix_drafter(), NgramDrafter(shortest=1, longest=4)):
        drafts = drafter.propose(A, tokens, 5)
        assert len(drafts) <= 5
        assert set(drafts) <= set(tokens)
