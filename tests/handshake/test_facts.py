"""Effective values, and what facts refuse."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ConfigError, MalformedMessage
from kvferry.handshake.digest import digest, digest_text
from kvferry.handshake.fact import FactKind
from kvferry.handshake.facts import MAX_FACTS, Fact, Facts
from kvferry.handshake.values import FactValue, canonical, run_length
from kvferry.handshake.verdict import VerdictKind, verdict
from tests.harness.handshake_examples import decode_facts, facts

VALUES: st.SearchStrategy[FactValue] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.one_of(st.integers(-5, 5), st.text(max_size=5)), max_size=4).map(tuple),
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dtype": "auto", "checkpoint_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"dtype": "torch.bfloat16"}, {"dtype": "bf16"}),
        ({"kv_dtype": "auto"}, {"kv_dtype": "bfloat16"}),
        ({"kv_dtype": "fp8"}, {"kv_dtype": "fp8_e4m3"}),
        ({"kv_dtype": "float8_e4m3fn"}, {"kv_dtype": "FP8"}),
        ({"revision": None}, {"revision": "main"}),
        ({"model_id": "org/model"}, {"model_id": "/models/model"}),
        ({"attention_backend": "flash_attn"}, {"attention_backend": "FLASH_ATTN"}),
        ({"rope": {"a": 1.0, "b": 2}}, {"rope": {"b": 2, "a": 1}}),
        ({"packings": ("x", "y")}, {"packings": ("y", "x", "x")}),
        ({"state_dtypes": ("ssm=fp32",)}, {"state_dtypes": ("ssm=float32",)}),
        ({"quantization": "FP8"}, {"quantization": "fp8"}),
    ],
)
def test_equal_meanings_are_equal(one: dict[str, object], other: dict[str, object]) -> None:  # R6
    answer = verdict(facts(**one), decode_facts(**other))
    assert answer.kind is VerdictKind.COMPATIBLE
    assert digest(facts(**one)) == digest(decode_facts(**other))


def test_fp8_of_another_format_is_not_equal() -> None:
    assert verdict(facts(kv_dtype="fp8"), decode_facts(kv_dtype="fp8_e5m2")).refused
    assert verdict(facts(kv_dtype="fp8"), decode_facts(kv_dtype="float8_e4m3fnuz")).refused


def test_auto_without_a_checkpoint_dtype_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"dtype='auto' means 'the same as the checkpoint'.*--dtype bfloat16"):
        facts(dtype="auto", checkpoint_dtype=None)


def test_names_are_used_without_a_fingerprint() -> None:
    assert verdict(facts(fingerprint=None), decode_facts(fingerprint=None, model_id="org/x")).refused
    answer = verdict(facts(fingerprint=None), decode_facts())
    assert [row.fact for row in answer.blocking()] == ["model.fingerprint"]


def test_facts_survive_json() -> None:
    original = facts(packings=("a",))
    again = Facts.from_json(json.loads(json.dumps(original.to_json())))
    assert again == original
    assert digest(again) == digest(original)


def test_saved_facts_without_classes_get_those_of_the_table() -> None:
    plain = {"kv.dtype": {"value": "bfloat16"}, "parallel.tp": {"value": 2}, "new.fact": {"value": 1}}
    read = Facts.from_json(plain)
    assert [read.kind(name) for name in plain] == [FactKind.MUST_MATCH, FactKind.BRIDGED, FactKind.MUST_MATCH]


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {"a": 1},
        {"a": {"value": {"deep": 1}}},
        {"a": {"value": 1, "class": "no such class"}},
        {"": {"value": 1}},
        {"a" * 65: {"value": 1}},
        {"a": {"value": "x" * 4097}},
        {f"f{i}": {"value": i} for i in range(MAX_FACTS + 1)},
    ],
)
def test_what_is_no_set_of_facts_is_refused(raw: object) -> None:  # R20
    with pytest.raises(MalformedMessage):
        Facts.from_json(raw)


def test_a_duplicate_fact_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"'kv\.dtype' is reported twice"):
        Facts([Fact("kv.dtype", "a", FactKind.MUST_MATCH), Fact("kv.dtype", "b", FactKind.MUST_MATCH)])


@given(VALUES, VALUES)
def test_canonical_is_total_and_keeps_values_apart(one: FactValue, other: FactValue) -> None:
    if canonical(one) == canonical(other) and not (isinstance(one, float) or isinstance(other, float)):
        assert one == other
        assert type(one) is type(other)


def test_canonical_edges() -> None:
    assert canonical(True) != canonical(1)
    assert canonical(1.0) == canonical(1)
    assert canonical(math.nan) == "nan"
    assert canonical("1") != canonical(1)


def test_run_length() -> None:
    assert run_length(["full", "full", "window"]) == "full*2 window"
    assert run_length([]) is None


def test_digest_is_pinned() -> None:
    """Bytes that version 1 hashed. Never edit: peers of every release compute this digest."""
    listed = [
        Fact("b", "x", FactKind.MUST_MATCH),
        Fact("a", (1, "é"), FactKind.MUST_MATCH),
        Fact("c", 1.0, FactKind.MUST_MATCH),
        Fact("d", None, FactKind.MUST_MATCH),
        Fact("e", 5, FactKind.BRIDGED),
    ]
    assert digest_text(Facts(listed)) == '"a"=[1,"\\u00e9"]\n"b"="x"\n"c"=1\n'
    assert digest(Facts(listed)).hex() == "1c09e7ce43ccc23a417e77231fca3548efe1eef7a0853012f92e176706d5c984"
