"""What one engine step computes, as every rank receives it: frozen records without any object of the engine."""

from dataclasses import dataclass

from kvferry.layout.blocks import BlockTable

__all__ = ["ChunkInput", "StepInput"]


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """Compute tokens [start, stop) of one request."""

    token_ids: tuple[int, ...]
    """Those tokens."""
    start: int
    stop: int
    tables: tuple[BlockTable, ...]
    """One a group, in their order, with a block for every token of [start, stop) and for all that these look back on.
    STATE: the slot that holds the state after `start` tokens (zeros for 0), where the one after `stop` goes."""
    num_logits: int
    """Wanted are the logits behind each of so many last tokens."""
    key: str = ""
    """Of the request, for a drafter that keeps something of it from step to step; another one after each new start."""
    base: int = 0
    """Tokens before it, the first of a block, are not looked at: a drafter's cache may begin behind the prompt."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step, as every rank gets it. In this order: copies (all are read before one is written), clear, shares."""

    chunks: tuple[ChunkInput, ...] = ()
    """Those of one token first."""
    clear: tuple[int, ...] = ()
    """Pages to be zeroed before anybody writes to them."""
    copies: tuple[tuple[int, int], ...] = ()
    """Pages to be copied whole: (from, to)."""
    forget: tuple[str, ...] = ()
    """Keys of requests that a drafter need not remember any more."""
