"""vLLM's configuration as facts: effective values, in the same terms as those of the embedded engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.vllm.describe.engine_facts import describe
from kvferry.handshake.facts import Facts
from kvferry.handshake.verdict import verdict
from kvferry.settings import FerrySettings, Role, TransferMode, TransferSettings
from tests.harness.vllm_models import GEMMA, make_model


def facts(model: Path, role: Role = Role.PREFILL, *, text: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """Returns the facts of an engine with a config like vLLM's; `text` changes the model's own config."""
    text_config = {"num_hidden_layers": 4, "max_position_embeddings": 4096, "rope_parameters": {"rope_theta": 1e4}} | (
        text or {}
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            tokenizer=str(model),
            quantization=None,
            dtype=changes.get("dtype", "torch.float32"),
            use_mla=changes.get("mla", False),
            hf_text_config=SimpleNamespace(**text_config),
            max_model_len=2048,
            get_total_num_kv_heads=lambda: 2,
            get_head_size=lambda: 32,
        ),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto"), calculate_kv_scales=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=changes.get("tp", 1), pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=changes.get("hma_off", False)),
        speculative_config=changes.get("speculation"),
    )
    settings = FerrySettings(transfer=TransferSettings(mode=changes.get("mode", TransferMode.PULL)))
    return Facts.from_engine(
        describe(
            config,
            version=changes.get("version", "0.32.0"),
            settings=settings,
            role=role,
            backends=["CPU_ATTN"],
            packings=changes.get("packings", ()),
            state_dtypes=(),
            block_tokens=changes.get("blocks", (128,)),
            layer_groups={"layers.0.attn": 0},
            kv_layout="LBHNC",
        )
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("facts") / "llama")


def test_effective_values_are_compared(model: Path) -> None:  # R6
    inherited = facts(model, cache_dtype="auto")
    explicit = facts(model, Role.DECODE, cache_dtype="float32")
    assert not verdict(inherited, explicit).refused
    assert inherited.get("kv.dtype") == "float32"


@pytest.mark.parametrize(
    "changes", [{"tp": 2}, {"blocks": (64,)}, {"hma_off": True}, {"version": "0.32.1"}], ids=lambda one: next(iter(one))
)
def test_what_the_planner_bridges_is_not_refused(model: Path, changes: dict[str, Any]) -> None:  # R22
    assert not verdict(facts(model), facts(model, Role.DECODE, **changes)).refused


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"mode": TransferMode.PUSH}, "transfer.mode"),
        ({"dtype": "torch.bfloat16"}, "model.dtype"),
        ({"cache_dtype": "fp8"}, "kv.dtype"),
        ({"packings": ("cpu-amx-bfloat16-128x64-abc",)}, "kv.packings"),
    ],
)
def test_what_must_match_is_refused_by_its_name(model: Path, changes: dict[str, Any], fact: str) -> None:  # R10 R13
    found = verdict(facts(model), facts(model, Role.DECODE, **changes))
    assert fact in [row.fact for row in found.blocking()]


def test_another_checkpoint_under_the_same_shape_is_refused(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=8)
    assert "model.fingerprint" in [row.fact for row in verdict(facts(model), facts(other, Role.DECODE)).blocking()]


def test_mla_has_one_head_of_latents(model: Path) -> None:
    assert facts(model, mla=True).get("model.total_kv_heads") == 1


def test_a_hybrid_states_what_each_layer_keeps_with_and_without_the_hybrid_allocator(model: Path) -> None:
    text = {"layer_types": GEMMA["layer_types"], "num_hidden_layers": 6, "sliding_window": 128}
    on, off = facts(model, text=text), facts(model, Role.DECODE, text=text, hma_off=True)
    assert on.get("model.layer_kinds") == "window*2 full window*2 full"
    assert on.get("model.window_tokens") == 128
    assert not verdict(on, off).refused


def test_a_window_that_is_switched_off_is_none(model: Path) -> None:
    text = {"sliding_window": 4096, "use_sliding_window": False}
    assert facts(model, text=text).get("model.window_tokens") is None


def test_ropes_by_kind_of_layer(model: Path) -> None:
    ropes = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}
    rope = str(facts(model, text={"rope_parameters": ropes}).get("model.rope"))
    assert '"full_attention":{"kind":"default"' in rope
    assert '"theta":1000000' in rope


def test_a_drafter_on_decode_alone_is_refused_and_its_depth_is_not(model: Path) -> None:  # R3 R5
    draft = SimpleNamespace(model=str(model), revision=None, code_revision=None, hf_config=SimpleNamespace())
    drafter = {"method": "eagle", "draft_model_config": draft, "parallel_drafting": False, "attention_backend": None}
    two = facts(model, speculation=SimpleNamespace(**drafter, num_speculative_tokens=2))
    four = facts(model, Role.DECODE, speculation=SimpleNamespace(**drafter, num_speculative_tokens=4))
    assert not verdict(two, four).refused
    alone = facts(model, Role.DECODE, speculation=SimpleNamespace(**drafter, num_speculative_tokens=2))
    assert "speculation.method" in [row.fact for row in verdict(facts(model), alone).blocking()]
    assert not verdict(two, facts(model, Role.DECODE)).refused, "what prefill drafts with, decode leaves there"
    ngram = SimpleNamespace(method="ngram", draft_model_config=None, num_speculative_tokens=3)
    assert not verdict(facts(model, speculation=ngram), facts(model, Role.DECODE)).refused
