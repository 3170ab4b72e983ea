"""Weights from safetensors files, checked before use, fused into the few large matrices that the model runs on."""

import json
import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvferry.engines.mini.models.config import ModelConfig, find_model, read_config, read_json
from kvferry.engines.mini.models.families import family_of
from kvferry.engines.mini.models.families.base import Network
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.linear import Linear
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.models.progress import Progress
from kvferry.engines.mini.models.tokenizer import Tokenizer
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError, UnknownModel

__all__ = ["LoadedModel", "OpenedModel", "expected_tensors", "kv_format", "load_model", "open_model", "open_weights"]

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100 << 20
"""As the safetensors format says."""

INDEX_DTYPE = "I64"
"""Tables of ids, as an EAGLE-3 head has them; no quantised weight is stored so."""
WEIGHT_DTYPES = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that was found and checked. Its weights may be in other processes."""

    name: str
    """As the operator named it."""
    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    kv: KvFormat
    """How its keys and values are stored."""


@dataclass(frozen=True, slots=True)
class LoadedModel(OpenedModel):
    """A model, or one rank's part of it, ready to run."""

    network: Network
    device: torch.device


def open_model(settings: EngineSettings) -> OpenedModel:
    """Find and check a model, and read everything but its weights. Raises as load_model."""
    directory = find_model(settings.model)
    config = read_config(directory)
    dtype = _dtype(settings.dtype, config)
    weights = _Weights(directory, _weight_files(directory), dtype, _device(settings.device))
    weights.check(config)
    kv = kv_format(settings, config, directory)
    return OpenedModel(settings.model, directory, config, Tokenizer.from_directory(directory), dtype, kv)


def load_model(settings: EngineSettings, shard: Shard | None = None) -> LoadedModel:
    """Find, check and load a model, or one rank's part of it. The first rank shows its progress on stderr.

    Raises UnknownModel, or ConfigError for a device or dtype.
    """
    shard = shard or Shard()
    directory = find_model(settings.model)
    config = read_config(directory)
    files = _weight_files(directory)
    dtype = _dtype(settings.dtype, config)
    device = _device(settings.device)
    weights = _Weights(directory, files, dtype, device)
    weights.check(config)
    kv = kv_format(settings, config, directory)
    tokenizer = Tokenizer.from_directory(directory)
    with Progress(
        f"load {settings.model}",
        total_bytes=weights.num_bytes,
        num_items=weights.num_tensors,
        silent=shard.index > 0,
    ) as bar:
        weights.bar = bar
        network = family_of(config.architecture).build(config, weights, shard)
    logger.info("model loaded directory=%s dtype=%s device=%s", directory, dtype, device)
    return LoadedModel(settings.model, directory, config, tokenizer, dtype, kv, network, device)


def open_weights(directory: Path, dtype: torch.dtype, device: torch.device) -> "_Weights":
    """The tensors of a checkpoint; none is read yet. Raises UnknownModel for what is no whole checkpoint."""
    return _Weights(directory, _weight_files(directory), dtype, device)


def _dtype(name: str, config: ModelConfig) -> torch.dtype:
    chosen = config.dtype if name == "auto" else name
    # Half precision is not one that we offer: its range is too small for some of these models.
    return torch.float32 if chosen == "float32" else torch.bfloat16


