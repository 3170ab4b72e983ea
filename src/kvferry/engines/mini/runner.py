"""Runs the network over what the scheduler planned: numbers in, logits out."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch

from kvferry.engines.mini.attention import AttentionPlan, Piece
from kvferry.engines.mini.cache import KVCache
from kvferry.engines.mini.families.base import Network

__all__ = ["Runner", "Work"]


class Work(Protocol):
    """One request's share of a step."""

    @property
    def start(self) -> int:
        """First token to compute."""
        ...

    @property
    def stop(self) -> int:
        """One behind the last token to compute."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Those tokens: `stop - start` of them."""
        ...

    @property
    def block_ids(self) -> Sequence[int]:
        """Blocks of the request from its first token on."""
        ...

    @property
    def wants_logits(self) -> bool:
        """Whether a token follows from the last one."""
        ...


class Runner:
    """Weights and cache on one device. Keeps nothing between steps."""

    def __init__(self, network: Network, cache: KVCache) -> None:
        self._network = network
        self._cache = cache
        self._windows = set(network.config.windows)

    @torch.inference_mode()
    def run(self, works: Sequence[Work]) -> torch.Tensor | None:
        """Store the KV of all tokens; logits [number of works that want them, vocab_size] in float32, or None.

        `works`: those of one token first.
        """
        device = self._cache.data.device
        plan = AttentionPlan(
            self._cache,
            [Piece(work.block_ids, work.start, work.stop) for work in works],
            self._cache.data.dtype,
            self._windows,
        )
        tokens = torch.tensor(list(chain.from_iterable(work.token_ids for work in works)), device=device)
        hidden = self._network.forward(tokens, plan)
        last, wanted = -1, []
        for work in works:
            last += work.stop - work.start
            if work.wants_logits:
                wanted.append(last)
        return self._network.logits(hidden[wanted]) if wanted else None
