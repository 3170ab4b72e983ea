"""Samples the next token of each request of a batch from its logits.

The order is vLLM's: logprobs are those of the unchanged logits; then come bias, penalties and forbidden tokens; then
temperature, min-p, top-k and top-p; then the draw.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from kvferry.engines.mini.api import SamplingParams, TokenLogprobs
from kvferry.wire.first_token import FirstToken

__all__ = [
    "GREEDY_BELOW",
    "SampledToken",
    "SamplingRow",
    "apply_penalties",
    "as_sent",
    "logprobs_of",
    "penalized",
    "probabilities",
    "sample",
    "sample_tokens",
    "uniform",
]

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy sampling, because dividing by it could only produce infinities."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What sampling needs to know of the request whose logits are one row."""

    sampling: SamplingParams
    seed: int
    prompt: Sequence[int]
    answer: Sequence[int]
    eos_token_ids: frozenset[int]

    @property
    def changes_logits(self) -> bool:
        """Whether a bias, a penalty or `min_tokens` changes the logits before sampling."""
        s = self.sampling
        return bool(
            s.logit_bias
            or s.presence_penalty
            or s.frequency_penalty
            or s.repetition_penalty != 1.0
            or len(self.answer) < s.min_tokens
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one request."""

    token: int
    logprobs: TokenLogprobs | None


def uniform(seed: int, draw: int) -> float:
    """Returns a number in [0, 1) that depends on its arguments alone: the same on every machine, device and engine."""
    bits = xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, draw))
    return float(bits >> 11) * 2.0**-53


@torch.inference_mode()
def sample_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Samples one token per row of `logits` [len(rows), vocab_size], which are float32 and stay as they are."""
    with_logprobs = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    unchanged = torch.log_softmax(logits[with_logprobs], dim=-1) if with_logprobs else None
    logits = penalized(logits, rows)
    tokens = logits.argmax(dim=-1)
    random = [i for i, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    if random:
        probs = probabilities(logits[random], [rows[i].sampling for i in random])
        tokens[random] = sample(probs, [uniform(rows[i].seed, len(rows[i].answer)) for i in random])
    sampled = tokens.tolist()
    found: dict[int, TokenLogprobs] = {}
    if unchanged is not None:
        for at, i in enumerate(with_logprobs):
            found[i] = logprobs_of(unchanged[at], sampled[i], rows[i].sampling.logprobs or 0)
    return [SampledToken(token, found.get(i)) for i, token in enumerate(sampled)]


def penalized(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Returns the logits after bias and penalties: a copy if any row changes them."""
    if not any(row.changes_logits for row in rows):
        return logits
    logits = logits.clone()
    for i, row in enumerate(rows):
        if row.changes_logits:
            apply_penalties(logits[i], row)
    return logits


def apply_penalties(logits: torch.Tensor, row: SamplingRow) -> None:
    """Applies bias and penalties to one row in place, and forbids the end of the answer before `min_tokens`."""
    s, vocab, device = row.sampling, len(logits), logits.device
    if s.repetition_penalty != 1.0:  # over prompt and answer (Keskar et al. 2019)
        seen = torch.tensor(sorted({*row.prompt, *row.answer}), device=device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if row.answer and (s.frequency_penalty or s.presence_penalty):  # over the answer alone, as OpenAI defines them
        counts = torch.bincount(torch.tensor(row.answer, device=device), minlength=vocab)
        logits -= s.frequency_penalty * counts + s.presence_penalty * (counts > 0)
    for token, bias in s.logit_bias.items():
        if token < vocab:
            logits[token] += bias
    if len(row.answer) < s.min_tokens:
        ends = {*s.stop_token_ids, *(() if s.ignore_eos else row.eos_token_ids)}
        logits[[token for token in ends if token < vocab]] = float("-inf")


def probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Returns the probabilities after temperature and filters, not scaled to a sum of 1. No row may be greedy."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    probs = torch.softmax(logits / column([p.temperature for p in params]), dim=-1)
    if any(p.min_p > 0 for p in params):
        least = probs.amax(dim=-1, keepdim=True) * column([p.min_p for p in params])
        probs = probs.masked_fill(probs < least, 0.0)
    if any(p.top_k > 0 or p.top_p < 1.0 for p in params):
        probs = _top(probs, params, column([p.top_p for p in params]))
    return probs


def sample(weights: torch.Tensor, points: Sequence[float]) -> torch.Tensor:
    """Samples one token per row, in proportion to its weight. `points` has one number in [0, 1) per row."""
    # Double precision, because in float32 the sum over a large vocabulary would swallow the rarest tokens.
    cumulated = weights.double().cumsum(dim=-1)
    point = torch.tensor(points, dtype=torch.float64).to(weights.device)[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, point, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def _top(probs: torch.Tensor, params: Sequence[SamplingParams], top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the `top_k` most likely tokens, and of these the fewest that sum to `top_p`, but at least one."""
    vocab = probs.shape[-1]
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=probs.device)
    top_k = torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=probs.device)[:, None]
    ordered = ordered.masked_fill(rank >= top_k, 0.0)
    before = ordered.cumsum(dim=-1) - ordered
    drop = (before >= top_p * ordered.sum(dim=-1, keepdim=True)) & (top_p < 1.0) & (rank > 0)
    ordered = ordered.masked_fill(drop, 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ordered)


def logprobs_of(row: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Returns the logprobs of a token and of the `count` most likely ones, from one row of log-probabilities."""
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, ids = row.topk(min(count, len(row)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(row[token]), top)


def as_sent(first: FirstToken, sampling: SamplingParams) -> SampledToken:
    """Returns prefill's first token as if it had been chosen here."""
    logprobs = None
    if sampling.logprobs is not None and first.logprob is not None:
        logprobs = TokenLogprobs(first.logprob, tuple(first.top)[: sampling.logprobs])
    return SampledToken(first.token, logprobs)
