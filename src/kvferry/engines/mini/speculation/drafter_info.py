"""The drafter of an engine: how it is found and checked, which layers it has in the cache, how it is built."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvferry.connector.lookahead import prefill_backoff
from kvferry.engines.mini.cache.pages import LayerPages
from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.compute.attention import StepBatch
from kvferry.engines.mini.models.cache_spec import LayerCache
from kvferry.engines.mini.models.catalog import model_directory, read_config
from kvferry.engines.mini.models.config import ModelConfig
from kvferry.engines.mini.models.families import family_of
from kvferry.engines.mini.models.families.base import Weights
from kvferry.engines.mini.models.families.layers import split_heads
from kvferry.engines.mini.models.families.llama import LlamaConfig
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.speculation import eagle3, mtp
from kvferry.engines.mini.speculation.chain import ChainDrafter, Drafter
from kvferry.engines.mini.speculation.draft_model import DRAFT_PREFIX, DraftModel
from kvferry.engines.mini.speculation_settings import TEXT_METHODS, SpeculationSettings, SpeculativeConfig
from kvferry.engines.mini.step import ChunkInput
from kvferry.errors import ConfigError, UnknownModel
from kvferry.modelfiles import read_json

__all__ = ["DrafterInfo", "OpenWeights", "make_drafter", "open_drafter"]

T = TypeVar("T")
Tensors = Iterator[tuple[str, tuple[int, ...]]]


class OpenWeights(Weights, Protocol):
    """A checkpoint that can check whether it is complete."""

    def check_tensors(self, expected: Tensors) -> None:
        """Raises UnknownModel for the first tensor that is missing or has another shape."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A drafter that was found and checked. Its weights may be loaded in other processes."""

    speculative: SpeculativeConfig
    directory: Path | None
    """The directory of its own checkpoint; None: it has none, or is part of the target's."""
    config: ModelConfig | None
    """The config of its layers that keep KV; None for drafters that know only the text."""

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """The target's layers whose inputs the drafter reads (R4), or None."""
        return self.config.aux_layers if isinstance(self.config, eagle3.Eagle3Config) else None

    @property
    def num_slots_ahead(self) -> int:
        """How many slots after the last known token the drafter writes to while it drafts."""
        count, method = self.speculative.num_tokens, self.speculative.settings.method
        if method in TEXT_METHODS:
            return 0
        return max(0, count if method == "draft_model" else count - self.speculative.num_modules)

    @property
    def starts_cold(self) -> bool:
        """Whether, on decode, its cache of a prompt that was handed over is empty."""
        return self.config is not None and self.speculative.settings.cold_start

    def caches(self, shard: Shard, kv: KvFormat) -> tuple[LayerCache, ...]:
        """Returns what its layers keep on one rank. Only the last stage has any; they are handed over by their names.

        Layers of a drafter that starts cold are private: peers do not learn of them.
        """
        layers = self._caches(shard, kv)
        if not self.starts_cold:
            return layers
        return tuple(
            replace(layer, parts=tuple(replace(part, private=True) for part in layer.parts)) for layer in layers
        )

    def _caches(self, shard: Shard, kv: KvFormat) -> tuple[LayerCache, ...]:
        if self.config is None or not shard.is_last:
            return ()
        alone = replace(shard, pp_rank=0, pp_size=1)
        if self.speculative.settings.method == "draft_model":
            layers = family_of(self.config.architecture).caches(self.config, alone, kv)
            return tuple(replace(layer, layer=DRAFT_PREFIX + layer.layer) for layer in layers)
        names = {"mtp": "mtp.{}.attn", "eagle3": "eagle.layers.{}.attn"}[self.speculative.settings.method]
        held = split_heads(self.config.num_heads, self.config.num_kv_heads, alone).kv
        heads = (held.extent, held.start, held.stop)
        windows = self.config.windows
        return tuple(
            kv.attention(names.format(i), heads, self.config.head_dim, window) for i, window in enumerate(windows)
        )


