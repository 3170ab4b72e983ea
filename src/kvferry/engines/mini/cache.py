"""The memory of the KV cache: one allocation, block-major, so that a block of all layers is one run of bytes.

Shape: [num_blocks, num_layers, 2 (key, value), kv_heads, block_tokens, head_dim].
"""

from collections.abc import Sequence

import torch

from kvferry.engines.mini.models import ModelConfig
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError
from kvferry.layout.builders import block_major, head_range
from kvferry.layout.description import CacheLayout, MemoryKind

__all__ = ["KVCache"]

ENCODINGS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class KVCache:
    """Owns the tensor. Block 0 is never given to a request: it stays zero, and pads short block tables."""

    def __init__(
        self, config: ModelConfig, *, num_blocks: int, block_tokens: int, dtype: torch.dtype, device: str
    ) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_tokens, config.head_dim)
        try:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            need = num_blocks * block_bytes(config, block_tokens, dtype)
            raise ConfigError(
                f"no memory for a cache of {need} bytes: {error}. Lower cache_bytes (--cache-gb)."
            ) from error
        self._layers = [self.data[:, i] for i in range(config.num_layers)]
        # The same memory as rows of one (block, layer, part, head), from each layer's first row on.
        rows = self.data.view(-1, block_tokens * config.head_dim)
        self._rows = [rows[i * 2 * config.num_kv_heads :] for i in range(config.num_layers)]
        self._rows_of_part = torch.arange(2 * config.num_kv_heads, device=device).view(2, 1, config.num_kv_heads, 1)

    @classmethod
    def create(
        cls, config: ModelConfig, settings: EngineSettings, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """As the settings say. Raises ConfigError if not even two blocks fit, with the bytes that would do."""
        one = block_bytes(config, settings.block_tokens, dtype)
        num_blocks = settings.num_blocks or settings.cache_bytes // one
        if num_blocks < 2:
            raise ConfigError(
                f"cache_bytes={settings.cache_bytes!r} holds {num_blocks} blocks of {one} bytes; at least 2 are "
                f"needed. Set cache_bytes (--cache-gb, in GiB) to {2 * one} or more."
            )
        return cls(config, num_blocks=num_blocks, block_tokens=settings.block_tokens, dtype=dtype, device=str(device))

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero some blocks, before they are given to a request.

        Attention multiplies masked positions by a weight of zero, and zero times the NaN that a faulty peer may have
        written there would be NaN.
        """
        if block_ids:
            self.data.index_fill_(0, torch.tensor(block_ids, device=self.data.device), 0)

    def wait_written(self) -> None:
        """Block until all that was stored or cleared is really in memory: before somebody else reads or writes it."""
        if self.data.device.type == "cuda":
            torch.cuda.current_stream(self.data.device).synchronize()

    def rows(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Which rows `gather` reads for block tables [batch, blocks]: [2 * batch * kv_heads * blocks]."""
        per_block = self.config.num_layers * 2 * self.config.num_kv_heads
        return (block_ids[None, :, None, :] * per_block + self._rows_of_part).flatten()

    def gather(self, layer: int, rows: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [batch, kv_heads, blocks * block_tokens, head_dim], of some rows; one copy."""
        found = torch.index_select(self._rows[layer], 0, rows)
        keys, values = found.view(2, batch, self.config.num_kv_heads, -1, self.config.head_dim)
        return keys, values

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Write keys and values [tokens, kv_heads, head_dim]; `slots`: each token's block, and place in the block."""
        blocks, offsets = slots
        self._layers[layer][blocks, 0, :, offsets] = keys
        self._layers[layer][blocks, 1, :, offsets] = values

    def layout(self) -> CacheLayout:
        """Where every byte is, for the connector."""
        on_cuda = self.data.device.type == "cuda"
        return block_major(
            [f"layers.{i}.attn" for i in range(self.config.num_layers)],
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            heads=head_range(self.config.num_kv_heads, 0, 1),
            head_dim=self.config.head_dim,
            element_bytes=self.data.element_size(),
            encoding=ENCODINGS[self.data.dtype],
            address=self.data.data_ptr(),
            kind=MemoryKind.VRAM if on_cuda else MemoryKind.DRAM,
            device=(self.data.device.index or 0) if on_cuda else 0,
        )


def block_bytes(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one block of all layers."""
    return config.num_layers * 2 * config.num_kv_heads * block_tokens * config.head_dim * dtype.itemsize
