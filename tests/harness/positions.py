"""A network that computes only what can be verified, on a real cache in a real engine, without a model.

Each layer stores the position, the token and a digest of all tokens so far. Before a layer uses what it stored, it
compares it with what must be there. The next token follows from the digest alone, so `answer` predicts the answer of
any engine, whatever the engine kept, freed, shared, copied or received.
"""

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kvferry.connector.base import SchedulerHalf, StepOrders, WorkerHalf
from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.cache_spec import CachePart, LayerCache, make_groups
from kvferry.engines.mini.ranks.executor import LocalExecutor, StepOutcome
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.step import ChunkInput, StepInput
from kvferry.layout.description import CacheKind
from tests.harness.scripted_engine import CharTokenizer

__all__ = ["VOCAB", "PositionRanks", "answer", "layers_of", "position_engine", "position_model"]

VOCAB = 997


def digest(before: int, token: int) -> int:
    """Returns the digest of all tokens up to this one, which fits a float64."""
    return (before * 1_000_003 + token * 7919 + 12345) % (1 << 49)


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Returns the answer that every engine must give."""
    tokens, so_far = list(prompt), 0
    for token in prompt:
        so_far = digest(so_far, token)
    for _ in range(num_tokens):
        tokens.append(so_far % VOCAB)
        so_far = digest(so_far, tokens[-1])
    return tokens[len(prompt) :]


def layers_of(full: int = 0, windows: Sequence[int] = (), states: int = 0) -> tuple[LayerCache, ...]:
    """Returns `full` layers with full attention, one layer for each of `windows`, and `states` layers with a state."""
    part = (CachePart("k", torch.float64, "fp64", (("field", 3, 0, 3),)),)
    kinds: list[tuple[CacheKind, int | None]] = [(CacheKind.FULL, None)] * full
    kinds += [(CacheKind.WINDOW, window) for window in windows] + [(CacheKind.STATE, None)] * states
    return tuple(LayerCache(f"layers.{i}.attn", kind, window, part) for i, (kind, window) in enumerate(kinds))


class PositionRanks(LocalExecutor):
    """An executor of one rank. If it claims a `depth` above one, the engine keeps several steps in flight."""

    def __init__(self, cache: KVCache, layers: Sequence[LayerCache], worker: WorkerHalf | None, depth: int) -> None:
        self.cache, self._worker, self._handoffs, self._layouts = cache, worker, None, ()
        self._outcomes: deque[StepOutcome | Exception] = deque()
        self._rank: Any = SimpleNamespace(worker=worker)
        self._layers = layers
        self._depth = depth

    @property
    def depth(self) -> int:
        return self._depth

    def submit(self, step: StepInput, orders: StepOrders) -> None:
        self.cache.copy(step.copies)
        self.cache.clear(step.clear)
        if self._worker is not None and orders:
            self._worker.start_step(orders)
        if not step.chunks:
            return
        sizes = [chunk.stop - chunk.start for chunk in step.chunks]
        assert sizes == sorted(sizes, key=lambda size: size > 1), "chunks of one token come first"
        rows = [self._compute(chunk) for chunk in step.chunks]
        logits = torch.zeros(sum(chunk.num_logits for chunk in step.chunks), VOCAB)
        for row, (chunk, last) in enumerate((s, r) for s, r in zip(step.chunks, rows, strict=True) if s.num_logits):
            assert chunk.num_logits == 1
            logits[row, last % VOCAB] = 1.0
        self._outcomes.append(StepOutcome(logits if len(logits) else None))

    def _compute(self, chunk: ChunkInput) -> int:
        """Returns the digest after the chunk; all layers must agree on the one before it."""
        assert len(chunk.token_ids) == chunk.stop - chunk.start > 0
        found = {self._before(layer, chunk) for layer in self._layers}
        assert len(found) == 1, f"layers disagree on what came before token {chunk.start}: {found}"
        so_far, rows = found.pop(), []
        for position, token in enumerate(chunk.token_ids, chunk.start):
            so_far = digest(so_far, token)
            rows.append([position + 1, token, so_far])
        new = torch.tensor(rows, dtype=torch.float64)
        for layer in self._layers:
            self._store(layer, chunk, new)
        return so_far

    def _table(self, layer: LayerCache, chunk: ChunkInput) -> tuple[int, Sequence[int]]:
        table = chunk.tables[self.cache.group_of(layer.layer)]
        assert 0 not in table.block_ids, "block 0 was given to a request"
        return table.first_token, table.block_ids

    def _before(self, layer: LayerCache, chunk: ChunkInput) -> int:
        first, ids = self._table(layer, chunk)
        view, size = self.cache.view(layer.layer, "k"), self.cache.block_tokens
        if layer.kind is CacheKind.STATE:
            assert first == chunk.start, f"the state after token {first}, before token {chunk.start}"
            position, _, so_far = view[ids[0]].tolist()
            assert position == chunk.start, f"state after token {position} where that after {chunk.start} is due"
            return int(so_far)
        window = chunk.start if layer.window_tokens is None else layer.window_tokens - 1
        low = max(0, chunk.start - window)
        assert first <= low, f"the table begins at token {first}; token {low} is needed"
        so_far = -1
        for at in range(low, chunk.start):
            position, token, after = view[ids[(at - first) // size], (at - first) % size].tolist()
            assert position == at + 1, f"token {position - 1} where token {at} must be"
            assert so_far < 0 or after == digest(so_far, int(token)), "a token of another request"
            so_far = int(after)
        if layer.window_tokens == 1:
            return self._before(self._layers[0], chunk) if self._layers[0] is not layer else 0
        return 0 if chunk.start == 0 else so_far

    def _store(self, layer: LayerCache, chunk: ChunkInput, new: torch.Tensor) -> None:
        first, ids = self._table(layer, chunk)
        view, size = self.cache.view(layer.layer, "k"), self.cache.block_tokens
        if layer.kind is CacheKind.STATE:
            view[ids[0]] = new[-1]
            return
        assert first + len(ids) * size >= chunk.stop, f"no block for token {first + len(ids) * size}"
        for at, row in enumerate(new, chunk.start - first):
            view[ids[at // size], at % size] = row


def position_engine(
    layers: Sequence[LayerCache], connector: Any = None, *, depth: int = 1, clock: Any = None, **changes: Any
) -> Engine:
    """Makes an engine with this network. `connector` makes both halves of a connector for a cache."""
    settings = EngineSettings(**{"model": "positions", "num_blocks": 64, "max_batch_tokens": 32, **changes})
    groups = make_groups(layers)
    cache = KVCache(
        layers, groups, num_blocks=settings.num_blocks or 64, block_tokens=settings.block_tokens, device="cpu"
    )
    halves: tuple[SchedulerHalf | None, WorkerHalf | None] = connector(cache) if connector else (None, None)
    ranks = PositionRanks(cache, layers, halves[1], depth)
    return Engine(position_model(), ranks, settings, connector=halves[0], clock=clock)


def position_model() -> Any:
    """Returns what the engine needs to know of the model."""
    config = SimpleNamespace(vocab_size=VOCAB, max_positions=4096, eos_token_ids=())
    tokenizer = CharTokenizer()
    tokenizer.eos_token_id = None  # type: ignore[attr-defined]
    return SimpleNamespace(config=config, tokenizer=tokenizer)
