"""The script that made the shipped models: the same seed gives the same weights, in the form that the engine reads."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvferry.engines.mini.models import find_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "training" / "byte_mtp.py"
    spec = importlib.util.spec_from_file_location("byte_mtp", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["byte_mtp"] = module  # its dataclass looks for its module
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
def test_the_same_seed_gives_the_same_weights(script: ModuleType) -> None:
    data = script.text(20_000)
    small = script.Shape(hidden=32, heads=2, head_dim=16, inner=48, layers=2)
    first, again, other = (script.train(small, data, steps=2, batch=1, length=16, seed=seed) for seed in (1, 1, 2))
    torch.use_deterministic_algorithms(False)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert any(not torch.equal(value, other.state_dict()[name]) for name, value in first.state_dict().items())


@pytest.mark.parametrize(("name", "window"), [("byte-mtp", None), ("byte-mtp-window", 48)])
def test_the_shipped_models_are_of_its_form(script: ModuleType, name: str, window: int | None) -> None:
    config = json.loads((find_model(name) / "config.json").read_text())
    assert config == script.Shape(window=window).config()
    assert json.loads((find_model(name) / "tokenizer.json").read_text()) == script.tokenizer()