def open_drafter(settings: SpeculationSettings, directory: Path, target: ModelConfig, *, pp: int = 1) -> DrafterInfo:
    """Finds and checks the drafter of the target in `directory`.

    Raises UnknownModel, or ConfigError if the drafter does not fit the target or `pp` stages.
    """
    if settings.method in TEXT_METHODS:
        return DrafterInfo(SpeculativeConfig(settings, 0), None, None)
    if settings.method == "mtp":
        path = directory / "config.json"
        modules = _read(path, lambda raw: mtp.read_modules(raw))
        if modules is None:
            raise ConfigError(
                f"speculative method='mtp', and {str(directory)!r} has no MTP modules (num_nextn_predict_layers in its "
                "config.json). Use another method, or a checkpoint with modules."
            )
        return DrafterInfo(SpeculativeConfig(settings, modules.num_layers), None, modules)
    own = model_directory(settings.model or "")
    if settings.method == "eagle3":
        if pp > 1:
            raise ConfigError(
                f"speculative method='eagle3' reads hidden states of layers on every stage, and pp={pp!r}. "
                "Use --pp 1, or mtp or draft_model."
            )
        head = _read(own / "config.json", lambda raw: eagle3.read_eagle3(raw, target))
        return DrafterInfo(SpeculativeConfig(settings, 1), own, head)
    draft = read_config(own)
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {settings.model!r} has a vocabulary of {draft.vocab_size} and the target one of "
            f"{target.vocab_size}: its tokens mean something else. Use a draft model with the target's tokenizer."
        )
    if any(kind not in ("full", "window") for kind in draft.layer_kinds):
        raise ConfigError(
            f"the draft model {settings.model!r} has layers with a recurrent state, which cannot be undone for a "
            "rejected draft. Use a draft model with attention layers only."
        )
    return DrafterInfo(SpeculativeConfig(settings, 0), own, draft)


def _read(path: Path, read: Callable[[dict[str, Any]], T]) -> T:
    try:
        return read(read_json(path))
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownModel(f"{path}: missing or wrong entry: {error!r}. Copy it again.") from error


def make_drafter(
    info: DrafterInfo,
    target: ModelConfig,
    target_weights: OpenWeights,
    open_weights: Callable[[Path], OpenWeights],
    cache: KVCache,
    shard: Shard,
) -> Drafter | None:
    """Loads the drafter of one rank; None if the rank has none. Raises UnknownModel."""
    if info.config is None or not shard.is_last:
        return None
    device, dtype = target_weights.device, target_weights.dtype
    pages: dict[str, LayerPages] = {}

    def make_batch(shares: Sequence[ChunkInput]) -> StepBatch:
        return StepBatch(cache, shares, dtype, pages)

    alone = replace(shard, pp_rank=0, pp_size=1)
    if info.speculative.settings.method == "draft_model":
        assert info.directory is not None, "a draft model is a checkpoint of its own"
        weights = open_weights(info.directory)
        family = family_of(info.config.architecture)
        weights.check_tensors(family.expected_tensors(info.config))
        network = family.build(info.config, weights, alone)
        return DraftModel(network, make_batch, device=device, block_tokens=cache.block_tokens)
    unsafe, lookahead = (
        info.speculative.settings.unsafe_without_backoff,
        info.speculative.num_prefill_lookahead_tokens,
    )
    return ChainDrafter(
        _modules(info, target, target_weights, open_weights, alone),
        make_batch,
        device=device,
        block_tokens=cache.block_tokens,
        max_positions=info.config.max_positions,
        lost=prefill_backoff(mamba=False, lookahead=lookahead) if unsafe else 0,
    )


def _modules(
    info: DrafterInfo,
    target: ModelConfig,
    target_weights: OpenWeights,
    open_weights: Callable[[Path], OpenWeights],
    shard: Shard,
) -> "Sequence[mtp.MtpModule] | Sequence[eagle3.Eagle3]":
    if isinstance(info.config, eagle3.Eagle3Config):
        assert info.directory is not None, "an EAGLE head is a checkpoint of its own"
        weights = open_weights(info.directory)
        weights.check_tensors(eagle3.expected_tensors(info.config))
        return [eagle3.Eagle3(info.config, weights, shard, target_weights)]
    assert isinstance(info.config, LlamaConfig), "modules are layers of the Llama kind"
    target_weights.check_tensors(mtp.expected_tensors(info.config, target.num_layers))
    return mtp.build_modules(info.config, target_weights, shard, first=target.num_layers)
