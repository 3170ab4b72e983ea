"""Turns vLLM's lists of block ids into block tables with positions.

A manager block of `block_tokens` tokens may be stored as several consecutive kernel blocks. Layouts and tables use
kernel blocks, so that one id is one stretch of memory. Window groups keep leading null blocks (id 0) for what has left
the window; they are left out, and the table says at which token it begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.layout.blocks import BlockTable
from kvferry.layout.description import CacheGroup, CacheKind

__all__ = ["GroupForm", "tables_of"]

_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupForm:
    """One of vLLM's KV cache groups."""

    kind: CacheKind
    block_tokens: int
    """The tokens of a manager block."""
    kernel_tokens: int
    """The tokens of a kernel block; they divide `block_tokens`."""
    window_tokens: int | None = None
    scratch_blocks: int = 0
    """STATE: how many blocks at the end of a request's list hold no state of the past (for speculation)."""

    @property
    def blocks_per_block(self) -> int:
        """The number of kernel blocks per manager block."""
        return self.block_tokens // self.kernel_tokens if self.kind is not CacheKind.STATE else 1

    @property
    def cache_group(self) -> CacheGroup:
        """The group as the layout describes it."""
        if self.kind is CacheKind.STATE:
            return CacheGroup(CacheKind.STATE, 0)
        return CacheGroup(self.kind, self.kernel_tokens, self.window_tokens)


def tables_of(
    forms: Sequence[GroupForm], block_ids: Sequence[Sequence[int]], num_tokens: int, *, only: CacheKind | None = None
) -> tuple[BlockTable, ...]:
    """Returns one table per group, or per group of kind `only`. A state is that after `num_tokens` tokens."""
    tables = []
    for index, (form, ids) in enumerate(zip(forms, block_ids, strict=True)):
        if only is not None and form.kind is not only:
            continue
        if form.kind is CacheKind.STATE:
            kept = ids[: len(ids) - min(form.scratch_blocks, max(0, len(ids) - 1))]
            tables.append(BlockTable(index, num_tokens, tuple(kept[-1:])))
            continue
        first = next((i + 1 for i in range(len(ids) - 1, -1, -1) if ids[i] == _NULL_BLOCK), 0)
        each = form.blocks_per_block
        kept = tuple(ids[first:]) if each == 1 else tuple(b * each + i for b in ids[first:] for i in range(each))
        tables.append(BlockTable(index, first * form.block_tokens, kept))
    return tuple(tables)
