"""More models for vLLM than the benchmark's: latent caches (with MTP modules), and hybrids with recurrent states.

Random weights, ordinary Hugging Face files, made in a second. As in `tests.harness.vllm_models`, the next token
depends on the whole prompt. Sizes are the smallest that vLLM's CPU kernels take.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.harness.vllm_models import GEMMA, make_eagle, make_model

__all__ = ["KINDS", "make_kind"]

Shapes = Iterator[tuple[str, tuple[int, ...]]]
_HIDDEN, _INNER, _VOCAB = 64, 128, 512

_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
"""512 + 64: the one latent that the CPU kernels are compiled for. Yarn, as every published DeepSeek has it: vLLM's CPU
kernel of the default rope turns the wrong heads of an MLA query (tests/engines/vllm/mla_alone.py)."""
_MTP: dict[str, Any] = {
    **_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 64,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    **_MAMBA, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
    "num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": _INNER,
    "num_local_experts": 0, "embedding_multiplier": 1.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    "logits_scaling": 1.0, "position_embedding_type": "rope",
}  # fmt: skip
_FALCON: dict[str, Any] = {
    **_MAMBA, "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "num_hidden_layers": 3,
    "mamba_d_ssm": 128, "mamba_rms_norm": False, "mamba_norm_before_gate": True, "projectors_bias": False,
    "mlp_bias": False, "attention_bias": False, "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0, 1.0],
}  # fmt: skip


def _deepseek(config: dict[str, Any]) -> Shapes:
    for layer in range(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)):
        at = f"model.layers.{layer}."
        yield from _latent(config, f"{at}self_attn.")
        yield from _norms(at, "input_layernorm", "post_attention_layernorm")
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(f"{at}mlp.", _INNER)
        else:
            yield f"{at}mlp.gate.weight", (config["n_routed_experts"], _HIDDEN)
            if config["topk_method"] == "noaux_tc":
                yield f"{at}mlp.gate.e_score_correction_bias", (config["n_routed_experts"],)
            for one in range(config["n_routed_experts"]):
                yield from _mlp(f"{at}mlp.experts.{one}.", config["moe_intermediate_size"])
            yield from _mlp(f"{at}mlp.shared_experts.", config["moe_intermediate_size"] * config["n_shared_experts"])
        if layer >= config["num_hidden_layers"]:  # an MTP module
            yield from _norms(at, "enorm", "hnorm", "shared_head.norm")
            yield f"{at}eh_proj.weight", (_HIDDEN, 2 * _HIDDEN)
            yield f"{at}embed_tokens.weight", (_VOCAB, _HIDDEN)
            yield f"{at}shared_head.head.weight", (_VOCAB, _HIDDEN)
    yield from _norms("model.", "norm")


def _latent(config: dict[str, Any], at: str) -> Shapes:
    heads, rank, rope = config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    if config["q_lora_rank"] is None:
        yield f"{at}q_proj.weight", (heads * (nope + rope), _HIDDEN)
    else:
        yield f"{at}q_a_proj.weight", (config["q_lora_rank"], _HIDDEN)
        yield f"{at}q_a_layernorm.weight", (config["q_lora_rank"],)
        yield f"{at}q_b_proj.weight", (heads * (nope + rope), config["q_lora_rank"])
    yield f"{at}kv_a_proj_with_mqa.weight", (rank + rope, _HIDDEN)
    yield f"{at}kv_a_layernorm.weight", (rank,)
    yield f"{at}kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{at}o_proj.weight", (_HIDDEN, heads * value)


def _granite(config: dict[str, Any]) -> Shapes:
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}."
        yield from _norms(at, "input_layernorm", "post_attention_layernorm")
        yield f"{at}shared_mlp.input_linear.weight", (2 * _INNER, _HIDDEN)
        yield f"{at}shared_mlp.output_linear.weight", (_HIDDEN, _INNER)
        yield from _mamba(config, f"{at}mamba.") if kind == "mamba" else _attention(config, f"{at}self_attn.")
    yield from _norms("model.", "norm")


def _falcon(config: dict[str, Any]) -> Shapes:
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield from _norms(at, "input_layernorm", "pre_ff_layernorm")
        yield from _mlp(f"{at}feed_forward.", _INNER)
        yield from _mamba(config, f"{at}mamba.", norm=False)
        yield from _attention(config, f"{at}self_attn.")
    yield from _norms("model.", "final_layernorm")


def _norms(at: str, *names: str) -> Shapes:
    for name in names:
        yield f"{at}{name}.weight", (_HIDDEN,)


def _mlp(at: str, inner: int) -> Shapes:
    yield f"{at}gate_proj.weight", (inner, _HIDDEN)
    yield f"{at}up_proj.weight", (inner, _HIDDEN)
    yield f"{at}down_proj.weight", (_HIDDEN, inner)


def _attention(config: dict[str, Any], at: str) -> Shapes:
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"{at}{name}_proj.weight", (count * dim, _HIDDEN)
    yield f"{at}o_proj.weight", (_HIDDEN, heads * dim)


def _mamba(config: dict[str, Any], at: str, *, norm: bool = True) -> Shapes:
    heads, inner = config["mamba_n_heads"], config["mamba_n_heads"] * config["mamba_d_head"]
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    for name in ("A_log", "D", "dt_bias"):
        yield f"{at}{name}", (heads,)
    yield f"{at}conv1d.weight", (channels, 1, config["mamba_d_conv"])
    yield f"{at}conv1d.bias", (channels,)
    if norm:
        yield f"{at}norm.weight", (inner,)
    yield f"{at}in_proj.weight", (inner + channels + heads, _HIDDEN)
    yield f"{at}out_proj.weight", (_HIDDEN, inner)


_SHAPED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Shapes]]] = {
    "mla": (_DEEPSEEK, _deepseek),
    "mla-default-rope": ({name: value for name, value in _DEEPSEEK.items() if name != "rope_scaling"}, _deepseek),
    "mtp": (_MTP, _deepseek),
    "granite": (_GRANITE, _granite),
    "falcon-h1": (_FALCON, _falcon),
}
KINDS = ("llama", "gemma", "eagle", *_SHAPED)


def make_kind(kind: str, directory: Path, seed: int = 7) -> Path:
    """Writes one of KINDS: `eagle` is a drafter for `llama`, `mtp` a latent cache with one MTP module."""
    if kind == "llama":
        return make_model(directory)
    if kind == "gemma":
        return make_model(directory, **GEMMA)
    if kind == "eagle":
        return make_eagle(directory)
    changes, shapes = _SHAPED[kind]
    make_model(directory, seed, num_hidden_layers=1)  # for its tokenizer and the ordinary entries of its config
    config = json.loads((directory / "config.json").read_text()) | changes
    config |= {"hidden_size": _HIDDEN, "intermediate_size": _INNER}
    (directory / "config.json").write_text(json.dumps(config))
    dice = np.random.default_rng(seed)
    weights = {name: _drawn(dice, name, shape) for name, shape in (*_ends(), *shapes(config))}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _ends() -> Shapes:
    yield "model.embed_tokens.weight", (_VOCAB, _HIDDEN)
    yield "lm_head.weight", (_VOCAB, _HIDDEN)


def _drawn(dice: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Returns weights so large that the whole prompt counts, and so small that nothing saturates."""
    noise = dice.standard_normal(shape).astype(np.float32)
    if name.endswith("A_log"):
        return np.log(np.arange(1, shape[0] + 1, dtype=np.float32) / 8)
    if name.endswith(("norm.weight", ".D", "layernorm.weight")):
        return np.ones(shape, np.float32) + noise / np.float32(10)
    if len(shape) == 1:
        return noise / np.float32(10)
    if name.endswith("embed_tokens.weight"):
        return noise * 4
    return noise * np.float32(1.5 / shape[-1] ** 0.5)
