"""The arithmetic of Mamba-2 (arXiv 2405.21060): a causal convolution and the state space scan.

Each function takes a state and returns the next one; none changes its arguments. The letters of shapes: T tokens, n
sequences, H heads of P channels, G groups of heads that share B and C, N state columns, C channels of a section of the
convolution, K taps.
"""

import torch
from torch.nn import functional

__all__ = ["convolve", "convolve_steps", "scan", "scan_steps"]

CHUNK_TOKENS = 128
"""How many tokens one round of matrix products covers: work grows with its square, and the number of rounds falls."""
PAD_TOKENS = 64
"""The convolution of a sequence is computed for a multiple of this number of tokens."""


def convolve(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolves one sequence, and applies SiLU. Returns y [T, C] and the next state.

    Takes x [T, C], state [C, K - 1] (the inputs before it) and weight [C, K].
    """
    line = torch.cat([state.to(x.dtype), x.t()], dim=1)
    # oneDNN keeps a kernel per length (models/linear.py): there are few lengths in multiples of PAD_TOKENS.
    padded = functional.pad(line, (0, -len(x) % PAD_TOKENS))
    summed = functional.conv1d(padded[None], weight[:, None], bias, groups=len(weight))[0, :, : len(x)]
    return functional.silu(summed).t(), line[:, len(x) :]


def convolve_steps(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolves one token of each of n sequences. Returns y [n, C] and the next state.

    Takes x [n, C], state [n, C, K - 1] and weight [C, K].
    """
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
    """Scans one sequence, in float32. Returns y [T, H, P] without the skip term, and the state after its last token.

    Takes x [T, H, P], dt [T, H] (positive), decay [H] (negative), b and c [T, G, N], and state [H, P, N]. Within a
    chunk every pair of tokens is one entry of a matrix, as in attention; between chunks only the state is carried over.
    """
    shared = x.shape[1] // b.shape[1]
    x, dt = x.transpose(0, 1), dt.t()
    b, c = b.transpose(0, 1), c.transpose(0, 1)
    parts = []
    for start in range(0, x.shape[1], CHUNK_TOKENS):
        piece = slice(start, start + CHUNK_TOKENS)
        xs, ws, bs, cs = x[:, piece], dt[:, piece], b[:, piece], c[:, piece]
        # The logarithm of how much of the state before the chunk is left after each token.
        faded = (decay[:, None] * ws).cumsum(1)
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
    """Scans one token of each of n sequences. Returns y [n, H, P] and the next state.

    Takes x [n, H, P], dt [n, H], b and c [n, G, N], and state [n, H, P, N].
    """
    shared = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(shared, 1), c.repeat_interleave(shared, 1)
    added = (dt[..., None] * x)[..., None] * b[:, :, None]
    state = (decay * dt).exp()[..., None, None] * state + added
    return (state @ c[..., None])[..., 0], state
