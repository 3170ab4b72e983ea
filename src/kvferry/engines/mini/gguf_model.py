"""A GGUF file becomes a Hugging Face directory, once, in our cache.

Weights are dequantised to bfloat16, and llama.cpp's reordering of query and key rows is undone: the result is, bit for
bit, what transformers makes of the same file.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvferry.engines.mini.progress import Progress
from kvferry.errors import ConfigError, UnknownModel

__all__ = ["cache_directory", "converted"]

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when the conversion changes, so that older results are not used."""

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# How text is cut before byte-pair merging, by the name that GGUF gives it.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")


def _split(pattern: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ]


PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
    "qwen2": _split(_QWEN),
    "llama-bpe": _split(_LLAMA3),
}


def cache_directory() -> Path:
    """Where converted models live: `$KVFERRY_CACHE`/models, else ~/.cache/kvferry/models."""
    root = os.environ.get("KVFERRY_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "kvferry") / "models"


def converted(file: Path) -> Path:
    """The Hugging Face directory made of a GGUF file, named after the file's content.

    Two processes may convert at once: each writes its own temporary directory and renames it; the second finds the
    name taken and uses what is there.
    """
    target = cache_directory() / f"{file.stem.lower()}-{_digest(file)}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"cannot write {str(target.parent)!r}: {error}. Set KVFERRY_CACHE to a folder.") from error
    try:
        _convert(file, scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("model converted file=%s directory=%s", file.name, target)
    return target


def _digest(file: Path) -> str:
    """Of the whole content: a path and a copy of it are the same model, a changed file is another one."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(b"format %d" % FORMAT)
    return digest.hexdigest()[:16]


def _convert(file: Path, out: Path) -> None:
    import gguf

    try:
        reader = gguf.GGUFReader(str(file))
    except (ValueError, OSError, IndexError) as error:
        raise UnknownModel(f"{str(file)!r} cannot be read as GGUF: {error}. Download it again.") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnknownModel(f"{str(file)!r} is of architecture {arch!r}. Known in GGUF: {', '.join(ARCHITECTURES)}.")
    write_json(out / "tokenizer.json", _tokenizer(file, fields))
    write_json(out / "tokenizer_config.json", _tokenizer_config(fields))
    write_json(out / "config.json", _config(fields, arch, tied=all(t.name != "output.weight" for t in reader.tensors)))
    _write_weights(file, reader.tensors, out / "model.safetensors", heads=_heads(fields, arch), arch=arch)


def write_json(path: Path, value: object) -> None:
    """As UTF-8 JSON."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _heads(fields: dict[str, Any], arch: str) -> dict[str, int]:
    heads = int(fields[f"{arch}.attention.head_count"])
    return {"attn_q": heads, "attn_k": int(fields.get(f"{arch}.attention.head_count_kv", heads))}


def _write_weights(file: Path, tensors: list[Any], path: Path, *, heads: dict[str, int], arch: str) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    with Progress(f"convert {file.name}", total_bytes=sum(t.n_bytes for t in tensors), num_items=len(tensors)) as bar:
        for tensor in tensors:
            name = _name(file, tensor.name)
            if name is not None:
                array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                stem = tensor.name.split(".")[-2]
                if arch == "llama" and stem in heads:
                    # llama.cpp interleaves the two halves of each rotary pair; put them back side by side.
                    shape = array.shape
                    array = array.reshape(heads[stem], -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
                weights[name] = torch.from_numpy(array.copy()).to(torch.bfloat16)
            bar.advance(tensor.n_bytes)
        save_file(weights, path, metadata={"format": "pt"})


def _name(file: Path, name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[parts[0]]}.{parts[1]}"
    if parts[0] == "rope_freqs":
        raise UnknownModel(
            f"{str(file)!r} holds scaled rope factors, which we cannot read. Use the Hugging Face files."
        )
    raise UnknownModel(f"{str(file)!r} holds a tensor {name!r} that we do not know. Use the Hugging Face directory.")


def _config(fields: dict[str, Any], arch: str, *, tied: bool) -> dict[str, Any]:
    heads = _heads(fields, arch)
    scaling = fields.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise UnknownModel(f"the GGUF file has rope scaling {scaling!r}. Use the Hugging Face directory of the model.")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "num_hidden_layers": fields[f"{arch}.block_count"],
        "hidden_size": fields[f"{arch}.embedding_length"],
        "intermediate_size": fields[f"{arch}.feed_forward_length"],
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields[f"{arch}.context_length"],
        # Stored as float32: 9.999999747e-06 is 1e-05.
        "rms_norm_eps": float(f"{fields[f'{arch}.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.get(f"{arch}.rope.freq_base", 10000.0)},
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    head_dim = fields.get(f"{arch}.attention.key_length")
    return {**config, "head_dim": head_dim} if head_dim else config


def _tokenizer(file: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json of byte-level BPE."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise UnknownModel(
            f"{str(file)!r} has a tokenizer of kind {kind!r} {pre!r}. Known: gpt2 with {', '.join(PRE_TOKENIZERS)}. "
            "Use the Hugging Face directory of the model."
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    added = [
        {"id": i, "content": tokens[i], "special": t == 3, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for i, t in enumerate(types)
        if t in (3, 4)  # control, user-defined
    ]
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[str(pre)]},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "model_max_length": fields.get(f"{fields['general.architecture']}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config
