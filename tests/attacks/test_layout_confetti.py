"""Very many ranks that hold one element of each layer, split differently per layer: pairing must end soon."""

import pytest

from kvferry.errors import IncompatiblePeer
from kvferry.layout import pairing
from kvferry.layout.builders import block_major, head_range
from kvferry.layout.description import Axis, CacheGroup, CacheKind, CacheLayout, Paging, Rank, Region, Tensor
from kvferry.layout.pairing import pair

HEADS, DIM, LAYERS = 8, 128, 6


def confetti() -> list[CacheLayout]:
    ranks = []
    for rank in range(HEADS * DIM):
        tensors: list[Tensor] = []
        for layer in range(LAYERS):
            head, dim = divmod((rank + layer) % (HEADS * DIM), DIM)
            axes = (Axis("head", HEADS, head, head + 1, 2), Axis("dim", DIM, dim, dim + 1, 2))
            tensors += [
                Tensor(
                    f"layers.{layer}.attn", part, "bf16", 2, 0, 0, 32 * len(tensors) + 32 * k, Paging(1, 32, 2), axes
                )
                for k, part in enumerate("kv")
            ]
        group = CacheGroup(CacheKind.FULL, 16)
        ranks.append(
            CacheLayout(Rank(rank, rank, HEADS * DIM), (Region(1 << 32, 32 * len(tensors)),), (group,), tuple(tensors))
        )
    return ranks


def test_pairing_of_very_many_fragments_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "MAX_COMPARISONS", 1 << 16)
    ours = block_major(
        [f"layers.{layer}.attn" for layer in range(LAYERS)],
        num_blocks=8,
        block_tokens=16,
        heads=head_range(HEADS, 0, 1),
        head_dim=DIM,
        element_bytes=2,
        encoding="bf16",
    )
    peer = confetti()
    with pytest.raises(IncompatiblePeer, match=r"layers\.0\.attn.*1024 ranks of prefill cut it into 1024 pieces"):
        pair(peer, ours)
