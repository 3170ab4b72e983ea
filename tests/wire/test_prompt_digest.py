"""How much two prompts have in common, as their digests say; compared with the tokens themselves. R51."""

import hashlib
import pickle
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.wire.prompt_digest import (
    DIGEST_BYTES,
    MAX_LINKS,
    MAX_MARKS,
    UNIT_TOKENS,
    Agreement,
    Prompt,
    StatedPrompt,
    pack_tokens,
)

TOKENS = tuple(range(1000, 1300))


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Returns the number of leading tokens that are equal, token by token."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@given(st.integers(0, 250), st.integers(0, 40), st.integers(0, 40), st.integers(1, 70), st.booleans())
def test_no_more_than_the_common_prefix_and_no_less_than_its_whole_units(
    num_same: int, more: int, others: int, unit: int, tells_length: bool
) -> None:
    ours = (*TOKENS[:num_same], *range(5000, 5000 + more))
    theirs = (*TOKENS[:num_same], *range(9000, 9000 + others))
    truth = common(ours, theirs)
    stated = Prompt.of(theirs).stated(len(ours) if tells_length else None, unit=unit)
    found = Prompt.of(ours).agreement(stated)
    assert truth // unit * unit <= found.num_tokens <= truth
    assert found.whole == (ours == theirs)
    if truth == len(theirs) or (truth == len(ours) and tells_length):
        assert found.num_tokens == truth  # one begins with all of the other


def test_a_shorter_prompt_is_a_prefix_and_not_the_same_prompt() -> None:
    assert Prompt.of(TOKENS[:80]).agreement(Prompt.of(TOKENS[:79]).stated()) == Agreement(79, whole=False)
    assert Prompt.of(TOKENS[:80]).agreement(Prompt.of(TOKENS[:80]).stated()) == Agreement(80, whole=True)


def test_another_salt_is_another_prompt_from_the_first_token_on() -> None:
    ours = Prompt.of(TOKENS, "tenant a")
    assert ours.agreement(Prompt.of(TOKENS, "tenant b").stated()) == Agreement(0, whole=False)
    assert ours.agreement(Prompt.of(TOKENS).stated()) == Agreement(0, whole=False)
    assert ours.agreement(Prompt.of(TOKENS, "tenant a").stated()) == Agreement(len(TOKENS), whole=True)


def test_without_links_a_prompt_is_the_same_or_has_nothing_in_common() -> None:
    stated = Prompt.of((*TOKENS[:100], 7)).stated(links=False)
    assert not stated.links
    assert Prompt.of(TOKENS).agreement(stated) == Agreement(0, whole=False)


def test_the_digest_is_what_the_wire_page_says() -> None:
    ids = struct.pack("<3i", 1, 2, 500)
    salt = hashlib.sha256(b"salt").digest()[:16]
    assert Prompt.of([1, 2, 500]).digest == hashlib.sha256(b"kvferry prompt 1" + bytes(16) + ids).digest()[:16]
    assert Prompt.of([1, 2, 500], "salt").digest == hashlib.sha256(b"kvferry prompt 1" + salt + ids).digest()[:16]
    assert Prompt.of([1, 2, 500]).digest.hex() == "ca44a06b8621fdf09dcea8c856747579"
    assert Prompt.of([1, 2, 500], "salt").digest.hex() == "8d3be405cc8d5aa95dde37a221e29c19"


def test_links_are_digests_of_prefixes() -> None:
    prompt = Prompt.of(TOKENS)
    links = prompt.stated().links
    assert len(links) == len(TOKENS) // UNIT_TOKENS * DIGEST_BYTES
    for number in range(len(TOKENS) // UNIT_TOKENS):
        link = links[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        assert link == Prompt.of(TOKENS[: (number + 1) * UNIT_TOKENS]).digest


@pytest.mark.parametrize("num_tokens", [0, 63, 64, 1024, 1087, 1088, 8000, 40_000])
def test_there_are_few_links_and_they_cost_no_second_pass(num_tokens: int) -> None:
    prompt = Prompt.of(range(num_tokens))
    stated = prompt.stated()
    assert len(stated.links) == num_tokens // stated.unit_tokens * DIGEST_BYTES
    assert num_tokens // stated.unit_tokens <= MAX_LINKS
    assert stated.unit_tokens == UNIT_TOKENS or num_tokens // stated.unit_tokens > MAX_LINKS // 2 - 1
    assert stated.marks == ((num_tokens, Prompt.of(range(num_tokens)).digest),)


def test_a_prompt_travels_to_the_ranks_with_its_digest() -> None:
    prompt = Prompt.of(TOKENS, "tenant")
    before, digest = pickle.loads(pickle.dumps(prompt)), prompt.digest
    after = pickle.loads(pickle.dumps(prompt))
    assert before == after == prompt
    assert before.digest == after.digest == digest


def test_an_id_that_no_tokenizer_has_is_packed_all_the_same() -> None:
    assert Prompt.of([1 << 40, -1, 3]).num_tokens == 3
    assert pack_tokens([3, 1 << 20]) == bytes([3, 0, 0, 0, 0, 0, 16, 0])


@given(
    st.binary(max_size=200), st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=16, max_size=16)), max_size=4)
)
def test_a_peer_that_states_rubbish_gets_nothing(links: bytes, marks: list[tuple[int, bytes]]) -> None:
    stated = StatedPrompt(10, tuple(marks), 1, links)
    assert Prompt.of(TOKENS).agreement(stated) == Agreement(0, whole=False)


@pytest.mark.parametrize(
    "stated",
    [
        [1, [[1, b"short"]], 64, b""],
        [1, [[1, bytes(16)]] * (MAX_MARKS + 1), 64, b""],
        [-1, [], 64, b""],
        [1, [], 0, b""],
        [1, [], 64, bytes((1 << 20) + 1)],
    ],
)
def test_what_is_out_of_bounds_is_refused(stated: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(stated), type=StatedPrompt)
