"""vLLM's layer names become the names that all engines use."""

from kvferry.engines.vllm.describe.layer_names import canonical_names


def test_layers_have_the_names_that_other_engines_use() -> None:
    kinds = {"model.layers.0.self_attn.attn": "attn", "model.layers.1.mamba.mixer": "mamba"}
    assert canonical_names(kinds, 2) == {
        "model.layers.0.self_attn.attn": "layers.0.attn",
        "model.layers.1.mamba.mixer": "layers.1.mamba",
    }


def test_layers_after_the_last_one_are_the_drafters() -> None:
    kinds = {"model.layers.3.self_attn.attn": "attn", "model.layers.30.self_attn.attn": "attn"}
    assert canonical_names(kinds, 30)["model.layers.30.self_attn.attn"] == "draft.layers.0.attn"


def test_a_draft_model_counts_from_0_under_its_own_name() -> None:
    kinds = {"model.layers.0.self_attn.attn": "attn", "draft_model.model.layers.0.self_attn.attn": "attn"}
    assert sorted(canonical_names(kinds, 30).values()) == ["draft.layers.0.attn", "layers.0.attn"]


def test_two_caches_of_one_layer_keep_their_names() -> None:
    kinds = {"model.layers.0.self_attn.attn": "attn", "model.layers.0.self_attn.indexer.k_cache": "attn"}
    assert canonical_names(kinds, 2) == {name: name for name in kinds}


def test_a_hybrid_layer_has_both() -> None:
    kinds = {"model.layers.0.self_attn.attn": "attn", "model.layers.0.mamba": "mamba"}
    assert sorted(canonical_names(kinds, 2).values()) == ["layers.0.attn", "layers.0.mamba"]


def test_a_name_without_a_number_is_kept() -> None:
    assert canonical_names({"encoder.attn": "attn"}, 2) == {"encoder.attn": "encoder.attn"}
