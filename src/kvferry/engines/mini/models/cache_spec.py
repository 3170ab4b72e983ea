"""What each layer keeps in the cache, and how layers share block tables in groups.

The records are frozen and hold no object of the engine, so that they can go to ranks in other processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from kvferry.layout.description import CacheKind

__all__ = [
    "CachePart",
    "GroupSpec",
    "LayerCache",
    "make_groups",
]

NOMINAL_BLOCK_TOKENS = 16
"""What groups are balanced for, whatever the blocks are: so that they depend on the model alone."""


@dataclass(frozen=True, slots=True)
class CachePart:
    """One array that a layer keeps of each token, or, for a recurrent state, of each request: this rank's shard of it.

    In C order, outermost axis first. In a block the axis of its tokens stands before `axes[token_axis]`; by default
    before the last one: keys with the axes (head, dim) lie as [head, token, dim].
    """

    name: str
    dtype: torch.dtype
    encoding: str
    """What the bytes of an element mean, for peers: `bf16`, `fp8_e4m3`, ... See docs/reference/layout.md."""
    axes: tuple[tuple[str, int, int, int], ...] = ()
    """Of each: its name, its extent over all ranks, and the range [start, stop) of it that this rank holds."""
    token_axis: int | None = None
    private: bool = False
    """Not told to peers: nobody reads or writes it but we."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How long each axis is on this rank."""
        return tuple(stop - start for _, _, start, stop in self.axes)

    @property
    def num_bytes(self) -> int:
        """Of one token, or of one state."""
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def token_at(self) -> int:
        """Where the tokens' axis stands among the others."""
        return max(0, len(self.axes) - 1) if self.token_axis is None else self.token_axis


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps."""

    layer: str
    """Its name in the whole model, the same on every rank and for every peer: `layers.3.attn`, `layers.7.mamba`,
    `mtp.0.attn`, `draft.layers.0.attn`."""
    kind: CacheKind
    window_tokens: int | None
    """WINDOW: how many tokens back it sees, itself included."""
    parts: tuple[CachePart, ...]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share one block table, over all stages of the model: the same on every rank."""

    kind: CacheKind
    window_tokens: int | None
    layers: tuple[str, ...]


def make_groups(layers: Sequence[LayerCache]) -> tuple[GroupSpec, ...]:
    """Deal the layers of the whole model out into groups, kinds in the order in which they first appear.

    Groups take turns on pages of one size, so they should be of one size too: that of the smallest kind as one group,
    or of the largest layer, if that is more (a recurrent state is often as large as hundreds of tokens). The layers of
    a kind are dealt out one by one, so that every pipeline stage has its share of every group.
    """
    kinds: dict[tuple[CacheKind, int | None], list[str]] = {}
    sizes: dict[tuple[CacheKind, int | None], int] = {}
    for layer in layers:
        key = (layer.kind, layer.window_tokens)
        kinds.setdefault(key, []).append(layer.layer)
        tokens = 1 if layer.kind is CacheKind.STATE else NOMINAL_BLOCK_TOKENS
        sizes[key] = max(sizes.get(key, 1), tokens * sum(part.num_bytes for part in layer.parts))
    smallest = min((len(names) * sizes[key] for key, names in kinds.items()), default=1)
    page = max(smallest, max(sizes.values(), default=1))
    groups = []
    for key, names in kinds.items():
        count = -(-len(names) // (page // sizes[key]))
        groups += [GroupSpec(*key, tuple(names[first::count])) for first in range(count)]
    return tuple(groups)
