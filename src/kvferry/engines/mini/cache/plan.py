"""Where everything lies in one rank's cache, and how many blocks fit: worked out from descriptions, without memory.

A *block* is what the cache hands out: one id, which stands for `block_tokens` tokens of one request (in a state group:
for one state) in all the layers of one cache group. A *page* is the memory that an id names. All pages have
one size, and page i holds block i of whichever group owns that id now, so the groups take turns on the pages. On a page
the layers that the group has on this rank follow each other, so a block is one run of bytes. For a model with one kind
of layers, a page is [layers, key and value, kv_heads, block_tokens, head_dim].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, lcm, prod

import torch

from kvferry.engines.mini.models.cache_spec import CachePart, GroupSpec, LayerCache
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

__all__ = ["Placement", "cache_flag", "free_bytes", "num_blocks_of", "place"]

STATE_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts of a rank's layers lie on a page."""

    groups: tuple[GroupSpec, ...]
    block_tokens: int
    page_bytes: int
    parts: dict[tuple[str, str], tuple[CachePart, int, int]]
    """Maps the names of a layer and of a part to the part, its group, and its offset on the page."""

    def strides(self, part: CachePart, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the sizes and strides, in elements, of one part on one page, including its axis of tokens, if any."""
        sizes = list(part.sizes)
        if self.groups[group].kind is not CacheKind.STATE:
            sizes.insert(part.token_at, self.block_tokens)
        return tuple(sizes), tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))

    def layout(
        self, num_blocks: int, *, rank: Rank, address: int = MADE_UP_ADDRESS, kind: MemoryKind, device: int = 0
    ) -> CacheLayout:
        """Returns a description of every byte, for the connector."""
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
    """Lays out the layers of one rank. `groups` are those of the whole model.

    In each group the parts with the longest rows come first, layer by layer, so that scales lie after all keys and
    values. A page is a whole number of rows, because attention reads the allocation as rows of one (block, head).
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


def _row_bytes(part: CachePart, block_tokens: int) -> int:
    """Returns the size of what one head keeps of one block: its tokens, each with the axes after the token axis."""
    return block_tokens * prod(part.sizes[part.token_at :]) * part.dtype.itemsize


def num_blocks_of(layers: Sequence[LayerCache], groups: Sequence[GroupSpec], settings: EngineSettings) -> int:
    """Returns how many blocks the settings give a rank. Raises ConfigError for fewer than two."""
    page = place(layers, groups, settings.block_tokens).page_bytes
    num_blocks = settings.num_blocks or settings.cache_bytes // page
    if num_blocks < 2:
        raise ConfigError(
            f"cache_bytes={settings.cache_bytes!r} holds {num_blocks} blocks of {page} bytes; at least 2 are "
            f"needed. Set cache_bytes to {2 * page} or more ({cache_flag(2 * page, at_least=True)})."
        )
    return num_blocks


def cache_flag(num_bytes: int, *, at_least: bool) -> str:
    """Returns the flag to type for this many bytes; the flag counts GiB."""
    millionths = num_bytes * 1_000_000 / (1 << 30)
    return f"--cache-gb {(ceil(millionths) if at_least else floor(millionths)) / 1e6:.6f}".rstrip("0").rstrip(".")


def free_bytes(device: str) -> int | None:
    """Returns how much memory is free on a device; None if the operating system does not say."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None  # not Linux: the allocation itself will fail if there is too little
