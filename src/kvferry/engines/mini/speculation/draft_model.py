"""A small model as drafter. It reads tokens only: slot p of its cache is computed from token p.

So no slot of a known token depends on a draft, and a hand-off needs no back-off for it (R31: 0). Its layers are in the
cache as `draft.layers.<n>.attn` (R7).
"""

from collections.abc import Iterable, Sequence

import torch

from kvferry.engines.mini.models.families.base import Batch, Network, Sequences
from kvferry.engines.mini.speculation.chain import MakeBatch
from kvferry.engines.mini.speculation.draft_records import DraftChunk, DraftInput, DraftOutput
from kvferry.engines.mini.speculation.sampled_drafts import Drafts, draft_next
from kvferry.engines.mini.step import ChunkInput

__all__ = ["DRAFT_PREFIX", "DraftModel"]

DRAFT_PREFIX = "draft."


class _Renamed:
    """A batch that gives layers the draft model's names."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    @property
    def positions(self) -> torch.Tensor:
        return self._batch.positions

    def attend(
        self,
        layer: str,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> torch.Tensor:
        return self._batch.attend(DRAFT_PREFIX + layer, queries, keys, values, scale=scale)

    def attend_latent(
        self, layer: str, queries: torch.Tensor, latents: torch.Tensor, *, value_dim: int, scale: float
    ) -> torch.Tensor:
        return self._batch.attend_latent(DRAFT_PREFIX + layer, queries, latents, value_dim=value_dim, scale=scale)

    def sequences(self, layer: str) -> Sequences:
        return self._batch.sequences(DRAFT_PREFIX + layer)

    def state(self, layer: str, part: str) -> torch.Tensor:
        return self._batch.state(DRAFT_PREFIX + layer, part)


class DraftModel:
    """Implements chain.Drafter for a whole model."""

    def __init__(self, network: Network, make_batch: MakeBatch, *, device: torch.device, block_tokens: int) -> None:
        self._network = network
        self._make_batch = make_batch
        self._device = device
        self._block_tokens = block_tokens
        self._final: dict[str, int] = {}
        """Slots [0, n) of a request are computed."""
        self._begun: set[str] = set()

    def absorb(self, chunks: Sequence[ChunkInput], hidden: torch.Tensor) -> None:
        """Notes where each request begins on this engine; earlier tokens came from a peer or the prefix cache."""
        for chunk in chunks:
            self._final.setdefault(chunk.key, chunk.start)

    def forget(self, keys: Iterable[str]) -> None:
        """Implements Drafter."""
        for key in keys:
            self._final.pop(key, None)
            self._begun.discard(key)

    @torch.inference_mode()
    def draft(self, order: DraftInput) -> DraftOutput:
        """Implements Drafter."""
        known = [chunk.first + len(chunk.tokens) - 1 for chunk in order.chunks]
        counts = [
            chunk.num_drafts if chunk.num_computed == m else 0 for chunk, m in zip(order.chunks, known, strict=True)
        ]
        made = [Drafts(chunk.draft_sampling) for chunk in order.chunks]
        drafts = [one.tokens for one in made]
        begins, ends = [], []
        for chunk, m, count in zip(order.chunks, known, counts, strict=True):
            begin = 0 if chunk.cold and chunk.key not in self._begun else self._final[chunk.key]
            self._begun.add(chunk.key)
            end = m + 1 if count else max(begin, chunk.num_computed)
            self._final[chunk.key] = end
            begins.append(begin)
            ends.append(end)
        logits = self._run(order.chunks, begins, ends, drafts)
        while going := [n for n in logits if len(drafts[n]) < counts[n]]:
            draft_next(torch.stack([logits[n] for n in going]), [made[n] for n in going])
            begins = [m + len(d) for m, d in zip(known, drafts, strict=True)]
            ends = [
                begin + (n in going and len(drafts[n]) < counts[n] and self._has_room(order.chunks[n], begin))
                for n, begin in enumerate(begins)
            ]
            logits = self._run(order.chunks, begins, ends, drafts)
        results = [one.result(count) for one, count in zip(made, counts, strict=True)]
        return DraftOutput(tuple(tokens for tokens, _ in results), tuple(draft_probs for _, draft_probs in results))

    def _has_room(self, chunk: DraftChunk, slot: int) -> bool:
        most = self._network.config.max_positions
        held = min(table.first_token + len(table.block_ids) * self._block_tokens for table in chunk.tables)
        return slot < min(held, most)

    def _run(
        self, chunks: Sequence[DraftChunk], begins: Sequence[int], ends: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> dict[int, torch.Tensor]:
        """Computes [begin, end) of each request. Returns the logits of its last token, [vocab_size], by the request's
        index; requests with an empty range are left out."""
        order = sorted((n for n in range(len(chunks)) if ends[n] > begins[n]), key=lambda n: ends[n] - begins[n] > 1)
        if not order:
            return {}
        inputs = []
        for n in order:
            text = (*chunks[n].tokens, *drafts[n])
            ids = text[begins[n] - chunks[n].first : ends[n] - chunks[n].first]
            assert len(ids) == ends[n] - begins[n], "the engine must send all tokens that the drafter has not computed"
            tables = chunks[n].tables
            inputs.append(ChunkInput(token_ids=ids, start=begins[n], stop=ends[n], tables=tables, num_logits=1))
        tokens = torch.tensor([token for chunk in inputs for token in chunk.token_ids], device=self._device)
        hidden = self._network.forward(tokens, _Renamed(self._make_batch(inputs)))
        last = torch.tensor([chunk.stop - chunk.start for chunk in inputs]).cumsum(0) - 1
        return dict(zip(order, self._network.logits(hidden[last.to(self._device)]), strict=True))
