"""The tensors of a checkpoint: checked before use, and read from safetensors files when a network asks for them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvferry.engines.mini.models.config import ModelConfig
from kvferry.engines.mini.models.families import family_of
from kvferry.engines.mini.models.linear import Linear
from kvferry.errors import UnknownModel
from kvferry.modelfiles import read_json, read_safetensors_header

__all__ = ["Checkpoint", "expected_tensors"]

INDEX_DTYPE = "I64"
"""The dtype of tables of ids, as an EAGLE-3 head has them. No quantised weight is stored in it."""
WEIGHT_DTYPES = ("F64", "F32", "BF16", "F16")


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of every tensor that a checkpoint of this config must have."""
    return family_of(config.architecture).expected_tensors(config)


class Checkpoint:
    """All tensors of a model by name, over all its files. Implements families.base.Weights."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Reads the headers of the files; tensors are read by `take`.

        `dtype` and `device` are those of the tensors that `take` returns. Raises UnknownModel for an incomplete
        checkpoint.
        """
        self.dtype = dtype
        self.device = device
        self.on_take: Callable[[int], None] = lambda num_bytes: None
        """Called with the size of each tensor that was read."""
        self._directory = directory
        files = _weight_files(directory)
        self._entries = {entry.name: entry for file in files for entry in read_safetensors_header(file)}
        self._open: dict[Path, Any] = {}

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in their files."""
        return sum(entry.num_bytes for entry in self._entries.values())

    @property
    def num_tensors(self) -> int:
        """The number of tensors in all files."""
        return len(self._entries)

    def check(self, config: ModelConfig) -> None:
        """Checks that every tensor that the config implies is there, in its shape. Raises UnknownModel."""
        self.check_tensors(expected_tensors(config))

    def check_tensors(self, expected: Iterator[tuple[str, tuple[int, ...]]]) -> None:
        """Checks some tensors: each is there, in its shape, and not quantised. Raises UnknownModel.

        A quantised tensor would be read without its scales, so its values would be silently wrong.
        """
        for name, shape in expected:
            entry = self._entries.get(name)
            if entry is None:
                raise UnknownModel(
                    f"{str(self._directory)!r} lacks the tensor {name!r} {shape}. Copy or download it again."
                )
            if entry.shape != shape:
                raise UnknownModel(
                    f"{entry.file}: tensor {name!r} has shape {entry.shape}, and config.json implies {shape}. "
                    "Weights and config belong to different models: copy or download both again."
                )
            if entry.dtype not in (*WEIGHT_DTYPES, INDEX_DTYPE):
                raise UnknownModel(
                    f"{entry.file}: tensor {name!r} is stored as {entry.dtype}, and this engine reads "
                    f"{', '.join(WEIGHT_DTYPES)}. Use a checkpoint whose weights are not quantised."
                )

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor."""
        return name in self._entries

    def kv_scale(self, layer: int, part: str) -> float:
        """Returns the factor for stored keys (`k`) or values (`v`) of a layer; 1 if the checkpoint has none."""
        attention = f"model.layers.{layer}.self_attn"
        for name in (f"{attention}.{part}_scale", f"{attention}.{part}_proj.{part}_scale"):
            if name in self._entries:
                scale = self.take(name, dtype=torch.float32)
                if scale.numel() != 1 or not 0 < scale.item() < float("inf"):
                    entry = self._entries[name]
                    raise UnknownModel(
                        f"{entry.file}: tensor {name!r} of shape {entry.shape} is not one positive number. "
                        "Use a checkpoint with one scale per layer, or --kv-dtype fp8_e4m3_token."
                    )
                return float(scale.item())
        return 1.0

    def take(
        self, name: str, *, rows: slice | None = None, cols: slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Implements families.base.Weights."""
        file = self._entries[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            part = self._open[file].get_slice(name)
            index = tuple(slice(None) if s is None else s for s in (rows, cols))[: len(self._entries[name].shape)]
            tensor: torch.Tensor = part[index] if index else self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UnknownModel(
                f"{file}: tensor {name!r} cannot be read: {error}. Copy or download the file again."
            ) from error
        self.on_take(tensor.nbytes)
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def linear(
        self,
        *names: str,
        rows: slice | Sequence[slice | None] | None = None,
        cols: slice | None = None,
        bias: bool = False,
    ) -> Linear:
        """Implements families.base.Weights."""
        parts = [rows] * len(names) if rows is None or isinstance(rows, slice) else list(rows)
        pairs = list(zip(names, parts, strict=True))
        weight = torch.cat([self.take(f"{name}.weight", rows=part, cols=cols) for name, part in pairs])
        return Linear(weight, torch.cat([self.take(f"{n}.bias", rows=part) for n, part in pairs]) if bias else None)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [directory / Path(name).name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UnknownModel(f"{index} names {missing[0]}, which is missing. Copy or download the model again.")
    if not files:
        read_json(directory / "config.json")  # raises if this is missing too, and then the message names it
        raise UnknownModel(f"{str(directory)!r} holds no *.safetensors file. Give a directory with weights.")
    return files