def kv_format(settings: EngineSettings, config: ModelConfig, directory: Path) -> KvFormat:
    """How keys and values are stored. Reads the checkpoint's scales, where they are wanted and there are any."""
    if settings.kv_dtype == "fp8_e4m3_token":
        return KvFormat(torch.float8_e4m3fn, per_token=True)
    if settings.kv_dtype != "fp8_e4m3":
        return KvFormat(_dtype(settings.dtype if settings.kv_dtype == "auto" else settings.kv_dtype, config))
    weights = _Weights(directory, _weight_files(directory), torch.float32, torch.device("cpu"))
    scales = {
        f"layers.{i}.attn": (weights.kv_scale(i, "k"), weights.kv_scale(i, "v")) for i in range(config.num_layers)
    }
    return KvFormat(torch.float8_e4m3fn, scales=scales)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is unknown. Use cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported. Use cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices. Use cpu, or another.")
    return device


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [directory / Path(name).name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UnknownModel(f"{index} names {missing[0]}, which is missing. Copy the model directory again.")
    if not files:
        read_json(directory / "config.json")  # which of the two is missing? say that one
        raise UnknownModel(f"{str(directory)!r} holds no *.safetensors file. Give a directory with weights.")
    return files


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file, after checking that the file is as long as the header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise UnknownModel(f"{file} is no whole safetensors file: {size} bytes, header of {length}. Copy it again.")
        try:
            header = json.loads(stream.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise UnknownModel(f"{file} has a corrupt safetensors header: {error!r}. Copy it again.") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise UnknownModel(f"{file} is {size} bytes long, and its header says {expected}. Copy it again.")
    header.pop("__metadata__", None)
    return dict(header)


class _Weights:
    """All tensors of a model by name, over all its files: families.base.Weights. Nothing is read before `take`."""

    def __init__(self, directory: Path, files: list[Path], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.bar = Progress("", total_bytes=0, num_items=0)
        self._directory = directory
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._dtypes: dict[str, str] = {}
        self._open: dict[Path, Any] = {}
        self.num_bytes = 0
        for file in files:
            for name, entry in _header(file).items():
                self._shapes[name] = tuple(entry["shape"])
                self._dtypes[name] = str(entry.get("dtype"))
                self._files[name] = file
                self.num_bytes += entry["data_offsets"][1] - entry["data_offsets"][0]

    @property
    def num_tensors(self) -> int:
        return len(self._shapes)

    def check(self, config: ModelConfig) -> None:
        """Every tensor that the config implies is there, in its shape."""
        self.check_tensors(expected_tensors(config))

    def check_tensors(self, expected: Iterator[tuple[str, tuple[int, ...]]]) -> None:
        """The same of some tensors; and none is quantised, for its scales would be left out without a word."""
        for name, shape in expected:
            if name not in self._shapes:
                raise UnknownModel(f"{str(self._directory)!r} lacks the tensor {name!r} {shape}. Copy it again.")
            if self._shapes[name] != shape:
                raise UnknownModel(
                    f"{self._files[name]}: tensor {name!r} has shape {self._shapes[name]}, and config.json implies "
                    f"{shape}. Weights and config are of different models: copy both again."
                )
            if self._dtypes[name] not in (*WEIGHT_DTYPES, INDEX_DTYPE):
                raise UnknownModel(
                    f"{self._files[name]}: tensor {name!r} is stored as {self._dtypes[name]}, and this engine reads "
                    f"{', '.join(WEIGHT_DTYPES)}. Use a checkpoint whose weights are not quantised."
                )

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor."""
        return name in self._shapes

    def kv_scale(self, layer: int, part: str) -> float:
        """What stored keys (`k`) or values (`v`) of a layer are multiplied with; 1 where the checkpoint is silent."""
        attention = f"model.layers.{layer}.self_attn"
        for name in (f"{attention}.{part}_scale", f"{attention}.{part}_proj.{part}_scale"):
            if name in self._shapes:
                scale = self.take(name, dtype=torch.float32)
                if scale.numel() != 1 or not 0 < scale.item() < float("inf"):
                    raise UnknownModel(
                        f"{self._files[name]}: tensor {name!r} of shape {self._shapes[name]} is no positive number. "
                        "Use a checkpoint with one scale a layer, or --kv-dtype fp8_e4m3_token."
                    )
                return float(scale.item())
        return 1.0

    def take(
        self, name: str, *, rows: slice | None = None, cols: slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See families.base.Weights."""
        file = self._files[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            part = self._open[file].get_slice(name)
            index = tuple(slice(None) if s is None else s for s in (rows, cols))[: len(self._shapes[name])]
            tensor: torch.Tensor = part[index] if index else self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UnknownModel(f"{file}: tensor {name!r} cannot be read: {error}. Copy the file again.") from error
        self.bar.advance(tensor.nbytes)
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def linear(
        self,
        *names: str,
        rows: slice | Sequence[slice | None] | None = None,
        cols: slice | None = None,
        bias: bool = False,
    ) -> Linear:
        """See families.base.Weights."""
        parts = [rows] * len(names) if rows is None or isinstance(rows, slice) else list(rows)
        pairs = list(zip(names, parts, strict=True))
        weight = torch.cat([self.take(f"{name}.weight", rows=part, cols=cols) for name, part in pairs])
        return Linear(weight, torch.cat([self.take(f"{n}.bias", rows=part) for n, part in pairs]) if bias else None)


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a checkpoint of this config must have."""
    return family_of(config.architecture).expected_tensors(config)
