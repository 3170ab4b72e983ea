"""Opens a model, or loads it: everything but the weights, and then the network of one rank."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from kvferry.engines.mini.models.catalog import model_directory, read_config
from kvferry.engines.mini.models.checkpoint import Checkpoint
from kvferry.engines.mini.models.config import ModelConfig
from kvferry.engines.mini.models.families import family_of
from kvferry.engines.mini.models.families.base import Network
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.models.progress import Reporter
from kvferry.engines.mini.models.tokenizer import Tokenizer
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError

__all__ = ["LoadedModel", "OpenedModel", "kv_format", "load_model", "open_model"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that was found and checked. Its weights may be in other processes."""

    name: str
    """The name that the operator gave."""
    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    kv: KvFormat
    """How its keys and values are stored."""


@dataclass(frozen=True, slots=True)
class LoadedModel(OpenedModel):
    """A model, or one rank's part of it, that is ready to run."""

    network: Network
    device: torch.device


def open_model(settings: EngineSettings) -> OpenedModel:
    """Finds and checks a model, and reads everything but its weights. Raises the errors of `load_model`."""
    return _open(settings)[0]


def load_model(settings: EngineSettings, shard: Shard | None = None) -> LoadedModel:
    """Finds, checks and loads a model, or one rank's part of it. Only the first rank reports its progress.

    Raises UnknownModel, or ConfigError for a device or dtype.
    """
    shard = shard or Shard()
    opened, weights = _open(settings)
    with Reporter(
        f"load {settings.model}",
        total_bytes=weights.num_bytes,
        total_tensors=weights.num_tensors,
        silent=shard.index > 0,
    ) as reporter:
        weights.on_take = reporter.advance
        network = family_of(opened.config.architecture).build(opened.config, weights, shard)
    logger.info("model loaded directory=%s dtype=%s device=%s", opened.directory, opened.dtype, weights.device)
    return LoadedModel(
        opened.name,
        opened.directory,
        opened.config,
        opened.tokenizer,
        opened.dtype,
        opened.kv,
        network,
        weights.device,
    )


def _open(settings: EngineSettings) -> tuple[OpenedModel, Checkpoint]:
    directory = model_directory(settings.model)
    config = read_config(directory)
    if settings.max_model_len is not None and settings.max_model_len > config.max_positions:
        raise ConfigError(
            f"max_model_len={settings.max_model_len!r} is above the model's context of {config.max_positions} tokens. "
            "Lower it, or leave it out (--max-model-len)"
        )
    dtype = _dtype(settings.dtype, config)
    weights = Checkpoint(directory, dtype, _device(settings.device))
    weights.check(config)
    kv = kv_format(settings, config, directory)
    tokenizer = Tokenizer.from_directory(directory)
    return OpenedModel(settings.model, directory, config, tokenizer, dtype, kv), weights


def _dtype(name: str, config: ModelConfig) -> torch.dtype:
    wanted = config.dtype if name == "auto" else name
    # Half precision is not offered: its range is too small for some of these models.
    return torch.float32 if wanted == "float32" else torch.bfloat16


def kv_format(settings: EngineSettings, config: ModelConfig, directory: Path) -> KvFormat:
    """Returns how keys and values are stored. Reads the checkpoint's scales if `kv_dtype` is `fp8_e4m3`."""
    if settings.kv_dtype == "fp8_e4m3_token":
        return KvFormat(torch.float8_e4m3fn, per_token=True)
    if settings.kv_dtype != "fp8_e4m3":
        return KvFormat(_dtype(settings.dtype if settings.kv_dtype == "auto" else settings.kv_dtype, config))
    weights = Checkpoint(directory, torch.float32, torch.device("cpu"))
    scales = {
        f"layers.{i}.attn": (weights.kv_scale(i, "k"), weights.kv_scale(i, "v")) for i in range(config.num_layers)
    }
    return KvFormat(torch.float8_e4m3fn, scales=scales)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is unknown. Use --device cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported. Use --device cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices. Use --device cpu, or another one."
        )
    return device
