"""The memory of one rank's cache: one allocation of pages, on which the cache groups take turns.

A page holds one block (of a state group: one state) of all the layers that one group has on this rank, one behind the
other; a block of all layers is one run of bytes. So a block id says where a block is, whichever group it belongs to.
For a model of one kind of layers a page is [layers, key and value, kv_heads, block_tokens, head_dim].
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, lcm, prod

import torch

from kvferry.engines.mini.models.cache_spec import CachePart, GroupSpec, LayerCache, make_groups
from kvferry.engines.mini.models.config import ModelConfig
from kvferry.engines.mini.models.families import family_of
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError
from kvferry.layout.builders import MADE_UP_ADDRESS
from kvferry.layout.description import (
    Axis,
    CacheGroup,
    CacheKind,
    CacheLayout,
    MemoryKind,
    Paging,
    Rank,
    Region,
    Tensor,
)

__all__ = ["KVCache", "Placement", "cache_flag", "free_bytes", "num_blocks_of", "place"]

logger = logging.getLogger(__name__)

STATE_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank's parts lie in a page. Made from descriptions alone: no memory is needed."""

    groups: tuple[GroupSpec, ...]
    block_tokens: int
    page_bytes: int
    parts: dict[tuple[str, str], tuple[CachePart, int, int]]
    """By layer and part: the part, its group, and where it begins in the page."""

    def strides(self, part: CachePart, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides, in elements, of one part of one page, with the axis of tokens if it has one."""
        sizes = list(part.sizes)
        if self.groups[group].kind is not CacheKind.STATE:
            sizes.insert(part.token_at, self.block_tokens)
        return tuple(sizes), tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))

    def layout(
        self, num_blocks: int, *, rank: Rank, address: int = MADE_UP_ADDRESS, kind: MemoryKind, device: int = 0
    ) -> CacheLayout:
        """Where every byte is, for the connector."""
        tensors = []
        for (layer, name), (part, group, offset) in self.parts.items():
            if part.private:
                continue
            element = part.dtype.itemsize
            strides = [element * stride for stride in self.strides(part, group)[1]]
            paged = self.groups[group].kind is not CacheKind.STATE
            token = strides.pop(part.token_at) if paged else None
            axes = tuple(Axis(*axis, stride) for axis, stride in zip(part.axes, strides, strict=True))
            paging = Paging(num_blocks, self.page_bytes, token)
            tensors.append(Tensor(layer, name, part.encoding, element, 0, group, offset, paging, axes))
        groups = [
            CacheGroup(spec.kind, 0 if spec.kind is CacheKind.STATE else self.block_tokens, spec.window_tokens)
            for spec in self.groups
        ]
        region = Region(address, num_blocks * self.page_bytes, kind, device)
        return CacheLayout(rank, (region,), tuple(groups), tuple(tensors))


def place(layers: Sequence[LayerCache], groups: Sequence[GroupSpec], block_tokens: int) -> Placement:
    """Lay out the layers of one rank. `groups`: of the whole model.

    In each group the parts with the longest rows come first, layer by layer, so that scales lie behind all keys and
    values. A page is a whole number of rows: attention reads the allocation as rows of one (block, head).
    """
    parts: dict[tuple[str, str], tuple[CachePart, int, int]] = {}
    page, unit = 0, 1
    by_name = {layer.layer: layer for layer in layers}
    for number, group in enumerate(groups):
        state = group.kind is CacheKind.STATE
        held = [(name, part) for name in group.layers if name in by_name for part in by_name[name].parts]
        if not state:
            held.sort(key=lambda entry: (entry[1].name.endswith(".scale"), -_row_bytes(entry[1], block_tokens)))
        offset = 0
        for name, part in held:
            align = STATE_ALIGN_BYTES if state else part.dtype.itemsize
            offset = -(-offset // align) * align
            parts[name, part.name] = (part, number, offset)
            offset += part.num_bytes * (1 if state else block_tokens)
            unit = lcm(unit, align if state or part.name.endswith(".scale") else _row_bytes(part, block_tokens))
        page = max(page, offset)
    return Placement(tuple(groups), block_tokens, -(-page // unit) * unit, parts)


def _tell_of_waste(placement: Placement) -> None:
    """Groups of tokens whose blocks fill little of a page, because a state of one layer is so large."""
    used = [0] * len(placement.groups)
    for part, group, _ in placement.parts.values():
        used[group] += part.num_bytes
    per_token = max(
        (size for size, spec in zip(used, placement.groups, strict=True) if spec.kind is not CacheKind.STATE), default=0
    )
    if per_token and 2 * per_token * placement.block_tokens < placement.page_bytes:
        logger.warning(
            "a block of %d tokens fills %d of %d bytes of a cache page, which has to hold a recurrent state too: with "
            "block_tokens=%d (--block-tokens) the cache would hold more tokens",
            placement.block_tokens,
            per_token * placement.block_tokens,
            placement.page_bytes,
            max(placement.block_tokens, placement.page_bytes // per_token // 16 * 16),
        )


def _row_bytes(part: CachePart, block_tokens: int) -> int:
    """What of a block lies together for each head: its tokens, each with the axes behind theirs."""
    return block_tokens * prod(part.sizes[part.token_at :]) * part.dtype.itemsize


class KVCache:
    """Owns the memory. Block 0 is never given to a request: it stays zero, and pads short block tables."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        groups: Sequence[GroupSpec],
        *,
        num_blocks: int,
        block_tokens: int,
        device: str,
        rank: Rank | None = None,
    ) -> None:
        """`layers`: of this rank; `groups`: of the whole model. Raises ConfigError if there is no memory for it."""
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.placement = place(layers, groups, block_tokens)
        self.windows = {layer.layer: layer.window_tokens for layer in layers}
        """How many tokens back each layer sees, itself included; None: all."""
        self._rank = rank or Rank()
        dtypes = {part.dtype for part, _, _ in self.placement.parts.values()}
        # Of several dtypes the bytes are all that they have in common; and floats of 8 bits cannot be filled.
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        dtype = dtype if dtype.itemsize > 1 else torch.uint8
        need = num_blocks * self.placement.page_bytes
        _check_memory(need, self.placement.page_bytes, device)
        try:
            self.data = torch.zeros(
                (num_blocks, self.placement.page_bytes // dtype.itemsize), dtype=dtype, device=device
            )
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"no memory for a cache of {need} bytes: {error}. Lower cache_bytes (--cache-gb)."
            ) from error
        """[num_blocks, elements of a page]."""
        self._views = {name: self._view(*where) for name, where in self.placement.parts.items()}
        self._groups = {layer: group for (layer, _), (_, group, _) in self.placement.parts.items()}
        if self._rank.index == 0:
            _tell_of_waste(self.placement)

    @classmethod
    def create(
        cls, config: ModelConfig, settings: EngineSettings, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """For a whole model."""
        layers = family_of(config.architecture).caches(config, Shard(), KvFormat(dtype))
        return cls.sized(layers, make_groups(layers), settings, device)

    @classmethod
    def sized(
        cls,
        layers: Sequence[LayerCache],
        groups: Sequence[GroupSpec],
        settings: EngineSettings,
        device: torch.device,
        *,
        rank: Rank | None = None,
        num_blocks: int | None = None,
    ) -> "KVCache":
        """As the settings say, or with `num_blocks`. Raises ConfigError if not even two blocks fit."""
        count = num_blocks or num_blocks_of(layers, groups, settings)
        return cls(layers, groups, num_blocks=count, block_tokens=settings.block_tokens, device=str(device), rank=rank)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.data.device

    def view(self, layer: str, part: str) -> torch.Tensor:
        """[num_blocks, axes of the part, with that of the tokens if it has one]: one part of one layer, in place."""
        return self._views[layer, part]

    def group_of(self, layer: str) -> int:
        """Which block table a layer goes by."""
        return self._groups[layer]

    def _view(self, part: CachePart, group: int, offset: int) -> torch.Tensor:
        typed = self.data.view(torch.uint8).view(part.dtype)
        sizes, strides = self.placement.strides(part, group)
        page = self.placement.page_bytes // part.dtype.itemsize
        start = offset // part.dtype.itemsize
        return typed.as_strided((self.num_blocks, *sizes), (page, *strides), start)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero some blocks, before they are given to a request.

        Attention multiplies masked positions by a weight of zero, and zero times the NaN that a faulty peer may have
        written there would be NaN.
        """
        if block_ids:
            self.data.index_fill_(0, torch.tensor(block_ids, device=self.data.device), 0)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks: (from, to). All are read before one is written."""
        pairs = list(pairs)
        if pairs:
            source, target = torch.tensor(pairs, device=self.data.device).unbind(1)
            self.data.index_copy_(0, target, self.data.index_select(0, source))

    def wait_written(self) -> None:
        """Block until all that was stored or cleared is really in memory: before somebody else reads or writes it."""
        if self.data.device.type == "cuda":
            torch.cuda.current_stream(self.data.device).synchronize()

    def layout(self) -> CacheLayout:
        """Where every byte is, for the connector."""
        on_cuda = self.data.device.type == "cuda"
        return self.placement.layout(
            self.num_blocks,
            rank=self._rank,
            address=self.data.data_ptr(),
            kind=MemoryKind.VRAM if on_cuda else MemoryKind.DRAM,
            device=(self.data.device.index or 0) if on_cuda else 0,
        )


def num_blocks_of(layers: Sequence[LayerCache], groups: Sequence[GroupSpec], settings: EngineSettings) -> int:
    """How many blocks a rank can have by the settings. Raises ConfigError if that is not even two."""
    page = place(layers, groups, settings.block_tokens).page_bytes
    num_blocks = settings.num_blocks or settings.cache_bytes // page
    if num_blocks < 2:
        raise ConfigError(
            f"cache_bytes={settings.cache_bytes!r} holds {num_blocks} blocks of {page} bytes; at least 2 are "
            f"needed. Set cache_bytes to {2 * page} or more ({cache_flag(2 * page, at_least=True)})."
        )
    return num_blocks


def _check_memory(need: int, page: int, device: str) -> None:
    """Linux gives out memory that it does not have, and ends the process when it is used: so ask first."""
    free = free_bytes(device)
    if free is not None and need > free:
        raise ConfigError(
            f"no memory for a cache of {need} bytes: {free} bytes are free on {device!r}. Set cache_bytes to "
            f"{free // page * page} or less ({cache_flag(free // page * page, at_least=False)})."
        )


def cache_flag(num_bytes: int, *, at_least: bool) -> str:
    """The flag to type for these bytes: it counts GiB."""
    millionths = num_bytes * 1_000_000 / (1 << 30)
    return f"--cache-gb {(ceil(millionths) if at_least else floor(millionths)) / 1e6:.6f}".rstrip("0").rstrip(".")


def free_bytes(device: str) -> int | None:
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None  # not Linux: the allocation itself will tell
