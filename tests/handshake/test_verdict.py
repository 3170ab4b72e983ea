"""Verdicts are symmetric, total and explained, and agree with the digest. R1, R10."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.handshake.digest import digest
from kvferry.handshake.fact import FactKind
from kvferry.handshake.facts import Fact, Facts
from kvferry.handshake.table import FACTS
from kvferry.handshake.verdict import VerdictKind, verdict
from kvferry.settings import Role
from kvferry.wire.versions import FIND
from tests.handshake.test_facts import VALUES
from tests.handshake.test_flips import FLIPS
from tests.harness.handshake_examples import decode_facts, facts

ANY_FACTS = st.dictionaries(
    st.one_of(st.sampled_from(sorted(FACTS)), st.text(min_size=1, max_size=12)),
    st.tuples(VALUES, st.sampled_from(FactKind)),
    max_size=12,
).map(lambda values: Facts(Fact(name, value, kind) for name, (value, kind) in values.items()))


@given(ANY_FACTS, ANY_FACTS, st.booleans())
def test_total_and_symmetric(a: Facts, b: Facts, strict: bool) -> None:  # R1 R10
    answer = verdict(a, b, strict=strict)
    assert verdict(b, a, strict=strict) == answer.mirrored()
    assert answer.refused is bool(answer.blocking())
    for row in answer.blocking():
        assert row.fact in answer.explain().replace("\\", "") or not row.fact.isascii() or not row.fact.isprintable()
    answer.refusal("a", "b")
    json.dumps(answer.to_json())


@given(ANY_FACTS)
def test_facts_fit_themselves(a: Facts) -> None:
    both = a.replace({"role": "both"})
    assert verdict(both, both).kind is VerdictKind.COMPATIBLE


@given(
    st.lists(st.sampled_from(sorted(set(FLIPS) - {"role", "handshake.strict"})), max_size=4),
    st.lists(st.sampled_from(sorted(set(FLIPS) - {"role", "handshake.strict"})), max_size=4),
    st.booleans(),
)
def test_digests_are_equal_exactly_when_the_verdict_has_no_row_that_must_match(
    one: list[str], other: list[str], strict: bool
) -> None:  # R1
    """Equal digests mean that the pair fits. A pair that fits may still have digests that differ: see below."""

    def changes(names: list[str]) -> dict[str, object]:
        return {key: value for name in names for key, value in FLIPS[name][1].items()}

    a, b = facts(**changes(one)), decode_facts(**changes(other))
    answer = verdict(a, b, strict=strict)
    equal = digest(a, strict=strict) == digest(b, strict=strict)
    if equal:
        assert not answer.refused
    lacked = [row for row in answer.rows if row not in answer.blocking() and FACTS[row.fact].may_lack is not None]
    if not answer.refused and not lacked:
        assert equal


def test_a_drafter_on_prefill_alone_fits_although_the_digests_differ() -> None:  # R1 R3
    prefill, decode = facts(), decode_facts(speculation=None)
    assert not verdict(prefill, decode).refused
    assert digest(prefill) != digest(decode)


def test_a_peer_cannot_weaken_a_fact() -> None:
    lying = Facts(
        Fact(fact.name, "fp8_e4m3" if fact.name == "kv.dtype" else fact.value, FactKind.INFORMATIVE)
        for fact in decode_facts()
    )
    assert [row.fact for row in verdict(facts(), lying).blocking()] == ["kv.dtype"]
    silent = Facts(fact for fact in decode_facts() if fact.name != "kv.dtype")
    assert [row.fact for row in verdict(facts(), silent).blocking()] == ["kv.dtype"]


def test_a_fact_that_only_a_newer_release_knows() -> None:  # R8 R10
    newer = decode_facts().replace({"kv.spin": "up"})
    answer = verdict(facts(), newer)
    assert answer.refused
    assert answer.rows[0].remedy("old", "new") == (
        "on old: upgrade kvferry: only the other side knows the fact 'kv.spin'"
    )
    assert verdict(facts(), decode_facts().replace({"kv.spin": None})).kind is VerdictKind.COMPATIBLE


def test_bridged_differences_say_how_and_at_what_price() -> None:
    answer = verdict(facts(), decode_facts(block_tokens=(32, 32)))
    assert answer.kind is VerdictKind.NOTES
    assert answer.explain("p", "d") == (
        "p and d can share a cache; what differs is bridged\n"
        "  kv.block_tokens: p=[16,16] d=[32,32]; "
        "nothing to do: tokens are matched by position; runs are as long as the smaller block"
    )


def test_the_refusal_is_one_line_with_everything() -> None:  # R10
    answer = verdict(facts(speculation=None), decode_facts(kv_dtype="fp8", head_size=64, speculation=None))
    assert answer.refusal("p0", "d0") == (
        "p0 and d0 cannot share a cache: "
        "model.head_size: p0=128 d0=64, change it on d0: kvferry serve org/model; "
        "kv.dtype: p0='bfloat16' d0='fp8_e4m3', change it on d0: kvferry serve --kv-dtype bfloat16"
    )


def test_json_has_the_promised_names() -> None:
    result = verdict(facts(), decode_facts(kv_dtype="fp8")).to_json()
    assert result["verdict"] == "refused"
    rows = result["rows"]
    assert isinstance(rows, list)
    assert {"fact", "class", "a", "b", "remedy"} <= rows[0].keys()


def test_a_peers_value_is_quoted_in_what_an_operator_may_paste() -> None:
    answer = verdict(decode_facts(), facts().replace({"kv.dtype": "x; rm -rf ~ {model}\n"}))
    assert answer.rows[0].remedy_a == "kvferry serve --kv-dtype 'x; rm -rf ~ {model}\\n'"


@pytest.mark.parametrize(("role", "other"), [(Role.PREFILL, "decode"), (Role.DECODE, "prefill")])
def test_one_of_two_equal_sides_is_asked_to_take_the_other_role(role: Role, other: str) -> None:  # R10
    older = facts(role=role, protocol=FIND - 1)
    row = verdict(facts(role=role), older).blocking()[0]
    assert row.remedy() == f"on a: kvferry serve --role {other}, or on b: kvferry serve --role {other}"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_two_engines_of_one_role_pair_to_fetch_if_both_can(role: Role) -> None:  # R39
    answer = verdict(facts(role=role), facts(role=role))
    assert (answer.kind, [row.fact for row in answer.rows]) == (VerdictKind.NOTES, ["role"])
    assert "hand nothing over to each other" in answer.notes()[0]
