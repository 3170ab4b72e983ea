"""Opens a model by its name: returns its Hugging Face directory, and its config.json as a record of its family."""

from dataclasses import replace
from pathlib import Path

from kvferry.engines.mini.models.config import ROPE_KINDS, ModelConfig, token_ids
from kvferry.engines.mini.models.families import family_of
from kvferry.engines.mini.models.gguf.conversion import converted, gemma3_directory
from kvferry.errors import UnknownModel
from kvferry.modelfiles import find_model, read_json

__all__ = ["model_directory", "read_config"]


def model_directory(name: str) -> Path:
    """Returns the Hugging Face directory of a model. A GGUF file is converted into one at the first call.

    `name` is what `modelfiles.find_model` accepts, or `gemma3-270m`. Raises UnknownModel.
    """
    if name == "gemma3-270m" and not Path(name).exists():
        return gemma3_directory()
    path = find_model(name)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return converted(path)
    raise UnknownModel(f"model {name!r} is neither a directory nor a .gguf file. Give the model's directory.")


def read_config(directory: Path) -> ModelConfig:
    """Reads and checks config.json. Raises UnknownModel with the file, the value and what is supported."""
    path = directory / "config.json"
    raw = read_json(path)
    architecture = str((raw.get("architectures") or ["none"])[0])
    try:
        config = family_of(architecture).read(raw)
    except UnknownModel as error:
        raise UnknownModel(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownModel(f"{path}: missing or wrong entry: {error!r}. Copy or download it again.") from error
    if config.rope.kind not in ROPE_KINDS:
        raise UnknownModel(f"{path}: rope type {config.rope.kind!r} is unknown. Known: {', '.join(ROPE_KINDS)}.")
    generation = directory / "generation_config.json"
    extra = token_ids(read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*extra, *config.eos_token_ids))))
