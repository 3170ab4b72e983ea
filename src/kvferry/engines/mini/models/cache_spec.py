"""What each layer keeps in the cache, and how layers share block tables in groups.

The records are frozen and refer to no object of the engine, so that they can be sent to ranks in other processes.
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
"""The block size that groups are balanced for, whatever the real one is: so groups depend on the model alone."""


@dataclass(frozen=True, slots=True)
class CachePart:
    """One array that a layer keeps per token, or, for a recurrent state, per request: this rank's shard of it.

    It is in C order, outermost axis first. In a block the axis of the tokens comes before `axes[token_axis]`, by
    default before the last axis: keys with the axes (head, dim) are stored as [head, token, dim].
    """

    name: str
    dtype: torch.dtype
    encoding: str
    """What the bytes of an element mean, for peers: `bf16`, `fp8_e4m3` and others of docs/reference/layout.md."""
    axes: tuple[tuple[str, int, int, int], ...] = ()
    """For each axis: its name, its extent over all ranks, and the range [start, stop) that this rank holds."""
    token_axis: int | None = None
    private: bool = False
    """Whether the part is left out of the layout that peers receive: only this engine reads and writes it."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length of each axis on this rank."""
        return tuple(stop - start for _, _, start, stop in self.axes)

    @property
    def num_bytes(self) -> int:
        """The size of this part for one token, or for one state."""
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def token_at(self) -> int:
        """The index of the token axis among the others."""
        return max(0, len(self.axes) - 1) if self.token_axis is None else self.token_axis


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps."""

    layer: str
    """The name of the layer in the whole model, the same on every rank and for every peer: `layers.3.attn`,
    `layers.7.mamba`, `mtp.0.attn`, `draft.layers.0.attn`."""
    kind: CacheKind
    window_tokens: int | None
    """How many tokens back a WINDOW layer sees, the token itself included; None for other kinds."""
    parts: tuple[CachePart, ...]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers of all stages that share one block table. Every rank has the same groups."""

    kind: CacheKind
    window_tokens: int | None
    layers: tuple[str, ...]


def make_groups(layers: Sequence[LayerCache]) -> tuple[GroupSpec, ...]:
    """Divides the layers of the whole model into groups; kinds come in the order in which they first appear.

    The groups take turns on pages of one size, so they should be equally large: as large as all layers of the smallest
    kind together, or as the largest layer if that is more (a recurrent state is often as large as hundreds of tokens).
    Layer j of a kind goes to group j modulo their number, so that every pipeline stage has layers of every group.
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
