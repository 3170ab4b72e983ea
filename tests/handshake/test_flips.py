"""Each fact, flipped alone: the verdict names it, both values and a remedy, the same on both sides. R1, R2, R10."""

import argparse
from dataclasses import fields

import pytest

from kvferry.cli import serve
from kvferry.handshake.engine_description import EngineDescription, SpeculationFacts
from kvferry.handshake.fact import FactKind
from kvferry.handshake.table import FACTS
from kvferry.handshake.verdict import VerdictKind, verdict
from kvferry.settings import Role, TransferMode
from kvferry.wire.versions import FIND
from tests.harness.handshake_examples import ENGINE, decode_facts, eagle, facts

FLIPS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    # fact: (changes on prefill, changes on decode)
    "handshake.strict": ({}, {"strict": True}),
    "role": ({"protocol": FIND - 1}, {"protocol": FIND - 1, "role": Role.PREFILL}),
    "transfer.mode": ({}, {"mode": TransferMode.PUSH}),
    "protocol": ({}, {"protocol": 1}),
    "engine.name": ({}, {"engine": "vllm"}),
    "engine.version": ({}, {"engine_version": "0.2.0"}),
    "model.fingerprint": ({}, {"fingerprint": "kf1-other"}),
    "model.id": ({"fingerprint": None}, {"fingerprint": None, "model_id": "org/other"}),
    "model.revision": ({"fingerprint": None}, {"fingerprint": None, "revision": "r2"}),
    "model.tokenizer": ({}, {"tokenizer": "kt1-other"}),
    "model.quantization": ({}, {"quantization": "fp8"}),
    "model.dtype": ({"kv_dtype": "bfloat16"}, {"kv_dtype": "bfloat16", "dtype": "float16"}),
    "model.total_kv_heads": ({}, {"total_kv_heads": 4}),
    "model.head_size": ({}, {"head_size": 64}),
    "model.hidden_layers": ({}, {"hidden_layers": 31}),
    "model.layer_kinds": ({}, {"layer_kinds": ("full",) * 32}),
    "model.rope": ({}, {"rope": {"rope_type": "llama3", "rope_theta": 10000.0}}),
    "model.window_tokens": ({}, {"window_tokens": 1024}),
    "model.max_context_tokens": ({}, {"max_context_tokens": 4096}),
    "kv.dtype": ({"speculation": None}, {"speculation": None, "kv_dtype": "fp8"}),
    "kv.scales": ({}, {"kv_scales": "checkpoint"}),
    "kv.packings": ({"packings": ("cpu-avx512",)}, {"packings": ("cpu-avx2",)}),
    "kv.state_dtypes": ({"state_dtypes": ("ssm=float32",)}, {"state_dtypes": ("ssm=bfloat16",)}),
    "kv.layout": ({}, {"kv_layout": "HND"}),
    "kv.block_tokens": ({}, {"block_tokens": (32, 32)}),
    "kv.cross_layer_blocks": ({}, {"cross_layer_blocks": True}),
    "kv.hma": ({}, {"hma": True}),
    "kv.groups": ({}, {"layer_groups": {"layers.0.attn": 0, "layers.1.attn": 0}}),
    "attention.backend": ({}, {"attention_backend": "FLASH_ATTN"}),
    "parallel.tp": ({}, {"tp": 2}),
    "parallel.pp": ({}, {"pp": 2}),
    "parallel.cp": ({}, {"cp": 2}),
    "speculation.method": ({}, {"speculation": eagle(method="eagle")}),
    "speculation.stateless_method": (
        {"speculation": None},
        {"speculation": SpeculationFacts(method="ngram")},
    ),
    "speculation.draft_fingerprint": (
        {"speculation": eagle(draft_fingerprint="kf1-a")},
        {"speculation": eagle(draft_fingerprint="kf1-b")},
    ),
    "speculation.draft_model": ({}, {"speculation": eagle(draft_model="org/other-draft")}),
    "speculation.draft_revision": ({}, {"speculation": eagle(draft_revision="v2")}),
    "speculation.draft_code_revision": ({}, {"speculation": eagle(draft_code_revision="c2")}),
    "speculation.parallel_drafting": ({}, {"speculation": eagle(parallel_drafting=True)}),
    "speculation.draft_kv_dtype": ({}, {"speculation": eagle(draft_kv_dtype="fp8")}),
    "speculation.aux_layers": ({}, {"speculation": eagle(aux_layers=(2, 16, 30))}),
    "speculation.num_layers": ({}, {"speculation": eagle(num_layers=2)}),
    "speculation.num_tokens": ({}, {"speculation": eagle(num_tokens=5)}),
    "speculation.attention_backend": ({}, {"speculation": eagle(attention_backend="FLASHINFER")}),
}

