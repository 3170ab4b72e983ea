"""R38: one salt for the same inputs, whichever engine writes it."""

import pytest

from kvferry.wire.prompt_digest import Prompt
from kvferry.wire.salt import make_salt

TOKENS = list(range(100))


def test_without_inputs_there_is_no_salt() -> None:
    assert make_salt() == make_salt(cache_salt=None) == make_salt(cache_salt="") == ""


def test_different_inputs_never_make_one_salt() -> None:
    salts = [
        make_salt(),
        make_salt(cache_salt="a"),
        make_salt(cache_salt="b"),
        make_salt(adapter="a"),
        make_salt(cache_salt="a", adapter="a"),
        make_salt(cache_salt="a'), ('lora', 'a"),
        make_salt(inputs=[("mm", "a", 0, 4)]),
        make_salt(inputs=[("mm", "a", 4, 4)]),
    ]
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize("salt", [make_salt(cache_salt="a"), make_salt(adapter="a")])
def test_prompts_under_different_salts_have_no_prefix_in_common(salt: str) -> None:
    ours, theirs = Prompt.of(TOKENS, salt), Prompt.of(TOKENS, make_salt(cache_salt="b"))
    assert ours.agreement(theirs.stated()).num_tokens == 0
    assert ours.agreement(Prompt.of(TOKENS, salt).stated()).whole
