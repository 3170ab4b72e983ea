"""Builds what an engine runs on, its model and its ranks: at the start, and again after ranks have died."""

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
    """Loads the model and makes the cache, in this process or in rank processes. Blocks.

    `launcher` is passed to ProcessExecutor. Raises UnknownModel or ConfigError, if possible before a process is
    started; then nothing is left behind.
    """
    if settings.tp * settings.pp == 1:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        loaded = load_model(settings)
        drafter = find_drafter(settings, loaded)
        layers = layers_of(loaded.config, loaded.kv, Shard(), drafter)
        cache = KVCache.sized(layers, groups_of(loaded.config, loaded.kv, 1, drafter), settings, loaded.device)
        return loaded, LocalExecutor(loaded.network, cache, drafter=load_drafter(drafter, loaded, cache, Shard()))
    model = open_model(settings)
    check_parallel(model.config, settings)
    num_blocks = agreed_blocks(model.config, model.kv, settings, find_drafter(settings, model))
    executor = ProcessExecutor(settings, num_blocks=num_blocks, launcher=launcher)
    executor.start()
    return model, executor
