"""Fingerprints: digests of a model's config and weights that are cheap to compute even for a checkpoint of 400 GB.

A fingerprint covers the small files that matter, the header of each safetensors file, and a few bytes of up to
MAX_TENSORS tensors, at places that depend only on the tensors' names. So it does not matter how a checkpoint is split
into files, and a path and a hub name of the same model agree; two models that only share a name or a config do not. It
misses a change of a few numbers in a tensor if no sampled byte changes: it guards against mistakes, not against malice.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from kvferry.errors import ConfigError, UnknownModel
from kvferry.modelfiles import TensorEntry, read_safetensors_header

__all__ = ["MAX_TENSORS", "model_fingerprint", "tokenizer_fingerprint"]

MAX_TENSORS = 4096
"""The number of tensors that are sampled. If a checkpoint has more (mixtures of experts have 100,000), those whose
names have the lowest hashes are sampled."""

_SAMPLES = 2
_SAMPLE_BYTES = 64
_OPAQUE_SAMPLES = 256
_HEAD_BYTES = 1 << 20
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash"})
"""Keys of config.json that do not influence the numbers (the dtype is compared as a separate fact)."""


def model_fingerprint(path: Path) -> str:
    """Returns `kf1-` and 32 hex digits.

    Raises UnknownModel if there are no weights or a safetensors file is damaged, ConfigError if config.json cannot be
    read.
    """
    root, files = _weight_files(path)
    digest = hashlib.sha256(b"kvferry fingerprint 1\n")
    config = root / "config.json" if root.is_dir() else None
    if config is not None and config.is_file():
        digest.update(_config(config))
    tensors: list[TensorEntry] = []
    for file in files:
        if file.suffix == ".safetensors":
            tensors.extend(read_safetensors_header(file))
        else:
            digest.update(_opaque(file))
    tensors.sort(key=lambda tensor: tensor.name)
    for tensor in tensors:
        digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0{tensor.num_bytes}\n".encode())
    for tensor, data in _samples(tensors):
        digest.update(tensor.name.encode() + b"\0" + data)
    return f"kf1-{digest.hexdigest()[:32]}"


def tokenizer_fingerprint(path: Path) -> str | None:
    """Returns `kt1-` and 32 hex digits for everything that turns a chat into tokens; None if there is nothing."""
    digest = hashlib.sha256(b"kvferry tokenizer 1\n")
    if path.is_file():
        if path.suffix != ".gguf":
            return None
        # The vocabulary, and all else that matters for tokens, is in the first part of the file, so all of it counts.
        digest.update(_opaque(path))
        return f"kt1-{digest.hexdigest()[:32]}"
    found = False
    for name in _TOKENIZERS:
        if (path / name).is_file():
            found = True
            digest.update(name.encode() + b"\0" + hashlib.sha256((path / name).read_bytes()).digest())
    template = _json(path / "tokenizer_config.json").get("chat_template") if found else None
    digest.update(json.dumps(template, sort_keys=True).encode())
    return f"kt1-{digest.hexdigest()[:32]}" if found else None


def _weight_files(path: Path) -> tuple[Path, list[Path]]:
    if path.is_file():
        return path, [path]
    for pattern in _WEIGHTS:
        found = sorted(path.glob(pattern))
        if found:
            return path, found
    raise UnknownModel(f"{str(path)!r} holds no weights ({', '.join(_WEIGHTS)}): give the directory of a checkpoint")


def _json(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{str(path)!r} is not readable JSON: {error}. Download the model again") from error
    return raw if isinstance(raw, dict) else {}


def _config(path: Path) -> bytes:
    kept = {key: value for key, value in _json(path).items() if key not in _VOLATILE}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _samples(tensors: list[TensorEntry]) -> Iterator[tuple[TensorEntry, bytes]]:
    """Yields the bytes of each sampled tensor, in the order of names. Each file is opened once."""
    sampled = tensors
    if len(tensors) > MAX_TENSORS:
        lowest = sorted(tensors, key=lambda tensor: hashlib.sha256(tensor.name.encode()).digest())[:MAX_TENSORS]
        sampled = sorted(lowest, key=lambda tensor: tensor.name)
    data: dict[str, bytes] = {}
    by_file: dict[Path, list[TensorEntry]] = {}
    for tensor in sampled:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file, inside in by_file.items():
        with file.open("rb", buffering=0) as stream:
            for tensor in inside:
                data[tensor.name] = b"".join(_read_at(stream, at) for at in _places(tensor))
    for tensor in sampled:
        yield tensor, data[tensor.name]


def _places(tensor: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yields (offset in the file, length) of the bytes to read, which depend only on the tensor's name and size."""
    size = tensor.stop - tensor.start
    if size <= _SAMPLES * _SAMPLE_BYTES:
        yield tensor.start, size
        return
    stretch = size // _SAMPLES
    for index in range(_SAMPLES):
        draw = hashlib.sha256(f"{tensor.name}\0{index}".encode()).digest()
        room = stretch - _SAMPLE_BYTES
        offset = index * stretch + int.from_bytes(draw[:8], "big") % (room + 1)
        yield tensor.start + offset, _SAMPLE_BYTES


def _opaque(file: Path) -> bytes:
    """Returns a digest of a file whose format is not parsed: its size, its beginning, and evenly spaced samples.

    The name of the file does not count.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb", buffering=0) as stream:
        digest.update(_read_at(stream, (0, min(size, _HEAD_BYTES))))
        for index in range(_OPAQUE_SAMPLES):
            offset = max(0, (size - _SAMPLE_BYTES) * index // (_OPAQUE_SAMPLES - 1))
            digest.update(_read_at(stream, (offset, min(size, _SAMPLE_BYTES))))
    return digest.digest()


def _read_at(stream: BinaryIO, place: tuple[int, int]) -> bytes:
    offset, length = place
    data = os.pread(stream.fileno(), length, offset)
    if len(data) != length:
        raise ConfigError(f"{stream.name!r} became shorter while it was read. Download the model again")
    return data
