"""The script that made the shipped models: the same seed gives the same weights, in the form that the engine reads."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engines.mini.models.catalog import model_directory, read_config
from kvferry.engines.mini.speculation.eagle3 import expected_tensors, read_eagle3
from kvferry.modelfiles import read_json
from tests.harness.repository import ROOT

pytestmark = pytest.mark.engine


def load(name: str) -> ModuleType:
    path = ROOT / "training" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclass looks for its module, and the other script for this one
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("byte_mtp")


@pytest.fixture(scope="module")
def eagle(script: ModuleType) -> ModuleType:
    return load("eagle3_smollm2")


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_same_seed_gives_the_same_weights(script: ModuleType, hybrid: bool) -> None:
    data = script.text(20_000)
    small = script.Shape(hidden=32, heads=2, head_dim=16, inner=48, layers=2, hybrid=hybrid, mamba_heads=2)
    first, again, other = (script.train(small, data, steps=2, batch=1, length=16, seed=seed) for seed in (1, 1, 2))
    torch.use_deterministic_algorithms(False)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert any(not torch.equal(value, other.state_dict()[name]) for name, value in first.state_dict().items())


@pytest.mark.parametrize("name", ["byte-mtp", "byte-mtp-window", "byte-mtp-hybrid"])
def test_the_shipped_models_have_its_form(script: ModuleType, name: str) -> None:
    shape = {"byte-mtp": script.Shape(), "byte-mtp-window": script.Shape(window=48), "byte-mtp-hybrid": script.HYBRID}
    config = json.loads((model_directory(name) / "config.json").read_text())
    assert config == shape[name].config()
    assert json.loads((model_directory(name) / "tokenizer.json").read_text()) == script.tokenizer()


@pytest.fixture
def recorded(eagle: ModuleType, tmp_path: Path) -> tuple[Path, Path]:
    """The answers of a tiny target, made up, and the target's directory."""
    random = torch.Generator().manual_seed(4)
    work, directory = tmp_path / "work", tmp_path / "target"
    for number in range(2):
        part = {
            name: torch.randn(9, 12, size, generator=random).bfloat16() for name, size in (("aux", 48), ("last", 16))
        }
        part |= {name: torch.randint(0, 40, (9, 12), generator=random) for name in ("ids", "best")}
        part["scale"] = torch.full((9, 12), 5.0)
        work.mkdir(exist_ok=True)
        save_file(part, work / f"part-{number:03}.safetensors")
    directory.mkdir()
    embedding = torch.randn(40, 16, generator=random).bfloat16()
    save_file(
        {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(16)}, directory / "model.safetensors"
    )
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": 16, "vocab_size": 40, "num_attention_heads": 2}
    raw |= {"num_hidden_layers": 4, "intermediate_size": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    raw |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    (directory / "config.json").write_text(json.dumps(raw))
    return work, directory


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
def test_an_eagle_head_is_the_same_again_even_when_stopped(
    eagle: ModuleType, recorded: tuple[Path, Path], tmp_path: Path
) -> None:
    work, directory = recorded
    shape = eagle.Shape(2, 1, 8, 24, 20, (1, 2, 3))
    data, target = eagle.Data(work, directory, shape, held_out=1), eagle.Target.read(directory)
    reported: list[str] = []

    def train(seed: int, steps: int = 3, state: Path | None = None) -> dict[str, torch.Tensor]:
        head = eagle.train(
            data,
            target,
            steps=3,
            stop=steps,
            rows=2,
            seed=seed,
            peak=0.01,
            state=state,
            every=2,
            report=reported.append,
        )
        weights: dict[str, torch.Tensor] = head.state_dict()
        return weights

    first, again, other = train(1), train(1), train(2)
    train(1, 2, tmp_path / "state.pt")
    resumed = train(1, 3, tmp_path / "state.pt")
    torch.use_deterministic_algorithms(False)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, resumed[name]), name
    assert any(not torch.equal(value, other[name]) for name, value in first.items())
    losses = [line.split(" nats ")[1].rsplit(" ", 2)[0] for line in reported if " nats " in line and "step 3/3" in line]
    assert losses[0] == losses[1] == losses[3] != losses[2]


def test_the_head_is_written_as_the_engine_reads_it(
    eagle: ModuleType, recorded: tuple[Path, Path], tmp_path: Path
) -> None:
    work, directory = recorded
    shape = eagle.Shape(2, 1, 8, 24, 20, (1, 2, 3))
    data, raw = eagle.Data(work, directory, shape, held_out=1), json.loads((directory / "config.json").read_text())
    head = eagle.Head(shape, eagle.Target.read(directory))
    eagle.save(head, data.ids, raw, tmp_path / "head")
    config = read_eagle3(read_json(tmp_path / "head" / "config.json"), read_config(directory))
    weights = load_file(tmp_path / "head" / "model.safetensors")
    for name, size in expected_tensors(config):
        assert tuple(weights[name].shape) == size, name
    assert config.aux_layers == (1, 2, 3)
    assert torch.equal(weights["d2t"] + torch.arange(20), data.ids)
    assert torch.equal(weights["t2d"].nonzero()[:, 0], data.ids)


def test_the_shipped_head_has_its_form(eagle: ModuleType) -> None:
    directory = model_directory("eagle3-smollm2")
    shape, config = eagle.Shape(), json.loads((directory / "config.json").read_text())
    raw = {**config["transformer_layer_config"], "architectures": ["LlamaForCausalLM"]}
    target = eagle.Target(
        raw["hidden_size"], raw["vocab_size"], raw["max_position_embeddings"], raw["rms_norm_eps"], 1e5
    )
    assert config == eagle.config(shape, target, raw)
    weights = load_file(directory / "model.safetensors")
    assert (directory / "model.safetensors").stat().st_size < 10_000_000
    for name, value in eagle.Head(shape, target).state_dict().items():
        assert (weights[name].shape, weights[name].dtype) == (value.shape, torch.bfloat16), name
