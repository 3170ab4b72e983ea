"""Tiny checkpoints with random weights, as Hugging Face directories, for tests that do not need sensible text."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.models.cache_spec import make_groups
from kvferry.engines.mini.models.catalog import read_config
from kvferry.engines.mini.models.checkpoint import expected_tensors
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.loading import LoadedModel
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.ranks.sizing import layers_of
from kvferry.engines.mini.settings import EngineSettings

__all__ = ["CHAT_TEMPLATE", "FAMILIES", "make_tiny_model", "whole_cache"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False},
    "gemma3": {  # twice: two layers with a window, one with full attention
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
FAMILIES["mixtral"] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "sliding_window": None,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
FAMILIES["qwen3_moe"] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "use_sliding_window": False,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
_MLA = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
}
FAMILIES["deepseek_v2"] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    **_MLA,
}
FAMILIES["deepseek_v3"] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    **_MLA,
}
FAMILIES["granite"] = {  # twice: two layers with a state, one with attention
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 6,
    "layer_types": ["mamba", "mamba", "attention"] * 2,
    "shared_intermediate_size": 160,
    "num_local_experts": 0,
    "mamba_n_heads": 6,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
}
SPECIAL = ("<eos>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    directory: Path, family: str = "llama", *, seed: int = 0, num_shards: int = 1, **changes: Any
) -> Path:
    """Writes a model of `family`: 3 layers, 6 query and 2 KV heads of 16, a vocabulary of 320, a context of 2,048.

    `changes` go into config.json. The tokenizer has every byte, a few merges and three special tokens; token 0 is the
    end. Returns `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "dtype": "float32",
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
        **FAMILIES[family],
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    _write_weights(directory, seed, num_shards)
    _write_tokenizer(directory)
    return directory


def whole_cache(model: LoadedModel, settings: EngineSettings) -> KVCache:
    """Makes the cache of a whole model in this process, with keys and values in the model's dtype."""
    layers = layers_of(model.config, KvFormat(model.dtype), Shard())
    return KVCache.sized(layers, make_groups(layers), settings, model.device)


def _write_weights(directory: Path, seed: int, num_shards: int) -> None:
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_tensors(read_config(directory)):
        # Large enough that the next token is clear, and small enough that nothing saturates.
        noise = torch.randn(shape, generator=random) * (0.15 if len(shape) > 1 else 0.1)
        weights[name] = noise + 1 if "norm" in name else noise
    if num_shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    files = {name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: weights[name] for name in names if files[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(directory: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a")]
    tokens = [*SPECIAL, *letters, *("".join(merge) for merge in merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "eos_token": "<eos>",
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
