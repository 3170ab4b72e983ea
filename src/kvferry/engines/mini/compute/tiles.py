"""Attention over one tile of the context, and the merging of tiles."""

import torch

__all__ = ["Merged", "attend_tile"]

Part = tuple[torch.Tensor, torch.Tensor | None]
"""Weighted values [batch, heads, queries, dim], and the logarithm of the sum of their weights [batch, heads, queries].
The sum may be None for the only tile of its queries."""


def attend_tile(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    *,
    causal: bool = False,
) -> Part:
    """Attends with queries [batch, heads, queries, dim] to keys and values [batch, heads, tokens, dim] of equal width.

    `bias` is [queries, tokens], or has four axes, of which those of length one are broadcast.
    """
    if queries.device.type == "cpu":
        # scaled_dot_product_attention calls this on CPU, but does not return the sums.
        mixed, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, attn_mask=bias, scale=scale
        )
        return mixed, sums
    scores = torch.matmul(queries, keys.transpose(-1, -2)).float() * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, torch.finfo(torch.float32).min / 4)
    if bias is not None:
        scores = scores + bias
    sums = torch.logsumexp(scores, -1)
    return torch.matmul((scores - sums.unsqueeze(-1)).exp().to(values.dtype), values), sums


class Merged:
    """The attention over several tiles of the same queries."""

    def __init__(self) -> None:
        self._mixed: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None

    def add(self, part: Part) -> None:
        """Merges one more tile."""
        mixed, sums = part
        if self._mixed is None or self._sums is None:
            self._mixed, self._sums = mixed, sums
            return
        assert sums is not None, "a tile that is merged with others has its sum"
        weight = torch.sigmoid(sums - self._sums).unsqueeze(-1).to(mixed.dtype)
        self._sums = torch.logaddexp(self._sums, sums)
        self._mixed = torch.lerp(self._mixed, mixed, weight)

    def result(self) -> torch.Tensor:
        """Returns the weighted values [batch, heads, queries, dim]."""
        assert self._mixed is not None, "every query attends at least to its own token"
        return self._mixed