R2_FACTORS = {
    "engine.name",
    "engine.version",
    "protocol",
    "model.id",
    "model.dtype",
    "model.total_kv_heads",
    "model.head_size",
    "model.hidden_layers",
    "attention.backend",
    "kv.dtype",
    "kv.cross_layer_blocks",
    "kv.hma",
}
R4_FACTORS = {
    "speculation.method",
    "speculation.draft_model",
    "speculation.draft_revision",
    "speculation.draft_code_revision",
    "speculation.parallel_drafting",
    "speculation.draft_kv_dtype",
    "speculation.aux_layers",
}


def test_every_fact_has_a_flip() -> None:
    assert FLIPS.keys() == FACTS.keys()


def test_every_field_of_an_engine_is_flipped() -> None:
    flipped = {name for _, changes in FLIPS.values() for name in changes}
    assert flipped >= {field.name for field in fields(EngineDescription)} - {"checkpoint_dtype"}
    assert {field.name for field in fields(SpeculationFacts)} == {
        name.removeprefix("speculation.") for name in FACTS if name.startswith("speculation.")
    } - {"stateless_method"}


@pytest.mark.parametrize("name", FACTS)
def test_a_flip_names_exactly_that_fact(name: str) -> None:  # R2 R3 R4 R10 R13
    on_prefill, on_decode = FLIPS[name]
    prefill, decode = facts(**on_prefill), decode_facts(**on_decode)
    answer = verdict(prefill, decode)
    assert [row.fact for row in answer.rows] == [name]
    row = answer.rows[0]
    assert (row.a, row.b) == (prefill.get(name), decode.get(name))
    assert row.a != row.b or name == "role"
    assert row.kind is FACTS[name].kind
    assert answer.refused is (row.kind is FactKind.MUST_MATCH)
    assert len(row.remedy("prefill-0", "decode-0")) > 12
    assert "{value}" not in row.remedy_a + row.remedy_b
    assert "{model}" not in row.remedy_a + row.remedy_b
    assert verdict(decode, prefill) == answer.mirrored()  # the same on both sides
    if answer.refused:
        text = answer.refusal("prefill-0", "decode-0")
        assert name in text
        assert "prefill-0" in text
        assert "decode-0" in text


@pytest.mark.parametrize("name", sorted(R2_FACTORS | R4_FACTORS | {"transfer.mode"}))
def test_strict_mode_refuses_every_factor_of_r2(name: str) -> None:  # R2 R3 R4 R13
    on_prefill, on_decode = FLIPS[name]
    answer = verdict(facts(**on_prefill), decode_facts(**on_decode), strict=True)
    assert [row.fact for row in answer.blocking()] == [name]


def test_strict_mode_compares_exactly_those_beyond_what_always_must_match() -> None:  # R2
    promoted = {name for name, spec in FACTS.items() if spec.strict}
    assert promoted == R2_FACTORS | R4_FACTORS | {"transfer.mode"}


def test_strict_on_one_side_is_strict_on_both() -> None:
    strict, lenient = facts(strict=True), decode_facts(tp=2, hma=True)
    assert [row.fact for row in verdict(strict, lenient).blocking()] == ["kv.hma"]
    assert verdict(lenient, strict).refused


def test_the_remedy_makes_decode_follow_prefill() -> None:  # R10
    answer = verdict(decode_facts(kv_dtype="fp8", engine="vllm", speculation=None), facts(speculation=None))
    row = next(row for row in answer.rows if row.fact == "kv.dtype")
    assert row.remedy("d0", "p0") == "on d0: --kv-cache-dtype bfloat16"


