"""Estimates which blocks of a prompt a worker has cached, without a tokenizer in the router.

Workers cut prompts into blocks of tokens and report the hashes of the blocks that they have cached (GET
/v1/kvferry/blocks). The router sees text. It cuts a prompt's bytes, as they came, into pieces and chains their hashes.
After prefill has computed a prompt, it reports the hashes of that prompt's blocks, and the router notes them under each
of the prompt's pieces. A later prompt that begins with the same bytes finds, under its last known piece, the block
hashes of the part that both share; the router counts how many of them each worker has.

Answers are in no prompt that prefill has computed yet. What decode has generated is counted by `sessions`.

The number of blocks that a piece reaches is proportional to its bytes, so a count may be one block off. An error only
makes the choice worse, never an answer wrong: the worker itself looks up what is cached, by tokens.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.router.fleet.sessions import EarlierTurn, Sessions, cuts_of
from kvferry.router.fleet.worker import Worker
from kvferry.settings import Role

__all__ = ["HASH_BYTES", "Prefixes", "Prompt", "unpack_hashes"]

HASH_BYTES = 8
"""The number of bytes of a block's hash that workers report: enough to choose a worker by."""
_PIECE_BYTES = 128
_MAX_PIECES = 2048
_AT_ONCE = 64
"""How many hashes are looked up in one call, which takes a third of the time of as many calls."""
_DOMAIN = b"kvferry prompt piece 1"
_NONE: Mapping[Role, EarlierTurn] = {}


def unpack_hashes(raw: bytes) -> list[bytes]:
    """Splits hashes that a worker sent back to back. A remainder shorter than a hash is left out."""
    return [raw[i : i + HASH_BYTES] for i in range(0, len(raw) - HASH_BYTES + 1, HASH_BYTES)]


@dataclass(frozen=True, slots=True)
class _Known:
    """What prefill reported about a prompt that had this piece."""

    hashes: tuple[bytes, ...]
    """The hashes of the whole prompt's blocks; all of its pieces share the tuple."""
    count: int
    """The number of blocks that lie within this piece and the pieces before it."""
    block_tokens: int


class Prompt:
    """One request's prompt: its approximate length, and the known hashes of its blocks. It is a `PromptEstimate`."""

    __slots__ = ("_block_tokens", "_bytes_per_token", "_earlier", "_hashes", "cuts", "exact", "num_tokens", "pieces",
                 "size")  # fmt: skip

    def __init__(
        self, num_tokens: int, size: int, pieces: tuple[bytes, ...], known: _Known | None, *, exact: bool,
        bytes_per_token: float, cuts: tuple[bytes, ...] = (), earlier: Mapping[Role, EarlierTurn] = _NONE,
    ) -> None:  # fmt: skip
        self.num_tokens = num_tokens
        self.size = size
        self.exact = exact
        self.pieces = pieces
        self.cuts = cuts
        self._bytes_per_token = bytes_per_token
        self._earlier = earlier
        if not exact and (turn := earlier.get(Role.DECODE)) is not None:
            self.num_tokens = turn.num_prompt_tokens + self._num_more(turn)
        self._hashes = known.hashes[: known.count] if known is not None else ()
        self._block_tokens = known.block_tokens if known is not None else 0

    def counted(self, num_tokens: int) -> None:
        """Notes the number of tokens as a worker has counted them."""
        self.num_tokens, self.exact = num_tokens, True

    def served_before(self, worker: Worker) -> bool:
        """True if that worker served the turn before, or the same prompt."""
        turn = self._earlier.get(worker.assigned_role)
        return turn is not None and turn.worker is worker

    def _num_more(self, turn: EarlierTurn) -> int:
        """Returns about how many tokens it has after those of an earlier turn's prompt."""
        return max(0, int((self.size - turn.size) / self._bytes_per_token))

    def num_cached(self, worker: Worker) -> int:
        """Returns about how many of its tokens are in that worker's cache."""
        turn = self._earlier.get(worker.assigned_role)
        by_turn = 0
        if turn is not None and turn.worker is worker and not self._is_evicted(turn):
            by_turn = turn.num_cached(self._num_more(turn))
        return min(self.num_tokens, max(by_turn, self._num_reported(worker)))

    def _is_evicted(self, turn: EarlierTurn) -> bool:
        """True if the worker has reported since that turn that it lacks the prompt's first block."""
        worker = turn.worker
        if not self._hashes or worker.info is None or worker.info.cache is None or worker.report.asked_s <= turn.at_s:
            return False
        return worker.info.limits.block_tokens == self._block_tokens and self._hashes[0] not in worker.cached.blocks

    def _num_reported(self, worker: Worker) -> int:
        have, count = worker.cached.blocks, 0
        while count < len(self._hashes) and have.issuperset(self._hashes[count : count + _AT_ONCE]):
            count += _AT_ONCE
        count = min(count, len(self._hashes))
        while count < len(self._hashes) and self._hashes[count] in have:
            count += 1
        return count * self._block_tokens


class Prefixes:
    """What one router knows about prompts. It is used on the event loop, and `max_pieces` bounds its memory."""

    def __init__(self, *, max_pieces: int = 100_000) -> None:
        self._max_pieces = max_pieces
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._bytes_per_token = 4.0
        self._sessions = Sessions()

    def prompt(self, begin: bytes, size: int, num_ids: int | None, *, with_pieces: bool) -> Prompt:
        """Returns the estimate for a prompt of `size` bytes that begins with these as they came. `num_ids` is the
        number of its tokens if the client sent token ids."""
        num_tokens = num_ids if num_ids is not None else int(size / self._bytes_per_token) + 1
        exact = num_ids is not None
        cuts = cuts_of(begin, whole=len(begin) >= size)
        pieces, known = _pieces(begin) if with_pieces else (), None
        for piece in reversed(pieces):
            known = self._known.get(piece)
            if known is not None:
                self._known.move_to_end(piece)
                break
        return Prompt(
            num_tokens, size, pieces, known, exact=exact, bytes_per_token=self._bytes_per_token, cuts=cuts,
            earlier=self._sessions.find(cuts),
        )  # fmt: skip

    def served(self, prompt: Prompt, worker: Worker, num_answer_tokens: int) -> None:
        """Notes that a worker has served a prompt, and how long its answer was."""
        self._sessions.note(prompt.cuts, prompt.size, worker, prompt.num_tokens, num_answer_tokens)

    def learn_length(self, size: int, num_ids: int | None, num_tokens: int) -> None:
        """Notes that a prompt of `size` bytes had `num_tokens` tokens. Token ids teach nothing about text."""
        if num_ids is None and num_tokens > 0:
            self._bytes_per_token += 0.1 * (max(0.25, size / num_tokens) - self._bytes_per_token)

    def learn(self, prompt: Prompt, hashes: Sequence[bytes], num_tokens: int, block_tokens: int, size: int) -> None:
        """Notes the hashes of the whole blocks of a prompt that prefill has computed: `size` bytes and `num_tokens`
        tokens."""
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
