"""Long lists of token ids are decoded in pieces, as the decoder would at once; what is no list of ids is refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.web import json_ids
from kvferry.web.api_errors import ApiError
from kvferry.web.json_ids import PIECE_BYTES, id_lists


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_ids, "PIECE_BYTES", 8)
        yield


def lists_in(text: str) -> list[list[int]] | None:
    return id_lists(memoryview(text.encode()), "prompt")


IDS = st.lists(st.integers(-5, 60_000), min_size=1, max_size=40)


@given(st.one_of(IDS, st.lists(IDS, min_size=1, max_size=6)), st.sampled_from([None, 0, 3]))
def test_every_list_is_what_the_decoder_makes_of_it(value: Any, indent: int | None) -> None:
    expected = value if isinstance(value[0], list) else [value]
    assert lists_in(json.dumps(value, indent=indent)) == expected


@pytest.mark.parametrize("text", ['"a"', "[]", '["a", "b"]', "{}", "17", "", '[\n"a"]'])
def test_what_is_not_a_list_of_ids_is_left_to_the_decoder(text: str) -> None:
    assert lists_in(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3, 4, 5, 6,, 7]", "[1, 2, 3, 4, 5, 6, 7,]", "[100000000,,1]", "[100000000,]", '[1, 2, 3, 4, 5, "a"]',
        "[1, 2, 3, 4, 5.5]", "[1, 2, [3], 4, 5]", "[[1, 2] [3]]", "[[1, 2],]", "[[1, 2],, [3]]", '[[1, 2], "a]"]',
        "[[1, 2], 3]", "[[1, 2, true]]", "[[1, [2]], 3]", "[[1]]]", "[[1], [2]", "[1, 2, 3, 4]]",
    ],
)  # fmt: skip
def test_a_wrong_list_is_refused_with_the_fields_name(text: str) -> None:
    with pytest.raises(ApiError, match=r"^prompt: .*Send one list of token ids per prompt") as refused:
        lists_in(text)
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_the_decoder_never_gets_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    decode = json_ids._decode

    def noted(raw: bytes) -> list[int]:
        seen.append(len(raw))
        return decode(raw)

    monkeypatch.setattr(json_ids, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(json_ids, "_decode", noted)
    value = [[1000 + i % 48_000 for i in range(8192)] for _ in range(4)] + [[7] * 200_000]
    assert lists_in(json.dumps(value)) == value
    assert max(seen) < PIECE_BYTES + 10
