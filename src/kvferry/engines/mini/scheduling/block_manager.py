"""Keeps the books on cache blocks: reference counts, prefix caching, blocks that transfers hold. No memory is here.

Blocks of all cache groups come from here. A block belongs to one group as long as it is referenced or its content is
known (see cache_groups.py). It is in exactly one of these states, which `check` proves:

* used     referenced by one or more requests, or by transfers that hold it
* cached   not referenced, but its content is known by hash and may be used again; the oldest block is evicted first
* clean    free, with no content worth keeping

Block 0 is in none of them: it stays zero (see cache/pool.py).
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NewType

import numpy as np

from kvferry.ids import TransferId
from kvferry.wire.prompt_digest import TOKEN_BYTES, pack_tokens

__all__ = ["BlockHash", "BlockManager", "chain_hashes", "hash_packed", "num_runs"]

BlockHash = NewType("BlockHash", bytes)
"""Identifies the tokens of a block and of all blocks before it."""

HASH_DOMAIN = b"kvferry block hash 2"  # 1: 64-bit tokens


def chain_hashes(
    known: list[BlockHash], tokens: Sequence[int], block_tokens: int, salt: str = "", packed: bytes = b""
) -> None:
    """Extends `known` to one hash per whole block of `tokens`. Equal tokens under different salts have no hash in
    common (R38).

    SHA-256 gives the same hash in every process, and no client can make its prompt collide with another client's.
    `packed` is as many of the first tokens as the caller has packed already (pack_tokens).
    """
    start, stop = len(known) * block_tokens, len(tokens) // block_tokens * block_tokens
    if start >= stop:
        return
    num_packed = len(packed) // TOKEN_BYTES
    body = packed[start * TOKEN_BYTES : stop * TOKEN_BYTES]
    if num_packed < stop:
        body += pack_tokens(tokens[max(start, num_packed) : stop])
    _chain(known, body, block_tokens, salt)


def hash_packed(packed: bytes, block_tokens: int, salt: str = "") -> list[BlockHash]:
    """Returns one hash per whole block of a prompt that is packed (pack_tokens)."""
    known: list[BlockHash] = []
    size = block_tokens * TOKEN_BYTES
    _chain(known, packed[: len(packed) // size * size], block_tokens, salt)
    return known


def _chain(known: list[BlockHash], body: bytes, block_tokens: int, salt: str) -> None:
    salted = hashlib.sha256(salt.encode()).digest() if salt and not known else b""
    parent = known[-1] if known else HASH_DOMAIN + block_tokens.to_bytes(4, "little") + salted
    size = block_tokens * TOKEN_BYTES
    for at in range(0, len(body), size):
        parent = BlockHash(hashlib.sha256(parent + body[at : at + size]).digest())
        known.append(parent)


def num_runs(block_ids: Sequence[int]) -> int:
    """Returns the number of runs of consecutive ids in `block_ids`."""
    return sum(1 for i, block in enumerate(block_ids) if i == 0 or block != block_ids[i - 1] + 1)


class BlockManager:
    """The books of one cache. Called on the engine's thread only."""

    def __init__(self, num_blocks: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._clean = np.ones(num_blocks, dtype=np.bool_)
        self._clean[0] = False
        self._num_clean = num_blocks - 1
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[tuple[int, BlockHash], int] = {}
        """Maps (cache group, hash) to the block with that content."""
        self._hash_of: dict[int, tuple[int, BlockHash]] = {}
        self._held: dict[TransferId, list[int]] = {}
        self._marks: dict[int, int] = {}
        """Per cache group, the exclusive or of a part of each known hash."""
        self._num_known: Counter[int] = Counter()

    @property
    def num_usable(self) -> int:
        """The number of blocks that requests can have: all but block 0."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated: clean and cached ones."""
        return self._num_clean + len(self._cached)

    @property
    def num_clean(self) -> int:
        """The number of blocks that can be allocated without evicting a cached one."""
        return self._num_clean

    @property
    def num_held(self) -> int:
        """The number of references that transfers hold for requests that have ended or started again."""
        return sum(len(blocks) for blocks in self._held.values())

    def find(self, hashes: Sequence[BlockHash], group: int = 0) -> list[int]:
        """Returns the longest chain of known blocks, without referencing them."""
        found = []
        for key in hashes:
            block = self._by_hash.get((group, key))
            if block is None:
                break
            found.append(block)
        return found

    def lookup(self, key: BlockHash, group: int) -> int | None:
        """Returns the block with this content, if there is one, without referencing it."""
        return self._by_hash.get((group, key))

    def known_hashes(self, group: int = 0) -> list[BlockHash]:
        """Returns the hash of every block whose content may be used again, for routers that choose by prefix."""
        return [key for one, key in self._by_hash if one == group]

    def mark(self, group: int = 0) -> tuple[int, int]:
        """Returns a number that changes whenever `known_hashes` does, and how many hashes there are. Both are kept up
        to date with each change: a cache may know a million blocks."""
        return self._marks.get(group, 0), self._num_known[group]

    def _change_mark(self, known: tuple[int, BlockHash], by: int) -> None:
        group, key = known
        self._marks[group] = self._marks.get(group, 0) ^ (int.from_bytes(key[:8], "little") >> 1)
        self._num_known[group] += by

    def fits(self, known: Sequence[int], num_fresh: int) -> bool:
        """Returns whether `take(known)` followed by `allocate(num_fresh)` will succeed."""
        return not self.num_missing(known, num_fresh)

    def num_missing(self, known: Sequence[int], num_fresh: int) -> int:
        """Returns how many more blocks must be free before that succeeds."""
        return max(0, num_fresh + sum(1 for block in known if self._references[block] == 0) - self.num_free)

    def take(self, known: Sequence[int]) -> None:
        """References blocks that `find` returned."""
        for block in known:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Returns fresh blocks, in as few runs as possible. The caller has checked `fits`.

        `after`: the request's last block; blocks that follow it directly are preferred. If there are none, a growing
        answer takes its block from the shortest run, so that long runs remain for prompts, which hand-offs move. The
        blocks still have their old content: see KVCache.clear.
        """
        assert count <= self.num_free, f"{count} blocks allocated where {self.num_free} are free"
        while self._num_clean < count:
            self._forget(next(iter(self._cached)))
        blocks: list[int] = []
        if after is not None:
            while len(blocks) < count and after + 1 < self.num_blocks and self._clean[after + 1]:
                after += 1
                self._claim(blocks, range(after, after + 1))
        while len(blocks) < count:
            self._claim(blocks, self._best_run(count - len(blocks)))
        return blocks

    def _best_run(self, count: int) -> range:
        """Returns the beginning of the shortest clean run that is long enough, else the longest run."""
        clean = np.flatnonzero(self._clean)
        cuts = np.flatnonzero(np.diff(clean) != 1) + 1
        starts = clean[np.concatenate(([0], cuts))]
        lengths = np.diff(np.concatenate(([0], cuts, [len(clean)])))
        enough = np.flatnonzero(lengths >= count)
        best = enough[np.argmin(lengths[enough])] if len(enough) else np.argmax(lengths)
        start = int(starts[best])
        return range(start, start + min(count, int(lengths[best])))

    def _claim(self, blocks: list[int], run: range) -> None:
        for block in run:
            self._references[block] = 1
        self._clean[run.start : run.stop] = False
        self._num_clean -= len(run)
        blocks.extend(run)

    def remember(self, block: int, key: BlockHash, group: int = 0) -> None:
        """Enters a complete block into the prefix cache: later requests may use it."""
        if self._prefix_caching and (group, key) not in self._by_hash and block not in self._hash_of:
            self._by_hash[group, key] = block
            self._hash_of[block] = (group, key)
            self._change_mark((group, key), 1)

    def forget(self, key: BlockHash, group: int) -> None:
        """Evicts the block with this content from the prefix cache, unless it is referenced."""
        block = self._by_hash.get((group, key))
        if block is not None and block in self._cached:
            self._forget(block)

    def forget_all(self) -> None:
        """Empties the prefix cache, because the memory was lost. References stay as they are."""
        for block in list(self._cached):
            self._forget(block)
        self._by_hash.clear()
        self._hash_of.clear()
        self._marks.clear()
        self._num_known.clear()

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference to each block, last blocks first: a cached chain is then evicted from its end."""
        for block in reversed(list(block_ids)):
            assert self._references[block] > 0, f"block {block} freed more often than taken"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._clean[block] = True
                    self._num_clean += 1

    def hold(self, transfer: TransferId, block_ids: Sequence[int]) -> None:
        """Turns a request's references into the transfer's: the blocks stay as they are until `release` (R28)."""
        self._held.setdefault(transfer, []).extend(block_ids)

    def release(self, transfer: TransferId) -> bool:
        """Drops the transfer's references: no peer uses its blocks any more. Returns False if there were none."""
        blocks = self._held.pop(transfer, None)
        if blocks is None:
            return False
        self.free(blocks)
        return True

    def _forget(self, block: int) -> None:
        del self._cached[block]
        known = self._hash_of.pop(block)
        del self._by_hash[known]
        self._change_mark(known, -1)
        self._clean[block] = True
        self._num_clean += 1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that every block is in one state, and is referenced exactly by `tables` and by held transfers.

        Walks all blocks: for tests and debugging.
        """
        want = Counter(block for table in [*tables, *self._held.values()] for block in table)
        for block in range(1, self.num_blocks):
            assert self._references[block] == want[block], (
                f"block {block} has {self._references[block]} references, and {want[block]} owners"
            )
            states = (self._references[block] > 0, block in self._cached, bool(self._clean[block]))
            assert sum(states) == 1, f"block {block} is used, cached, clean: {states}"
        assert want[0] == 0, "block 0 was allocated"
        assert not self._clean[0], "block 0 counts as clean"
        assert self._num_clean == int(self._clean.sum()), "clean blocks are miscounted"
        assert all(self._by_hash[key] == block for block, key in self._hash_of.items()), "hash maps disagree"
        assert len(self._by_hash) == len(self._hash_of), "hash maps disagree in length"
        assert all(block in self._hash_of for block in self._cached), "a cached block without a hash"
        assert +self._num_known == Counter(group for group, _ in self._by_hash), "known hashes are miscounted"
