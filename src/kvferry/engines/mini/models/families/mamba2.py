"""Mamba-2 (arXiv 2405.21060), the arithmetic: a causal convolution and the state space scan, from a state to a state.

Shapes: T tokens, n sequences, H heads of P channels, G groups that share B and C, N state columns, C = channels of a
convolution section, K taps. All functions are pure: they return the new state and change nothing.
"""

import torch
from torch.nn import functional

__all__ = ["convolve", "convolve_steps", "scan", "scan_steps"]

CHUNK_TOKENS = 128
"""Tokens that one round of matrix products covers; work grows with its square, the number of rounds falls with it."""


def convolve(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: x [T, C], state [C, K - 1] (the inputs before it), weight [C, K] -> silu of the sums [T, C],
    state."""
    line = torch.cat([state.to(x.dtype), x.t()], dim=1)
    summed = functional.conv1d(line[None], weight[:, None], bias, groups=len(weight))[0]
    return functional.silu(summed).t(), line[:, len(x) :]


def convolve_steps(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of n sequences: x [n, C], state [n, C, K - 1] -> [n, C], state."""
    line = torch.cat([state.to(x.dtype), x[..., None]], dim=-1)
    summed = (line * weight).sum(-1)
    return functional.silu(summed if bias is None else summed + bias), line[..., 1:]


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, float32: x [T, H, P], dt [T, H] (positive), decay [H] (negative), b, c [T, G, N], state [H, P, N].

    -> y [T, H, P] without the skip term, state after the last token. Within a chunk of tokens every pair is one entry
    of a matrix, as in attention; from chunk to chunk only the state goes on.
    """
    shared = x.shape[1] // b.shape[1]
    x, dt = x.transpose(0, 1), dt.t()
    b, c = b.transpose(0, 1), c.transpose(0, 1)
    parts = []
    for start in range(0, x.shape[1], CHUNK_TOKENS):
        piece = slice(start, start + CHUNK_TOKENS)
        xs, ws, bs, cs = x[:, piece], dt[:, piece], b[:, piece], c[:, piece]
        faded = (decay[:, None] * ws).cumsum(1)  # log of how much of the state before the chunk is left after a token
        left = faded[:, :, None] - faded[:, None, :]
        future = torch.ones(left.shape[1:], dtype=torch.bool, device=x.device).triu(1)
        left = left.masked_fill(future, float("-inf")).exp()
        pairs = (cs @ bs.transpose(1, 2)).repeat_interleave(shared, 0) * left * ws[:, None]
        seen = cs.repeat_interleave(shared, 0) @ state.transpose(1, 2)
        parts.append(pairs @ xs + faded.exp()[..., None] * seen)
        kept = ((faded[:, -1:] - faded).exp() * ws)[..., None] * xs
        state = faded[:, -1].exp()[:, None, None] * state + kept.transpose(1, 2) @ bs.repeat_interleave(shared, 0)
    return torch.cat(parts, dim=1).transpose(0, 1), state


def scan_steps(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of n sequences: x [n, H, P], dt [n, H], b, c [n, G, N], state [n, H, P, N] -> y, state."""
    shared = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(shared, 1), c.repeat_interleave(shared, 1)
    added = (dt[..., None] * x)[..., None] * b[:, :, None]
    state = (decay * dt).exp()[..., None, None] * state + added
    return (state @ c[..., None])[..., 0], state
