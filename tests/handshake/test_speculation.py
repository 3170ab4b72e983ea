"""The eight scenarios of speculation, and variants of them. R3 to R7."""

import pytest

from kvferry.handshake.engine_description import SpeculationFacts
from kvferry.handshake.fact import FactKind
from kvferry.handshake.verdict import VerdictKind, verdict
from kvferry.settings import Role
from tests.harness.handshake_examples import decode_facts, eagle, facts

HIDDEN_STATE = ("eagle", "eagle3", "mtp", "dflash", "dspark")


def test_1_depth_differs_and_fits() -> None:  # R5
    answer = verdict(facts(), decode_facts(speculation=eagle(num_tokens=7)))
    assert answer.kind is VerdictKind.COMPATIBLE
    assert [row.fact for row in answer.rows] == ["speculation.num_tokens"]


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"method": "eagle"}, "speculation.method"),  # 2
        ({"draft_model": "org/b"}, "speculation.draft_model"),  # 3
        ({"draft_revision": "v9"}, "speculation.draft_revision"),  # 4
        ({"parallel_drafting": True}, "speculation.parallel_drafting"),  # 5
        ({"draft_kv_dtype": "fp8_e5m2"}, "speculation.draft_kv_dtype"),  # 6
        ({"aux_layers": (1, 2)}, "speculation.aux_layers"),  # 7
        ({"aux_layers": None}, "speculation.aux_layers"),
        ({"draft_code_revision": None}, "speculation.draft_code_revision"),
    ],
)
def test_2_to_7_are_refused(change: dict[str, object], fact: str) -> None:  # R4
    answer = verdict(facts(), decode_facts(speculation=eagle(**change)))
    assert [row.fact for row in answer.blocking()] == [fact]


def test_8_decode_alone_with_a_drafter_is_refused_with_one_row() -> None:  # R3
    for method in (*HIDDEN_STATE, "draft_model"):
        answer = verdict(facts(speculation=None), decode_facts(speculation=eagle(method=method)))
        assert answer.refused
        assert [row.fact for row in answer.rows] == ["speculation.method"]


@pytest.mark.parametrize("on_decode", [None, SpeculationFacts(method="ngram"), SpeculationFacts(method="suffix")])
def test_prefill_alone_with_a_drafter_is_a_note(on_decode: SpeculationFacts | None) -> None:
    """R3 calls it a mismatch; it costs only time, so it is one only in strict mode."""
    for method in (*HIDDEN_STATE, "draft_model"):
        a, b = facts(speculation=eagle(method=method)), decode_facts(speculation=on_decode)
        answer = verdict(a, b)
        assert answer.kind is VerdictKind.NOTES
        assert answer == verdict(b, a).mirrored()
        assert next(row.fact for row in answer.rows if row.kind is not FactKind.INFORMATIVE) == "speculation.method"
        assert "prefill's drafter is wasted work" in answer.notes()[0]
        assert answer.rows[0].remedy().startswith("nothing to do: decode drafts nothing")
        assert verdict(a, b, strict=True).refused
        assert verdict(facts(strict=True, speculation=eagle(method=method)), b).refused


@pytest.mark.parametrize(
    ("role_with", "role_without", "fits"),
    [
        (Role.PREFILL, Role.BOTH, True),
        (Role.BOTH, Role.DECODE, True),
        (Role.BOTH, Role.BOTH, False),
        (Role.BOTH, Role.PREFILL, False),
        (Role.DECODE, Role.BOTH, False),
    ],
)
def test_roles_must_state_which_side_drafts(role_with: Role, role_without: Role, fits: bool) -> None:
    answer = verdict(facts(role=role_with), facts(role=role_without, speculation=None))
    assert answer.refused is not fits


def test_draft_attention_backend_differs_and_fits() -> None:  # R5
    answer = verdict(facts(), decode_facts(speculation=eagle(attention_backend="TRITON")))
    assert answer.kind is VerdictKind.COMPATIBLE


@pytest.mark.parametrize("spelling", ["fp8", "fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"])
def test_explicit_fp8_equals_inherited_fp8(spelling: str) -> None:  # R6
    inherited = facts(kv_dtype="fp8", speculation=eagle(draft_kv_dtype=None))
    explicit = decode_facts(kv_dtype="fp8_e4m3", speculation=eagle(draft_kv_dtype=spelling))
    assert verdict(inherited, explicit) == verdict(facts(), decode_facts())


def test_inherited_draft_dtype_follows_the_target() -> None:  # R6
    answer = verdict(facts(kv_dtype="fp8"), decode_facts())
    assert [row.fact for row in answer.blocking()] == ["kv.dtype", "speculation.draft_kv_dtype"]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_stateless_on_one_side_is_a_note(method: str) -> None:  # R3 R7
    stateless = SpeculationFacts(method=method, num_tokens=4)
    answer = verdict(facts(speculation=None), decode_facts(speculation=stateless))
    assert answer.kind is VerdictKind.NOTES
    assert answer.rows[0].fact == "speculation.stateless_method"
    assert verdict(facts(speculation=stateless), decode_facts(speculation=stateless)).kind is VerdictKind.COMPATIBLE


def test_stateless_on_prefill_beside_a_hidden_state_method_is_refused() -> None:  # R3
    assert verdict(facts(speculation=SpeculationFacts(method="ngram")), decode_facts()).refused


def test_draft_model_has_an_identity() -> None:  # R7
    one, other = eagle(method="draft_model"), eagle(method="draft_model", draft_model="org/other")
    assert [row.fact for row in verdict(facts(speculation=one), decode_facts(speculation=other)).blocking()] == [
        "speculation.draft_model"
    ]


def test_a_path_and_a_name_of_one_draft_agree() -> None:
    name = eagle(draft_fingerprint="kf1-d")
    path = eagle(draft_fingerprint="kf1-d", draft_model="/models/draft")
    answer = verdict(facts(speculation=name), decode_facts(speculation=path))
    assert answer.kind is VerdictKind.COMPATIBLE


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "qwen3_next_mtp", "MTP"])
def test_every_engines_mtp_is_mtp(name: str) -> None:
    assert facts(speculation=eagle(method=name)).get("speculation.method") == "mtp"
