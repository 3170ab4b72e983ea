"""Runs one rank's part of the network over the chunks of a step, and returns hidden states or logits."""

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
    """A network and a cache on one device. Keeps nothing of requests between steps."""

    def __init__(self, network: Network, cache: KVCache) -> None:
        self._network = network
        self._cache = cache
        self._pages: dict[str, LayerPages] = {}

    @torch.inference_mode()
    def run(
        self, chunks: Sequence[ChunkInput], hidden: torch.Tensor | None = None, *, last: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes some chunks, those of one token first, and stores the KV of all their tokens.

        `hidden` is what the previous stage returned; None on the first stage. `last` says whether this is the last
        stage. Returns hidden states [tokens, hidden], and, on the last stage, the logits of the last `num_logits`
        tokens of each chunk, [rows, vocab_size] in float32, or None if no chunk needs any.
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
