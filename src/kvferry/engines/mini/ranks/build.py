"""What an engine runs on: its model and its ranks. Made at the start, and anew when ranks have died."""

import torch

from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.models.loading import OpenedModel, load_model, open_model
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.ranks.executor import Executor, LocalExecutor
from kvferry.engines.mini.ranks.launcher import Launcher
from kvferry.engines.mini.ranks.processes import ProcessExecutor
from kvferry.engines.mini.ranks.sizing import agreed_blocks, check_parallel, groups_of, layers_of
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation.load_drafter import find_drafter, load_drafter

__all__ = ["build_executor"]


def build_executor(settings: EngineSettings, launcher: Launcher | None = None) -> tuple[OpenedModel, Executor]:
    """Load the model and make the cache: here, or in rank processes. Blocks. `launcher`: see ProcessExecutor.

    Raises UnknownModel or ConfigError, where it can be before a process is started; then nothing is left behind.
    """
    if settings.tp * settings.pp == 1:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        model = load_model(settings)
        drafter = find_drafter(settings, model)
        layers = layers_of(model.config, model.kv, Shard(), drafter)
        cache = KVCache.sized(layers, groups_of(model.config, model.kv, 1, drafter), settings, model.device)
        return model, LocalExecutor(model.network, cache, drafter=load_drafter(drafter, model, cache, Shard()))
    card = open_model(settings)
    check_parallel(card.config, settings)
    num_blocks = agreed_blocks(card.config, card.kv, settings, find_drafter(settings, card))
    executor = ProcessExecutor(settings, num_blocks=num_blocks, launcher=launcher)
    executor.start()
    return card, executor
