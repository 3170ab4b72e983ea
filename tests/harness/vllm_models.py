"""Models for vLLM that a script makes within a second: random weights, ordinary files, a tokenizer of plain numbers.

Their weights are large enough that the next token depends on the whole prompt: a decode worker that reads wrong KV
says other tokens.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["GEMMA", "KV_HEAVY", "TINY", "make_eagle", "make_model"]

TINY: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                        "head_dim": 32}  # fmt: skip
KV_HEAVY: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
                            "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
"""It has 8 KiB of KV per token in fp32, and little arithmetic."""
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 32,
    "sliding_window": 128, "rope_local_base_freq": 10000.0, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
"""A hybrid: cache groups with a window of 128 tokens beside groups without one."""
_VOCAB = 512


def make_model(directory: Path, seed: int = 7, **changes: Any) -> Path:
    """Writes a Llama with `changes` in its config to `directory`, and returns the directory.

    Raises OSError where it cannot be written.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "intermediate_size": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **TINY,
        **changes,
    }
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    _write_tokenizer(directory)
    _write_safetensors(directory / "model.safetensors", _weights(config, seed))
    return directory


def _weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    dice = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def noise(*shape: int) -> np.ndarray[Any, Any]:
        return dice.standard_normal(shape, np.float32) * np.float32(1.5 / shape[-1] ** 0.5)

    gemma = config["model_type"].startswith("gemma")
    one = np.zeros if gemma else np.ones  # Gemma's norms scale by 1 + weight
    # A tied embedding is also the last layer: scaled up, it would drown everything but the token itself.
    made = {"model.embed_tokens.weight": noise(_VOCAB, hidden) * (1 if config["tie_word_embeddings"] else 8)}
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = noise(_VOCAB, hidden)
    made["model.norm.weight"] = one(hidden, np.float32)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        made[f"{at}self_attn.q_proj.weight"] = noise(heads * dim, hidden)
        made[f"{at}self_attn.k_proj.weight"] = noise(kv_heads * dim, hidden)
        made[f"{at}self_attn.v_proj.weight"] = noise(kv_heads * dim, hidden)
        made[f"{at}self_attn.o_proj.weight"] = noise(hidden, heads * dim)
        made[f"{at}mlp.gate_proj.weight"] = noise(inner, hidden)
        made[f"{at}mlp.up_proj.weight"] = noise(inner, hidden)
        made[f"{at}mlp.down_proj.weight"] = noise(hidden, inner)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            made[f"{at}self_attn.q_norm.weight"] = one(dim, np.float32)
            made[f"{at}self_attn.k_norm.weight"] = one(dim, np.float32)
        for norm in norms:
            made[f"{at}{norm}.weight"] = one(hidden, np.float32)
    return made


def make_eagle(directory: Path, seed: int = 11, **changes: Any) -> Path:
    """Writes an EAGLE drafter, of one layer, for a model of `make_model` with the same `changes`."""
    config = {**TINY, **changes, "num_hidden_layers": 1}
    make_model(directory, seed, **config)
    whole = json.loads((directory / "config.json").read_text())
    weights = _weights(whole, seed)
    hidden = whole["hidden_size"]
    made = {"fc.weight": np.random.default_rng(seed).standard_normal((hidden, 2 * hidden)).astype(np.float32) * 0.1}
    # A drafter's first layer reads what `fc` made: it has no norm of its own before that.
    made |= {
        name.removeprefix("model."): one
        for name, one in weights.items()
        if ".layers." in name and not name.endswith("input_layernorm.weight")
    }
    _write_safetensors(directory / "model.safetensors", made)
    return directory


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """The format is a length, a JSON header, and the bytes in the header's order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, begin + tensor.nbytes]}
        begin += tensor.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor).tobytes())


def _write_tokenizer(directory: Path) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{one}": one for one in range(3, _VOCAB)}
    added = [{"id": one, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for text, one in list(vocab.items())[:3]]  # fmt: skip
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
             "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
             "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}}  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(whole))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
