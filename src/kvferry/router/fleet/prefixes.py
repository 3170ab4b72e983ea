"""Which blocks of a prompt a worker has, without a tokenizer in the router.

Workers cut prompts into blocks of tokens and tell the hashes of those that they have cached (GET /v1/kvferry/blocks).
The router sees text. It cuts a prompt's bytes, as they came, into pieces, and chains their hashes. When prefill has
computed a prompt it tells the hashes of that prompt's blocks; the router notes them under each of the prompt's pieces.
A later prompt that begins with the same bytes finds, under its deepest known piece, the block hashes of the part that
both share, and counts how many of them each worker says that it has.

How many blocks a piece reaches is taken in proportion (bytes to tokens), so a count may be one block off. That can only
cost a better choice: what is cached is for the worker to find out, by tokens.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router.fleet.worker import Worker

__all__ = ["HASH_BYTES", "Prefixes", "Prompt", "unpack_hashes"]

HASH_BYTES = 8
"""Of a block's hash, as workers tell it: enough to choose by."""
_PIECE_BYTES = 128
_MAX_PIECES = 2048
_DOMAIN = b"kvferry prompt piece 1"


def unpack_hashes(raw: bytes) -> list[bytes]:
    """Hashes as workers send them, back to back. A rest that is no whole hash is left out."""
    return [raw[i : i + HASH_BYTES] for i in range(0, len(raw) - HASH_BYTES + 1, HASH_BYTES)]


@dataclass(frozen=True, slots=True)
class _Known:
    """What prefill said of a prompt that had this piece."""

    hashes: tuple[bytes, ...]
    """Of the whole prompt: one tuple for all of its pieces."""
    count: int
    """Blocks that lie within this piece and those before it."""
    block_tokens: int


class Prompt:
    """One request's prompt: how long it is, about, and which of its blocks are known. A `Wanted` of the policies."""

    __slots__ = ("_block_tokens", "_hashes", "num_tokens", "pieces")

    def __init__(self, num_tokens: int, pieces: tuple[bytes, ...], known: _Known | None) -> None:
        self.num_tokens = num_tokens
        self.pieces = pieces
        self._hashes = known.hashes[: known.count] if known is not None else ()
        self._block_tokens = known.block_tokens if known is not None else 0

    def num_cached(self, worker: Worker) -> int:
        """About so many of its tokens are in that worker's cache."""
        have, count = worker.cached.blocks, 0
        for key in self._hashes:
            if key not in have:
                break
            count += 1
        return min(self.num_tokens, count * self._block_tokens)


class Prefixes:
    """What is known of prompts. One a router; on the event loop. Memory is bounded by `max_pieces`."""

    def __init__(self, *, max_pieces: int = 100_000) -> None:
        self._max_pieces = max_pieces
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._bytes_per_token = 4.0

    def prompt(self, raw: bytes, num_ids: int | None, *, with_pieces: bool) -> Prompt:
        """`raw`: the prompt's bytes as they came; `num_ids`: its tokens, where the client counted them."""
        num_tokens = num_ids if num_ids is not None else int(len(raw) / self._bytes_per_token) + 1
        if not with_pieces:
            return Prompt(num_tokens, (), None)
        pieces = _pieces(raw)
        known = None
        for piece in reversed(pieces):
            known = self._known.get(piece)
            if known is not None:
                self._known.move_to_end(piece)
                break
        return Prompt(num_tokens, pieces, known)

    def learn_length(self, raw: bytes, num_ids: int | None, num_tokens: int) -> None:
        """A prompt of text had so many tokens."""
        if num_ids is None and num_tokens > 0:
            self._bytes_per_token += 0.1 * (max(0.25, len(raw) / num_tokens) - self._bytes_per_token)

    def learn(self, prompt: Prompt, hashes: Sequence[bytes], num_tokens: int, block_tokens: int, size: int) -> None:
        """Prefill computed this prompt of `size` bytes and `num_tokens` tokens; these are its whole blocks."""
        if not hashes or not num_tokens or not block_tokens:
            return
        all_hashes = tuple(hashes)
        for number, piece in enumerate(prompt.pieces, 1):
            share = min(1.0, number * _PIECE_BYTES / max(1, size))
            count = int(num_tokens * share) // block_tokens
            if count:
                self._known[piece] = _Known(all_hashes, count, block_tokens)
                self._known.move_to_end(piece)
        while len(self._known) > self._max_pieces:
            self._known.popitem(last=False)


def _pieces(raw: bytes) -> tuple[bytes, ...]:
    parent, found = _DOMAIN, []
    for start in range(0, min(len(raw) - _PIECE_BYTES + 1, _PIECE_BYTES * _MAX_PIECES), _PIECE_BYTES):
        parent = hashlib.blake2b(parent + raw[start : start + _PIECE_BYTES], digest_size=16).digest()
        found.append(parent)
    return tuple(found)
