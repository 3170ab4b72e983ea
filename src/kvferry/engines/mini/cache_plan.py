"""What the ranks of one engine keep, worked out from the model's config alone: before a process is started."""

import torch

from kvferry.engines.mini.cache import ENCODINGS, num_blocks_of
from kvferry.engines.mini.models import ModelConfig
from kvferry.engines.mini.parallel import Shard
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.specs import GroupSpec, LayerCache, attention_parts, make_groups
from kvferry.layout.description import CacheKind

__all__ = ["agreed_blocks", "groups_of", "layers_of", "shards"]


def shards(tp: int, pp: int) -> tuple[Shard, ...]:
    """Every rank of an engine, by index; without a group to speak with."""
    return tuple(Shard(index % tp, tp, index // tp, pp) for index in range(tp * pp))


def layers_of(config: ModelConfig, dtype: torch.dtype, shard: Shard) -> tuple[LayerCache, ...]:
    """What the layers of one rank keep."""
    kv = shard.heads(config.num_heads, config.num_kv_heads).kv
    parts = attention_parts((kv.extent, kv.start, kv.stop), config.head_dim, dtype, ENCODINGS[dtype])
    return tuple(LayerCache(f"layers.{i}.attn", CacheKind.FULL, None, parts) for i in shard.layers(config.num_layers))


def groups_of(config: ModelConfig, dtype: torch.dtype, pp: int) -> tuple[GroupSpec, ...]:
    """Cache groups over all stages: the same on every rank, so that block tables are."""
    return make_groups([layer for shard in shards(1, pp) for layer in layers_of(config, dtype, shard)])


def agreed_blocks(config: ModelConfig, dtype: torch.dtype, settings: EngineSettings) -> int:
    """How many blocks every rank can have: the least that any of them can. Raises ConfigError for fewer than two."""
    groups = groups_of(config, dtype, settings.pp)
    ranks = shards(settings.tp, settings.pp)
    return min(num_blocks_of(layers_of(config, dtype, shard), groups, settings) for shard in ranks)
