"""What the ranks of one engine keep, worked out from the model's config alone, before a process is started."""

from kvferry.engines.mini.cache.plan import cache_flag, free_bytes, num_blocks_of, place
from kvferry.engines.mini.models.cache_spec import GroupSpec, LayerCache, make_groups
from kvferry.engines.mini.models.config import ModelConfig
from kvferry.engines.mini.models.families import family_of
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation.drafter_info import DrafterInfo
from kvferry.errors import ConfigError

__all__ = ["agreed_blocks", "check_parallel", "groups_of", "layers_of", "shards"]


def shards(tp: int, pp: int) -> tuple[Shard, ...]:
    """Returns the shard of every rank, by index. They have no group to communicate in."""
    return tuple(Shard(index % tp, tp, index // tp, pp) for index in range(tp * pp))


def layers_of(
    config: ModelConfig, kv: KvFormat, shard: Shard, drafter: DrafterInfo | None = None
) -> tuple[LayerCache, ...]:
    """Returns what the layers of one rank keep, including the drafter's.

    Raises ConfigError if the model cannot be split that way.
    """
    drafts = drafter.caches(shard, kv) if drafter is not None else ()
    return (*family_of(config.architecture).caches(config, shard, kv), *drafts)


def groups_of(config: ModelConfig, kv: KvFormat, pp: int, drafter: DrafterInfo | None = None) -> tuple[GroupSpec, ...]:
    """Returns the cache groups over all stages. They are the same on every rank, so that one block table fits all."""
    return make_groups([layer for shard in shards(1, pp) for layer in layers_of(config, kv, shard, drafter)])


def agreed_blocks(
    config: ModelConfig, kv: KvFormat, settings: EngineSettings, drafter: DrafterInfo | None = None
) -> int:
    """Returns how many blocks every rank gets: the smallest number that any rank has room for.

    Raises ConfigError for fewer than two, or if the ranks' caches together exceed this machine's free memory.
    """
    groups = groups_of(config, kv, settings.pp, drafter)
    layers = [layers_of(config, kv, shard, drafter) for shard in shards(settings.tp, settings.pp)]
    num_blocks = min(num_blocks_of(one, groups, settings) for one in layers)
    need = num_blocks * sum(place(one, groups, settings.block_tokens).page_bytes for one in layers)
    free = free_bytes("cpu") if settings.device == "cpu" else None
    if free is not None and need > free:
        raise ConfigError(
            f"no memory for {len(layers)} ranks whose caches need {need} bytes together: {free} bytes are free. Set "
            f"cache_bytes of each rank to {free // len(layers)} or less "
            f"({cache_flag(free // len(layers), at_least=False)})."
        )
    return num_blocks


def check_parallel(config: ModelConfig, settings: EngineSettings) -> None:
    """Raises ConfigError if a model cannot be split into these ranks."""
    tp, pp = settings.tp, settings.pp
    if pp > config.num_layers:
        raise ConfigError(
            f"pp={pp!r} stages for the model's {config.num_layers} layers: some stages would have no layer. "
            f"Use --pp {config.num_layers} or fewer."
        )
    if config.num_heads % tp:
        fits = ", ".join(str(n) for n in range(1, config.num_heads + 1) if config.num_heads % n == 0)
        raise ConfigError(
            f"tp={tp!r} does not divide the model's {config.num_heads} attention heads. Use --tp with one of {fits}."
        )
