"""The memory of one rank's cache: one allocation of pages, on which the cache groups take turns (see plan.py)."""

import logging
from collections.abc import Iterable, Sequence

import torch

from kvferry.engines.mini.cache.plan import Placement, cache_flag, free_bytes, num_blocks_of, place
from kvferry.engines.mini.models.cache_spec import CachePart, GroupSpec, LayerCache
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError
from kvferry.layout.description import CacheKind, CacheLayout, MemoryKind, Rank

__all__ = ["KVCache"]

logger = logging.getLogger(__name__)


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
        """`layers` are those of this rank, `groups` those of the whole model. Raises ConfigError without the memory."""
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.placement = place(layers, groups, block_tokens)
        self.windows = {layer.layer: layer.window_tokens for layer in layers}
        """How many tokens back each layer sees, the token itself included; None: all of them."""
        self._rank = rank or Rank()
        dtypes = {part.dtype for part, _, _ in self.placement.parts.values()}
        # Several dtypes have only their bytes in common, and 8-bit floats cannot be filled.
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
        """The allocation: [num_blocks, elements of a page]."""
        self._views = {name: self._view(*where) for name, where in self.placement.parts.items()}
        self._groups = {layer: group for (layer, _), (_, group, _) in self.placement.parts.items()}
        if self._rank.index == 0:
            _warn_of_waste(self.placement)

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
        """Makes a cache of `num_blocks`, or of as many as the settings give. Raises ConfigError if it does not fit."""
        count = num_blocks or num_blocks_of(layers, groups, settings)
        return cls(layers, groups, num_blocks=count, block_tokens=settings.block_tokens, device=str(device), rank=rank)

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self.data.device

    def view(self, layer: str, part: str) -> torch.Tensor:
        """Returns one part of one layer, in place: [num_blocks, axes of the part, with that of its tokens, if any]."""
        return self._views[layer, part]

    def group_of(self, layer: str) -> int:
        """Returns the index of the group whose block table a layer uses."""
        return self._groups[layer]

    def _view(self, part: CachePart, group: int, offset: int) -> torch.Tensor:
        typed = self.data.view(torch.uint8).view(part.dtype)
        sizes, strides = self.placement.strides(part, group)
        page = self.placement.page_bytes // part.dtype.itemsize
        start = offset // part.dtype.itemsize
        return typed.as_strided((self.num_blocks, *sizes), (page, *strides), start)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zeroes some blocks before they are given to a request.

        Attention multiplies masked positions by a weight of zero, and zero times the NaN that a faulty peer may have
        written there would be NaN.
        """
        if block_ids:
            self.data.index_fill_(0, torch.tensor(block_ids, device=self.data.device), 0)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies whole blocks; each pair is (from, to). All are read before any is written."""
        pairs = list(pairs)
        if pairs:
            source, target = torch.tensor(pairs, device=self.data.device).unbind(1)
            self.data.index_copy_(0, target, self.data.index_select(0, source))

    def wait_written(self) -> None:
        """Blocks until everything that was stored or cleared is in memory, so that a peer may read or write it."""
        if self.data.device.type == "cuda":
            torch.cuda.current_stream(self.data.device).synchronize()

    def layout(self) -> CacheLayout:
        """Returns a description of every byte, for the connector."""
        on_cuda = self.data.device.type == "cuda"
        return self.placement.layout(
            self.num_blocks,
            rank=self._rank,
            address=self.data.data_ptr(),
            kind=MemoryKind.VRAM if on_cuda else MemoryKind.DRAM,
            device=(self.data.device.index or 0) if on_cuda else 0,
        )


def _check_memory(need: int, page: int, device: str) -> None:
    """Raises ConfigError for a cache larger than the free memory.

    Linux grants memory that it does not have, and kills the process when that memory is used.
    """
    free = free_bytes(device)
    if free is not None and need > free:
        raise ConfigError(
            f"no memory for a cache of {need} bytes: {free} bytes are free on {device!r}. Set cache_bytes to "
            f"{free // page * page} or less ({cache_flag(free // page * page, at_least=False)})."
        )


def _warn_of_waste(placement: Placement) -> None:
    """Warns if blocks of tokens fill little of a page, because the state of one layer is so much larger."""
    used = [0] * len(placement.groups)
    for part, group, _ in placement.parts.values():
        used[group] += part.num_bytes
    per_token = max(
        (size for size, spec in zip(used, placement.groups, strict=True) if spec.kind is not CacheKind.STATE), default=0
    )
    if per_token and 2 * per_token * placement.block_tokens < placement.page_bytes:
        logger.warning(
            "a block of %d tokens fills %d of %d bytes of a cache page, which must also hold a recurrent state: with "
            "block_tokens=%d (--block-tokens) the cache would hold more tokens",
            placement.block_tokens,
            per_token * placement.block_tokens,
            placement.page_bytes,
            max(placement.block_tokens, placement.page_bytes // per_token // 16 * 16),
        )
