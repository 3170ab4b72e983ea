"""SmolLM2-135M against transformers, in fp32: the same greedy tokens, alone and batched, in small and large chunks."""

import os
import pydoc_data.topics

import pytest
import torch

from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.catalog import model_directory
from kvferry.engines.mini.models.loading import LoadedModel, load_model
from kvferry.engines.mini.ranks.executor import LocalExecutor
from kvferry.engines.mini.settings import EngineSettings
from kvferry.modelfiles import smollm2_file
from tests.engines.mini.conftest import ask, finish, tokens_of
from tests.harness.oracle import load_oracle
from tests.harness.tiny_model import whole_cache

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = (5, 6, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 129, 200, 257, 400, 512, 1000, 2000)
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The model of the package, which is converted at the first use on this machine."""
    torch.set_num_threads(1)
    return load_model(EngineSettings(model="smollm2", dtype="float32"))


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> dict[int, list[int]]:
    """Pieces of Python's language reference, each from a different place."""
    text = "\n".join(pydoc_data.topics.topics.values())
    tokens = model.tokenizer.encode(text[:200_000])
    starts = iter(range(0, len(tokens), len(tokens) // (len(LENGTHS) + 2)))
    return {length: tokens[start : start + length] for length, start in zip(LENGTHS, starts, strict=False)}


@pytest.fixture(scope="module")
def oracle(model: LoadedModel, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """The answers of transformers, computed once per session."""
    network = load_oracle(model.directory)
    answers = {}
    for length, prompt in prompts.items():
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            result = network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
                do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        answers[length] = result[0, length:].tolist()
    return answers


def _engine(model: LoadedModel, chunk: int) -> Engine:
    settings = EngineSettings(
        model="smollm2", dtype="float32", num_blocks=400, max_batch_tokens=chunk, max_running=8, prefix_caching=False
    )
    return Engine(model, LocalExecutor(model.network, whole_cache(model, settings)), settings)


FULL_ONLY = pytest.mark.skipif(
    os.environ.get("FULL") != "1",
    reason="90 s more on one core, and chunk and batch are both covered by the other two: make test-full",
)


@pytest.mark.parametrize(
    ("chunk", "batched"),
    [
        pytest.param(64, True, id="batch of 8-64"),
        pytest.param(512, False, id="alone-512"),
        pytest.param(64, False, id="alone-64", marks=FULL_ONLY),
        pytest.param(512, True, id="batch of 8-512", marks=FULL_ONLY),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    model: LoadedModel, prompts: dict[int, list[int]], oracle: dict[int, list[int]], chunk: int, batched: bool
) -> None:  # R36, the standalone half
    engine = _engine(model, chunk)
    answers: dict[int, list[int]] = {}

    def collect() -> None:
        answers.update({int(name): tokens_of(outputs) for name, outputs in finish(engine).items()})

    # Long and short prompts are mixed, so that prompts are computed beside answers.
    for length in sorted(prompts, key=lambda n: n % 7):
        engine.add(ask(str(length), prompts[length], max_tokens=NUM_TOKENS))
        if not batched:
            collect()
    collect()
    assert answers == oracle


def test_the_converted_weights_are_those_of_transformers(model: LoadedModel) -> None:
    """Compares one tensor of each kind bit for bit; reading the whole GGUF file in transformers takes 14 s."""
    import gguf
    from safetensors import safe_open

    source = gguf.GGUFReader(str(smollm2_file()))
    by_name = {tensor.name: tensor for tensor in source.tensors}
    with safe_open(model.directory / "model.safetensors", framework="pt") as file:
        for ours, theirs, heads in (
            ("model.layers.7.self_attn.q_proj.weight", "blk.7.attn_q.weight", 9),
            ("model.layers.7.self_attn.k_proj.weight", "blk.7.attn_k.weight", 3),
            ("model.layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight", None),
            ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", None),
            ("model.embed_tokens.weight", "token_embd.weight", None),
        ):
            rows = by_name[theirs].data[:768]
            want = torch.from_numpy(gguf.quants.dequantize(rows, by_name[theirs].tensor_type))
            if heads is not None:
                # The rule that llama.cpp's converter states: row (head, half, i) is stored as (head, i, half).
                stored, order = want, torch.arange(len(want)).view(heads, 2, -1).transpose(1, 2).flatten()
                want = torch.empty_like(stored)
                want[order] = stored
            assert torch.equal(file.get_tensor(ours)[:768], want.to(torch.bfloat16)), ours


def test_a_second_search_converts_nothing(model: LoadedModel) -> None:
    before = (model.directory / "model.safetensors").stat().st_mtime_ns
    assert model_directory("smollm2") == model.directory
    assert (model.directory / "model.safetensors").stat().st_mtime_ns == before
