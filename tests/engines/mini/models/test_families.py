"""Each family gives the greedy tokens of transformers, with the same random weights, in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.catalog import read_config
from kvferry.engines.mini.models.loading import load_model
from kvferry.engines.mini.ranks.executor import LocalExecutor
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import UnknownModel
from tests.engines.mini.conftest import ask, finish, prompt_of, tokens_of
from tests.harness.oracle import load_oracle
from tests.harness.tiny_model import make_tiny_model, whole_cache

NUM_TOKENS = 10
LENGTHS = (5, 40, 100)
"""Prompt lengths below and above those of windows (7, 24), chunks (7, 128) and blocks (4, 16)."""

OLD_GEMMA = {
    "num_key_value_heads": 1,
    "layer_types": None,
    "sliding_window_pattern": 3,
    "rope_parameters": None,
    "rope_theta": 5e5,
    "rope_local_base_freq": 2e4,
    "sliding_window": 7,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 1e4,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
}
NO_QUERY_RANK = {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "gemma3": ("gemma3", {}, 16),
    "gemma3, older spelling, a window like a chunk": ("gemma3", OLD_GEMMA, 4),
    "granite": ("granite", {}, 16),
    "granite, heads that share one B and C, turned": (
        "granite",
        {"mamba_n_groups": 1, "position_embedding_type": "rope", "mamba_conv_bias": False, "mamba_proj_bias": True},
        4,
    ),
    "mixtral": ("mixtral", {}, 16),
    "qwen3 with experts in two of three layers": ("qwen3_moe", {}, 4),
    "deepseek v2": ("deepseek_v2", {}, 16),
    "deepseek v3": ("deepseek_v3", {}, 4),
    "deepseek v2, queries made at once, groups of experts, yarn": (
        "deepseek_v2",
        {**NO_QUERY_RANK, "rope_parameters": YARN},
        4,
    ),
    "deepseek v3, biases, halves, two shared experts, yarn": (
        "deepseek_v3",
        {"attention_bias": True, "rope_interleave": False, "n_shared_experts": 2, "rope_parameters": YARN},
        16,
    ),
}


@pytest.mark.engine
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    family, changes, block_tokens = CASES[case]
    directory = make_tiny_model(tmp_path / "model", family, **changes)
    theirs = load_oracle(directory)
    want, logprobs = [], []
    with torch.inference_mode():
        for length in LENGTHS:
            ids = torch.tensor([prompt_of(length)])
            found = theirs.generate(
                ids, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )
            want.append(found[0, length:].tolist())
            logprobs.append(torch.log_softmax(theirs(ids).logits[0, -1], -1))
    model = load_model(EngineSettings(model=str(directory), dtype="float32"))
    for chunk in (7, 128):
        settings = EngineSettings(num_blocks=200, max_batch_tokens=chunk, block_tokens=block_tokens)
        cache = whole_cache(model, settings)
        engine = Engine(model, LocalExecutor(model.network, cache), settings)
        for i, length in enumerate(LENGTHS):
            engine.add(ask(str(i), prompt_of(length), max_tokens=NUM_TOKENS, logprobs=20))
        outputs = finish(engine)
        assert [tokens_of(outputs[str(i)]) for i in range(len(LENGTHS))] == want
        for i, theirs_of_all in enumerate(logprobs):
            for token, logprob in outputs[str(i)][0].logprobs[0].top:
                assert logprob == pytest.approx(theirs_of_all[token].item(), abs=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0 is not supported"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 6 layers"),
        ("gemma3", {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ("gemma3", {"intermediate_size": None}, "missing or wrong entry"),
        ("granite", {"num_local_experts": 4}, "num_local_experts=4: hybrids with experts are not supported"),
        ("granite", {"layer_types": ["mamba"]}, "layer_types has 1 entries for 6 layers"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 of 5 experts"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ("deepseek_v3", {"n_group": 3}, "n_group=3 does not fit n_routed_experts=8"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than topk_group holds"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_with_the_reason(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    directory = make_tiny_model(tmp_path / "model", family)
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(UnknownModel, match=message):
        read_config(directory)
