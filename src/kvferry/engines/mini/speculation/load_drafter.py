"""Finds the drafter of an engine together with its model, and loads it on each rank after the model."""

from pathlib import Path

from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.models.checkpoint import Checkpoint
from kvferry.engines.mini.models.loading import LoadedModel, OpenedModel
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation.chain import Drafter
from kvferry.engines.mini.speculation.drafter_info import DrafterInfo, OpenWeights, make_drafter, open_drafter
from kvferry.errors import ConfigError

__all__ = ["find_drafter", "load_drafter"]


def find_drafter(settings: EngineSettings, model: OpenedModel) -> DrafterInfo | None:
    """Returns the drafter, or None without speculation. Raises UnknownModel or ConfigError."""
    if settings.speculation is None:
        return None
    return open_drafter(settings.speculation, model.directory, model.config, pp=settings.pp)


def load_drafter(info: DrafterInfo | None, model: LoadedModel, cache: KVCache, shard: Shard) -> Drafter | None:
    """Loads the drafter of one rank; None if the rank has none. Raises UnknownModel or ConfigError."""
    if info is None:
        return None

    def weights(directory: Path) -> OpenWeights:
        return Checkpoint(directory, model.dtype, model.device)

    if info.aux_layers is not None:
        capture_hidden = getattr(model.network, "capture_hidden", None)
        if capture_hidden is None:
            raise ConfigError(
                f"speculative method='eagle3' reads hidden states between layers, which {model.config.architecture} "
                "does not provide. Use a target of the Llama family, or another method."
            )
        capture_hidden(info.aux_layers)
    return make_drafter(info, model.config, weights(model.directory), weights, cache, shard)
