"""Runs one rank's part of the network over what the scheduler planned: numbers in, hidden states or logits out."""

from collections.abc import Sequence
from itertools import chain

import torch

from kvferry.engines.mini.cache.pages import LayerPages
from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.compute.attention import StepBatch
from kvferry.engines.mini.models.families.base import Network
from kvferry.engines.mini.step import ChunkInput

__all__ = ["Runner"]


class Runner:
    """Weights and cache on one device. Keeps nothing of requests between steps."""

    def __init__(self, network: Network, cache: KVCache) -> None:
        self._network = network
        self._cache = cache
        self._pages: dict[str, LayerPages] = {}

    @torch.inference_mode()
    def run(
        self, chunks: Sequence[ChunkInput], hidden: torch.Tensor | None = None, *, last: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the KV of all tokens of some shares, of which those of one token come first.

        `hidden`: on later stages, what the stage before returned; `last`: whether this is the last stage. Returns
        hidden states [tokens, hidden], and on the last stage logits of the last `num_logits` tokens of each share,
        [rows, vocab_size] in float32, or None.
        """
        batch = StepBatch(self._cache, chunks, self._network.dtype, self._pages)
        if hidden is None:
            tokens = list(chain.from_iterable(chunk.token_ids for chunk in chunks))
            hidden = torch.tensor(tokens, device=self._cache.device)
        hidden = self._network.forward(hidden, batch)
        end = 0
        wanted: list[int] = []
        for chunk in chunks if last else ():
            end += chunk.stop - chunk.start
            wanted += range(end - chunk.num_logits, end)
        return hidden, self._network.logits(hidden[wanted]) if wanted else None