def test_the_remedy_gives_the_side_without_a_drafter_one() -> None:  # R3 R10
    answer = verdict(facts(speculation=None, engine="vllm"), decode_facts(engine="vllm"))
    assert [row.fact for row in answer.rows] == ["speculation.method"]
    assert answer.rows[0].remedy("p0", "d0") == (
        """on p0: --speculative-config '{"method": "eagle3", "model": "org/draft", "revision": "v1", """
        """"num_speculative_tokens": 3, "code_revision": "c1", "attention_backend": "TORCH_SDPA"}'"""
    )


def test_the_remedy_says_how_to_get_a_drafter() -> None:  # R10
    answer = verdict(facts(speculation=None), decode_facts(engine="vllm"))
    row = next(row for row in answer.rows if row.fact == "speculation.method")
    assert row.remedy("p0", "d0") == (
        """on p0: kvferry serve --speculative-config '{"method": "eagle3", "model": "org/draft", "revision": "v1", """
        """"num_speculative_tokens": 3}'"""
    )


def test_every_remedy_for_kvferry_serve_can_be_typed() -> None:  # R10
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    for spec in FACTS.values():
        text = spec.settings.get("mini", "")
        assert {word for word in text.split() if word.startswith("--")} <= known, f"{spec.name}: {text}"
        assert spec.settings.get("vllm", spec.settings.get("")), spec.name


def test_the_remedy_is_to_upgrade_the_older_side() -> None:  # R10
    answer = verdict(facts(engine_version="0.10.0"), decode_facts(engine_version="0.9.1"), strict=True)
    assert answer.rows[0].remedy("p0", "d0") == "on d0: install version 0.10.0"


def test_engine_fits_itself() -> None:
    assert verdict(facts(), decode_facts()).kind is VerdictKind.COMPATIBLE
    assert ENGINE.model_id


@pytest.mark.parametrize("engine", ["mini", "vllm", "other"])
@pytest.mark.parametrize("name", [name for name, spec in FACTS.items() if spec.kind is FactKind.MUST_MATCH])
def test_a_remedy_names_an_action_whichever_side_has_nothing(name: str, engine: str) -> None:  # R10
    on_prefill, on_decode = FLIPS[name]
    for one, other in ((on_prefill, on_decode), (on_decode, on_prefill)):
        rows = verdict(facts(engine=engine, **one), decode_facts(engine=engine, **other)).blocking()
        for remedy in (text for row in rows for text in (row.remedy_a, row.remedy_b)):
            assert len(remedy) > 12, remedy
            assert not remedy.startswith("has no setting"), remedy
            assert "change it on the other side" not in remedy, "neither side could"


@pytest.mark.parametrize(
    ("on_prefill", "on_decode", "remedy"),
    [
        ({"hma": True}, {}, "--no-disable-hybrid-kv-cache-manager"),
        ({}, {"hma": True}, "--disable-hybrid-kv-cache-manager"),
        ({"cross_layer_blocks": True}, {}, "VLLM_KV_CACHE_LAYOUT=BLNHC"),
        ({}, {"cross_layer_blocks": True}, "VLLM_KV_CACHE_LAYOUT=LBNHC"),
    ],
)
def test_the_remedy_for_vllm_is_the_flag_for_the_value(
    on_prefill: dict[str, object], on_decode: dict[str, object], remedy: str
) -> None:  # R10
    answer = verdict(facts(engine="vllm", **on_prefill), decode_facts(engine="vllm", **on_decode), strict=True)
    assert [row.remedy("p0", "d0") for row in answer.blocking()] == [f"on d0: {remedy}"]


def test_the_remedy_for_vllm_names_the_role_in_its_words() -> None:  # R10
    row = verdict(facts(engine="vllm"), facts(engine="vllm", protocol=FIND - 1)).blocking()[0]
    assert row.remedy_a == """--kv-transfer-config '{"kv_role": "kv_consumer"}'"""
