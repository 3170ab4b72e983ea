"""Random pairs of engines, from a seed: every cache kind, every way to shard, every way to lay out memory."""

import random
from dataclasses import dataclass, field
from typing import Any

from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.builders import (
    AxisOrder,
    Heads,
    KvPlace,
    LayoutBuilder,
    Pool,
    StatePart,
    attention_bytes,
    gated_delta_parts,
    head_range,
    mamba1_parts,
    mamba2_parts,
)
from kvferry.layout.description import CacheLayout, Rank, Region, Tensor

STATE_KINDS = ("mamba1", "mamba2", "gated_delta")


@dataclass(frozen=True)
class Layer:
    """One layer of a model, as both engines know it."""

    name: str
    kind: str
    """attention, mla, opaque, or one of STATE_KINDS."""
    heads: int = 1
    window: int | None = None
    scales: str = ""
    """"", "token" or "head"."""
    shares: str = ""
    """The layer whose cache this one uses."""


@dataclass(frozen=True)
class Model:
    """What P and D have in common."""

    layers: tuple[Layer, ...]
    head_dim: int
    element_bytes: int
    opaque_block: int
    """The number of tokens per block, if opaque packings demand one size."""


@dataclass(frozen=True)
class Config:
    """How one engine stores the cache of a model."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    cp_run: int = 1
    block_tokens: int = 4
    hybrid: bool = True
    """Groups by window; otherwise all paged layers are in one full group."""
    keep_window: bool = False
    """Not hybrid, but the group of window layers declares that only the window is needed."""
    order: AxisOrder = AxisOrder.NHD
    kv: KvPlace = KvPlace.PACKED
    memory: str = "own"
    """own: memory per layer; cross: a block holds all layers of the group; pages: groups take turns on pages."""
    num_blocks: int = 24
    shuffle: int = 0
    """Seed of the order of regions and tensors; 0 keeps it."""
    head_cuts: tuple[int, ...] = ()
    """Uneven split of attention heads over TP ranks; () is the usual one."""
    turned_states: bool = False
    """The axes of recurrent states are in reverse order in memory."""


@dataclass
class Engine:
    """All ranks of one engine (of decode: the one that reads), and which group holds which layers."""

    config: Config
    ranks: list[CacheLayout]
    group_of: dict[str, int]
    groups: list[str] = field(default_factory=list)
    """The tags, in the order of the groups."""


def random_model(rng: random.Random) -> Model:
    """Returns one to four layers."""
    kinds = rng.choice(
        (
            ["attention"],
            ["attention"],
            ["attention", "window"],
            ["attention", "window", "window"],
            ["mla"],
            ["mla", "attention"],
            ["attention", rng.choice(STATE_KINDS)],
            [rng.choice(STATE_KINDS), "window"],
            ["opaque"],
            ["opaque", "attention", rng.choice(STATE_KINDS)],
        )
    )
    heads = rng.choice((1, 2, 3, 4, 6))
    window = rng.choice((3, 5, 9))
    layers: list[Layer] = []
    for number in range(rng.choice((1, 2, 2, 3, 4))):
        kind = kinds[number % len(kinds)]
        scales = rng.choice(("", "", "token", "head"))
        name = f"layers.{number}.attn"
        if kind == "window":
            layers.append(Layer(name, "attention", heads, window, scales))
        elif kind in STATE_KINDS:
            layers.append(Layer(f"layers.{number}.mamba", kind, heads))
        else:
            layers.append(Layer(name, kind, heads, None, scales if kind == "attention" else ""))
    if rng.random() < 0.2:
        layers.append(Layer("mtp.0.attn", "attention", heads))
    if rng.random() < 0.1:
        layers.append(Layer("draft.layers.0.attn", "attention", rng.choice((1, 2))))
    sharers = [layer for layer in layers if layer.kind in ("attention", "mla")]
    if sharers and rng.random() < 0.15:
        owner = rng.choice(sharers)
        layers.append(Layer("layers.9.attn", owner.kind, owner.heads, owner.window, owner.scales, owner.name))
    return Model(tuple(layers), rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((2, 4)))


def random_config(rng: random.Random, model: Model, like: Config | None = None) -> Config:
    """Returns a side. `like` is the other side, for values that the model requires to be equal."""
    opaque = any(layer.kind == "opaque" for layer in model.layers)
    tp = rng.choice((1, 1, 2, 3, 4))
    cuts: tuple[int, ...] = ()
    least = min((layer.heads for layer in model.layers if layer.kind == "attention"), default=1)
    if 1 < tp < least and rng.random() < 0.2:
        cuts = tuple(sorted(rng.sample(range(1, least), tp - 1)))
    cp, cp_run = rng.choice(((1, 1), (1, 1), (1, 1), (2, 1), (3, 1), (2, 2), (2, 4)))
    if opaque and like is not None:
        cp, cp_run = like.cp, like.cp_run
    memory = rng.choice(("own", "own", "cross", "pages"))
    shared = any(layer.shares for layer in model.layers)
    pp = 1 if shared else rng.choice((1, 1, 2, 3))
    return Config(
        tp=tp,
        pp=pp,
        cp=cp,
        cp_run=cp_run,
        block_tokens=rng.choice((1, 2, 3, 4, 4, 6, 8)),
        hybrid=rng.random() < 0.6,
        keep_window=rng.random() < 0.6,
        order=rng.choice(tuple(AxisOrder)),
        kv=rng.choice(tuple(KvPlace) if memory == "own" else (KvPlace.PACKED, KvPlace.INTERLEAVED)),
        memory=memory,
        num_blocks=rng.choice((90, 96)) if memory == "pages" else 32,
        shuffle=rng.randrange(1000) * rng.randrange(2),
        head_cuts=cuts,
        turned_states=rng.random() < 0.5,
    )


def build(model: Model, config: Config, pick: random.Random | None = None) -> Engine:
    """Returns the layouts of all ranks, or of one of them."""
    tags: dict[str, str] = {}
    for layer in model.layers:
        if layer.kind in STATE_KINDS:
            tags[layer.name] = "state"
        elif layer.kind == "opaque":
            tags[layer.name] = "opaque"
        elif layer.window and (config.hybrid or config.keep_window):
            tags[layer.name] = "window"
        else:
            tags[layer.name] = "full"
    groups = list(dict.fromkeys(tags[layer.name] for layer in model.layers))
    if config.shuffle:
        random.Random(config.shuffle).shuffle(groups)
    engine = Engine(config, [], {name: groups.index(tag) for name, tag in tags.items()}, groups)
    places = [
        (pp_rank, tp_rank, cp_rank)
        for pp_rank in range(config.pp)
        if _stage(model, pp_rank, config.pp)
        for tp_rank in range(config.tp)
        for cp_rank in range(config.cp)
    ]
    for index, (pp_rank, tp_rank, cp_rank) in (
        enumerate(places) if pick is None else [pick.choice([*enumerate(places)])]
    ):
        rank = Rank(index, tp_rank, config.tp, pp_rank, config.pp, cp_rank, config.cp, config.cp_run)
        engine.ranks.append(_Rank(model, config, rank, groups, tags).build(_stage(model, pp_rank, config.pp)))
    return engine


def _stage(model: Model, pp_rank: int, pp: int) -> list[Layer]:
    return [layer for i, layer in enumerate(model.layers) if i * pp // len(model.layers) == pp_rank]


class _Rank:
    def __init__(self, model: Model, config: Config, rank: Rank, groups: list[str], tags: dict[str, str]) -> None:
        self.model, self.config, self.rank, self.tags = model, config, rank, tags
        self.builder = LayoutBuilder(rank)
        self.index: dict[str, int] = {}
        window = next((layer.window for layer in model.layers if layer.window), None)
        for tag in groups:
            if tag == "state":
                self.index[tag] = self.builder.states()
            elif tag == "window" and config.hybrid:
                assert window is not None, "a window group comes from a window layer"
                self.index[tag] = self.builder.window(config.block_tokens, window)
            else:
                tokens = model.opaque_block if tag == "opaque" else config.block_tokens
                self.index[tag] = self.builder.full(tokens, window_tokens=window if tag == "window" else None)

    def build(self, layers: list[Layer]) -> CacheLayout:
        own = [layer for layer in layers if not layer.shares]
        pools = self._pools(own)
        for layer in own:
            self._layer(layer, pools.get(layer.name))
        layout = self.builder.build()
        tensors = list(layout.tensors)
        for layer in layers:
            if layer.shares:
                tensors += [
                    Tensor(
                        layer.name,
                        t.part,
                        t.encoding,
                        t.element_bytes,
                        t.region,
                        t.group,
                        t.offset_bytes,
                        t.paging,
                        t.axes,
                    )
                    for t in layout.tensors
                    if t.layer == layer.shares
                ]
        return _shuffled(layout, tensors, self.config.shuffle)

    def _pools(self, layers: list[Layer]) -> dict[str, Pool]:
        if self.config.memory == "own":
            return {}
        by_tag: dict[str, list[Layer]] = {}
        for layer in layers:
            by_tag.setdefault(self.tags[layer.name], []).append(layer)
        result: dict[str, Pool] = {}
        if self.config.memory == "cross":
            for members in by_tag.values():
                pool = self.builder.pool(self.config.num_blocks, sum(self._bytes(layer) for layer in members))
                at = 0
                for layer in members:
                    result[layer.name] = pool.at(at)
                    at += self._bytes(layer)
            return result
        for number in range(max(len(members) for members in by_tag.values())):
            turn = [members[number] for members in by_tag.values() if number < len(members)]
            pool = self.builder.pool(self.config.num_blocks, max(self._bytes(layer) for layer in turn))
            result.update({layer.name: pool for layer in turn})
        return result

    def _heads(self, heads: int) -> Heads:
        cuts = self.config.head_cuts
        if cuts and cuts[-1] < heads:
            marks = (0, *cuts, heads)
            return Heads(heads, marks[self.rank.tp_rank], marks[self.rank.tp_rank + 1])
        return head_range(heads, self.rank.tp_rank, self.config.tp)

    def _parts(self, layer: Layer) -> tuple[StatePart, ...]:
        parts = self._state_parts(layer)
        if not self.config.turned_states:
            return parts
        return tuple(StatePart(p.part, p.encoding, p.element_bytes, p.axes[::-1]) for p in parts)

    def _state_parts(self, layer: Layer) -> tuple[StatePart, ...]:
        tp_rank, tp = self.rank.tp_rank, self.config.tp
        if layer.kind == "mamba1":
            return mamba1_parts(
                inner=layer.heads * 2, state=2, conv_width=3, tp_rank=tp_rank, tp_size=tp, element_bytes=2
            )
        if layer.kind == "mamba2":
            return mamba2_parts(
                heads=layer.heads,
                head_dim=2,
                groups=max(1, layer.heads // 2),
                state=2,
                conv_width=3,
                tp_rank=tp_rank,
                tp_size=tp,
                element_bytes=2,
            )
        return gated_delta_parts(
            key_heads=max(1, layer.heads // 2),
            value_heads=layer.heads,
            key_dim=2,
            value_dim=2,
            conv_width=3,
            tp_rank=tp_rank,
            tp_size=tp,
            element_bytes=2,
        )

    def _bytes(self, layer: Layer) -> int:
        tokens, m = self.config.block_tokens, self.model
        if layer.kind == "attention":
            heads = self._heads(layer.heads)
            size = attention_bytes(tokens, heads, m.head_dim, m.element_bytes)
            width = {"": 0, "token": 1, "head": len(heads)}[layer.scales]
            return size + 2 * tokens * width
        if layer.kind == "mla":
            return tokens * m.head_dim * m.element_bytes
        if layer.kind == "opaque":
            return m.opaque_block * 3
        return sum(part.num_bytes for part in self._parts(layer))

    def _layer(self, layer: Layer, pool: Pool | None) -> None:
        b, m, n = self.builder, self.model, self.config.num_blocks
        group = self.index[self.tags[layer.name]]
        common: dict[str, Any] = {"encoding": "e", "element_bytes": m.element_bytes, "pool": pool, "num_blocks": n}
        if layer.kind == "attention":
            heads = self._heads(layer.heads)
            b.attention(
                layer.name,
                group,
                heads=heads,
                head_dim=m.head_dim,
                order=self.config.order,
                kv=self.config.kv,
                **common,
            )
            if layer.scales:
                each = heads if layer.scales == "head" else None
                size = attention_bytes(self.config.block_tokens, heads, m.head_dim, m.element_bytes)
                where = pool.at(size) if pool else b.pool(n, 2 * self.config.block_tokens * (len(heads) if each else 1))
                b.scales(layer.name, group, heads=each, pool=where, element_bytes=1, encoding="s")
        elif layer.kind == "mla":
            b.latent(layer.name, group, latent_dim=m.head_dim, **common)
        elif layer.kind == "opaque":
            b.opaque(layer.name, group, block_bytes=m.opaque_block * 3, encoding="marlin", pool=pool, num_blocks=n)
        else:
            b.state(layer.name, group, self._parts(layer), pool=pool, num_blocks=n)


def _shuffled(layout: CacheLayout, tensors: list[Tensor], seed: int) -> CacheLayout:
    regions: list[Region] = list(layout.regions)
    if not seed:
        return CacheLayout(layout.rank, layout.regions, layout.groups, tuple(tensors))
    rng = random.Random(seed)
    order = list(range(len(regions)))
    rng.shuffle(order)
    place = {old: new for new, old in enumerate(order)}
    rng.shuffle(tensors)
    moved = []
    for t in tensors:
        axes = list(t.axes)
        rng.shuffle(axes)
        moved.append(
            Tensor(
                t.layer,
                t.part,
                t.encoding,
                t.element_bytes,
                place[t.region],
                t.group,
                t.offset_bytes,
                t.paging,
                tuple(axes),
            )
        )
    return CacheLayout(layout.rank, tuple(regions[old] for old in order), layout.groups, tuple(moved))


@dataclass
class Case:
    """One hand-off to be planned."""

    seed: str
    model: Model
    prefill: Engine
    decode: Engine
    reader: CacheLayout
    source_tables: list[BlockTable]
    destination_tables: list[BlockTable]
    wanted: TokenRange
    end: int


def random_case(seed: str) -> Case:
    """Returns everything about one hand-off, from a seed."""
    rng = random.Random(seed)
    model = random_model(rng)
    prefill_config = random_config(rng, model)
    decode_config = random_config(rng, model, prefill_config)
    if any(layer.shares for layer in model.layers):
        assert prefill_config.pp == decode_config.pp == 1, "layers that share a cache sit on one stage"
    prefill, decode = build(model, prefill_config), build(model, decode_config, rng)
    end = rng.randrange(1, 26)
    start = rng.choice((0, 0, rng.randrange(end)))
    stop = end if rng.random() < 0.7 else rng.randrange(start + 1, end + 1)
    wanted = TokenRange(start, stop)
    return Case(
        seed,
        model,
        prefill,
        decode,
        decode.ranks[0],
        tables(rng, model, prefill, end, 0),
        tables(rng, model, decode, end, start),
        wanted,
        end,
    )


def tables(rng: random.Random, model: Model, engine: Engine, end: int, start: int) -> list[BlockTable]:
    """Returns scattered or contiguous blocks for tokens [0 or later, end); groups that share pages share no block."""
    config = engine.config
    free = list(range(config.num_blocks))
    if rng.random() < 0.6:
        rng.shuffle(free)
    elif rng.random() < 0.5:
        free.reverse()
    window = next((layer.window for layer in model.layers if layer.window), 1)
    result = []
    for number, tag in enumerate(engine.groups):
        pool = free if config.memory == "pages" else rng.sample(free, len(free)) if rng.random() < 0.3 else list(free)
        if tag == "state":
            result.append(BlockTable(number, end, [pool.pop()]))
            continue
        size = model.opaque_block if tag == "opaque" else config.block_tokens
        first = 0
        if tag == "window" and config.hybrid:
            first = max(0, end - window + 1) // size * size if rng.random() < 0.7 else 0
        elif start and rng.random() < 0.3:
            first = start // size * size if tag == "opaque" or rng.random() < 0.7 else start
        if config.cp > 1:
            first = first // (size * config.cp * config.cp_run) * (size * config.cp * config.cp_run)
        dealt = -(-(end - first) // (config.cp * config.cp_run)) * config.cp_run
        count = -(-dealt // size) + rng.choice((0, 0, 1))
        if count > 1 and rng.random() < 0.04:
            count -= 1
        result.append(BlockTable(number, first, [pool.pop() for _ in range(count)]))
    rng.shuffle(result)
    return result
