"""What a worker of a model would state in a handshake, worked out from the model's files: no weight is loaded."""

import base64

from kvferry.cli.support.loading_display import show_loading
from kvferry.engines.mini.cache.plan import num_blocks_of, place
from kvferry.engines.mini.models.catalog import model_directory, read_config
from kvferry.engines.mini.models.loading import kv_format
from kvferry.engines.mini.ranks.sizing import check_parallel, groups_of, layers_of, shards
from kvferry.engines.mini.scheduling.block_manager import BlockManager
from kvferry.engines.mini.scheduling.cache_groups import Groups
from kvferry.engines.mini.speculation.drafter_info import DrafterInfo, open_drafter
from kvferry.engines.mini.worker import WorkerSettings, describe
from kvferry.handshake.facts import Facts
from kvferry.layout.description import CacheLayout, MemoryKind
from kvferry.wire.hello import Hello, RankHello, encode_hello
from kvferry.wire.layout_codec import encode_layout

__all__ = ["describe_model"]


def describe_model(settings: WorkerSettings) -> dict[str, object]:
    """Returns what GET /v1/kvferry of such a worker would hold of its facts and layouts, ready for JSON.

    Raises UnknownModel, and ConfigError where the model cannot be split or cached like this.
    """
    show_loading()  # a GGUF file is converted at its first use
    engine = settings.engine
    directory = model_directory(engine.model)
    config = read_config(directory)
    check_parallel(config, engine)
    kv = kv_format(engine, config, directory)
    drafter: DrafterInfo | None = None
    if engine.speculation is not None:
        drafter = open_drafter(engine.speculation, directory, config, pp=engine.pp)
    groups = groups_of(config, kv, engine.pp, drafter)
    ranks = [(shard, layers_of(config, kv, shard, drafter)) for shard in shards(engine.tp, engine.pp)]
    num_blocks = min(num_blocks_of(layers, groups, engine) for _, layers in ranks)
    layouts = [
        place(layers, groups, engine.block_tokens).layout(num_blocks, rank=shard.rank, kind=MemoryKind.DRAM)
        for shard, layers in ranks
    ]
    rooms = Groups(
        layouts[0].groups, BlockManager(num_blocks), block_tokens=engine.block_tokens,
        chunk_tokens=engine.max_batch_tokens, prefix_caching=engine.prefix_caching,
    )  # fmt: skip
    context = min(engine.max_model_len or config.max_positions, config.max_positions)
    return {
        "engine": "-",
        "incarnation": "-",
        "role": settings.role.value,
        "mode": settings.ferry.transfer.mode.value,
        "limits": {
            "max_model_len": context,
            "block_tokens": engine.block_tokens,
            "blocks": num_blocks - 1,
            "tokens": min(context, rooms.room_tokens() + 1),
        },
        "facts": Facts.from_engine(describe(settings, config, directory, engine.dtype, kv)).to_json(),
        "hello": base64.b64encode(encode_hello(_hello(settings, layouts))).decode(),
    }


def _hello(settings: WorkerSettings, layouts: list[CacheLayout]) -> Hello:
    ranks = tuple(
        RankHello(layout=encode_layout(layout), transport=settings.ferry.transfer.transport, transport_metadata=b"")
        for layout in layouts
    )
    return Hello(engine="-", incarnation="-", role=settings.role, ranks=ranks)
