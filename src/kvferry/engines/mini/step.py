"""What one engine step computes, as every rank receives it: frozen records that refer to no object of the engine."""

from dataclasses import dataclass

from kvferry.layout.blocks import BlockTable

__all__ = ["ChunkInput", "StepInput"]


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """The tokens [start, stop) of one request, to be computed in one step."""

    token_ids: tuple[int, ...]
    """The tokens [start, stop)."""
    start: int
    stop: int
    tables: tuple[BlockTable, ...]
    """One table per cache group, in their order, with a block for each token of [start, stop) and each token that these
    look back on. The table of a STATE group has one block: it holds the state after `start` tokens (zeros for 0), and
    the step overwrites it with the state after `stop`."""
    num_logits: int
    """Return logits for this many of the chunk's last tokens."""
    key: str = ""
    """Identifies the request to a drafter that keeps something of it between steps. A restarted one has a new key."""
    base: int = 0
    """The first token that is read, at the start of a block; earlier ones are ignored, as a drafter's cache may begin
    after the prompt."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step, as every rank receives it. Ranks copy blocks, then clear blocks, then compute the chunks."""

    chunks: tuple[ChunkInput, ...] = ()
    """The chunks to compute; those of one token come first."""
    clear: tuple[int, ...] = ()
    """The ids of blocks to be zeroed before anything is written to them."""
    copies: tuple[tuple[int, int], ...] = ()
    """The ids of blocks to be copied, as (from, to). All are read before any is written."""
    forget: tuple[str, ...] = ()
    """The keys of requests that a drafter may forget."""
