"""What one step computes, as every rank receives it: frozen records, without references to the engine's objects."""

from dataclasses import dataclass

from kvferry.layout.blocks import BlockTable

__all__ = ["ChunkInput", "StepInput"]


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """Tokens [start, stop) of one request, to be computed."""

    token_ids: tuple[int, ...]
    """The tokens at these positions."""
    start: int
    stop: int
    tables: tuple[BlockTable, ...]
    """One per cache group, in the order of the groups, with blocks for all tokens of [start, stop) and for all earlier
    tokens that they attend to. STATE: the slot with the state after `start` tokens (zeros if 0); the state after `stop`
    overwrites it."""
    num_logits: int
    """Return logits for this many of the chunk's last tokens."""
    key: str = ""
    """Identifies the request for a drafter that keeps state between steps. It changes when the request starts again."""
    base: int = 0
    """Tokens before this one, the first of a block, are not attended to: a drafter's cache may begin after the
    prompt."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step. Ranks execute it in this order: copies (all are read before one is written), clear, chunks."""

    chunks: tuple[ChunkInput, ...] = ()
    """What to compute; chunks of one token come first."""
    clear: tuple[int, ...] = ()
    """Pages to zero before they are written to."""
    copies: tuple[tuple[int, int], ...] = ()
    """Pages to copy, as (from, to)."""
    forget: tuple[str, ...] = ()
    """Keys of requests that a drafter can forget."""
