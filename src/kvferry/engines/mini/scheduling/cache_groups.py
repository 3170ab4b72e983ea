"""The blocks of one request per cache group: what each kind needs, keeps, and can take from the prefix cache.

FULL     every block from the first token on.
WINDOW   the blocks that the next token attends to. Blocks that the window has left are given up.
STATE    one block with the state after all tokens so far, overwritten in each step. The prefix cache therefore has
         snapshots of states: copies, made when a step begins at the end of a whole block.

A request can continue after c tokens of the prefix cache if all groups have what the next token needs: FULL the blocks
of [0, c), WINDOW those of the last tokens before c, STATE a snapshot at c. If another engine hands over the tokens up
to n, it hands over every state, and what is missing of windows. Then c depends only on the FULL groups, and on what a
window at n needs before c.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.connector.lookahead import handoff_tokens
from kvferry.engines.mini.scheduling.batch import BlockChanges
from kvferry.engines.mini.scheduling.block_manager import BlockHash, BlockManager
from kvferry.engines.mini.scheduling.request import GroupBlocks, Request
from kvferry.layout.description import CacheGroup, CacheKind

__all__ = ["Groups", "PrefixHit", "tokens_handed_over"]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the prefix cache has of the tokens [0, num_tokens) of a request."""

    num_tokens: int
    blocks: tuple[GroupBlocks, ...]
    """One per group; not referenced yet. STATE: the snapshot, if any."""

    @property
    def block_ids(self) -> list[int]:
        """The ids of the blocks of all groups."""
        return [block for held in self.blocks for block in held.ids]


class Groups:
    """Has no state but the block manager. Called on the engine's thread only."""

    def __init__(
        self,
        specs: Sequence[CacheGroup],
        blocks: BlockManager,
        *,
        block_tokens: int,
        chunk_tokens: int,
        prefix_caching: bool,
        extra_window_tokens: int = 0,
        trailing_dependency: int = 0,
    ) -> None:
        """`chunk_tokens`: the most tokens that one request computes in a step. `extra_window_tokens`: see R34.
        `trailing_dependency`: how many tokens after a block influence its content (MTP)."""
        self.specs = tuple(specs)
        self.all_full = all(spec.kind is CacheKind.FULL for spec in specs)
        self.has_state = any(spec.kind is CacheKind.STATE for spec in specs)
        self._blocks = blocks
        self._size = block_tokens
        self._chunk = chunk_tokens
        self._caching = prefix_caching
        self._extra = extra_window_tokens
        self._trailing = trailing_dependency
        self._states = [i for i, spec in enumerate(specs) if spec.kind is CacheKind.STATE]
        self._windows = [i for i, spec in enumerate(specs) if spec.kind is CacheKind.WINDOW]
        self._full = [i for i, spec in enumerate(specs) if spec.kind is CacheKind.FULL]

    @property
    def routing_group(self) -> int:
        """The group whose cached blocks say best how much of a prompt need not be computed, or moved, again."""
        return next(iter([*self._full, *self._windows]), 0)

    # How many

    def num_blocks(self, num_tokens: int) -> int:
        """Returns how many blocks hold this many tokens."""
        return -(-num_tokens // self._size)

    def first_needed(self, group: int, position: int) -> int:
        """Returns the first block that the token at `position` attends to, or one a few tokens earlier (R34)."""
        window = self.specs[group].window_tokens
        if window is None or self.specs[group].kind is not CacheKind.WINDOW:
            return 0
        return max(0, position - window + 1 - self._extra) // self._size

    def peak(self, group: int) -> int:
        """Returns the most blocks that a request ever needs at once in a window group."""
        window = self.specs[group].window_tokens or 0
        return self.num_blocks(window - 1 + self._extra + self._chunk) + 1

    def need(self, num_tokens: int) -> int:
        """Returns the most blocks, over all groups, that a request of this many tokens needs at once."""
        full = self.num_blocks(num_tokens)
        windows = sum(min(full, self.peak(group)) for group in self._windows)
        return full * len(self._full) + windows + len(self._states)

    def room_tokens(self) -> int:
        """Returns the length in tokens of the longest request that fits into the whole cache."""
        low, high = 0, (self._blocks.num_usable + 1) * self._size << (0 if self._full else 20)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.need(middle) <= self._blocks.num_usable else (low, middle - 1)
        return low // self._size * self._size

    # The prefix cache

    def nothing(self) -> PrefixHit:
        """Returns a hit of no tokens."""
        return PrefixHit(0, tuple(GroupBlocks() for _ in self.specs))

    def find(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        """Returns the longest prefix after which this engine can continue by itself. `hashes`: blocks that may be
        used."""
        count = self._longest_full(hashes)
        while count:
            position = count * self._size
            fewer = min((self._usable(group, count, hashes, position) for group in self._windows), default=count)
            if fewer == count and self._has_snapshot(hashes[count - 1]):
                return self._hit(hashes, count, count * self._size, states=True)
            count = fewer if fewer < count else count - 1
        return self.nothing()

    def usable(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Returns those of the first of these blocks whose cached content does not depend on what follows here."""
        if not self._trailing:
            return hashes
        # What the drafter keeps of the last block depends on the tokens after it, which may differ.
        return hashes[: max(0, (self.find(hashes).num_tokens - self._trailing) // self._size)]

    def find_for_others(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        """Returns the longest prefix after which another engine can continue, whatever tokens follow there."""
        return self.find(self.usable(hashes))

    def find_before(self, hashes: Sequence[BlockHash], stop: int) -> PrefixHit:
        """Returns the longest prefix before `stop` that need not be handed over by the engine with the tokens up to
        `stop`."""
        # Without a FULL group, a block that is not needed is not looked up: only `find` proves that the tokens are
        # here.
        here = self._longest_full(hashes) if self._full else self.find(hashes).num_tokens // self._size
        count = min(here, max(0, stop - 1) // self._size)
        while count:
            fewer = min((self._usable(group, count, hashes, stop) for group in self._windows), default=count)
            if fewer == count:
                break
            count = fewer
        return self._hit(hashes, count, stop, states=False)

    def _has_snapshot(self, key: BlockHash) -> bool:
        return all(self._blocks.lookup(key, group) is not None for group in self._states)

    def _longest_full(self, hashes: Sequence[BlockHash]) -> int:
        return min((len(self._blocks.find(hashes, group)) for group in self._full), default=len(hashes))

    def _usable(self, group: int, count: int, hashes: Sequence[BlockHash], position: int) -> int:
        """Returns `count` if all blocks below it that the window before `position` needs are cached, else a smaller
        count to try."""
        for at in range(count - 1, self.first_needed(group, position) - 1, -1):
            if self._blocks.lookup(hashes[at], group) is None:
                return at
        return count

    def _hit(self, hashes: Sequence[BlockHash], count: int, position: int, *, states: bool) -> PrefixHit:
        held = []
        for group, spec in enumerate(self.specs):
            if spec.kind is CacheKind.STATE:
                at = range(count - 1, count) if states else range(0)
            else:
                at = range(min(count, self.first_needed(group, position)), count)
            found = [self._blocks.lookup(hashes[i], group) for i in at]
            first = 0 if spec.kind is CacheKind.STATE else at.start
            held.append(GroupBlocks(first, [block for block in found if block is not None]))
        return PrefixHit(count * self._size, tuple(held))

    # Taking and giving

    def admission(self, hit: PrefixHit, num_target_tokens: int, remote_stop: int | None) -> list[int]:
        """Returns how many fresh blocks each group needs for a request of `num_target_tokens` that begins with `hit`.

        `remote_stop`: the tokens before it come from another engine, together with the windows that end there. A window
        group gets as many blocks as it ever needs at once, so that a request that must not be preempted never waits
        for another block.
        """
        end, counts = self.num_blocks(num_target_tokens), []
        for group, (spec, held) in enumerate(zip(self.specs, hit.blocks, strict=True)):
            if spec.kind is CacheKind.STATE:
                counts.append(1)
                continue
            begin = max(hit.num_tokens // self._size, self._begin(group, held, remote_stop))
            missing = end - begin
            if spec.kind is CacheKind.WINDOW:
                # Other requests may reference the blocks of the hit too: to give those up would free nothing.
                missing = min(missing, self.peak(group))
            counts.append(missing)
        return counts

    def _begin(self, group: int, held: GroupBlocks, remote_stop: int | None) -> int:
        return held.first if held.ids or remote_stop is None else self.first_needed(group, remote_stop)

    def admit(
        self, request: Request, hit: PrefixHit, counts: Sequence[int], remote_stop: int | None, changes: BlockChanges
    ) -> None:
        """Gives a request its blocks. The caller has checked `fits`."""
        request.blocks, request.block_tokens = [], self._size
        self._blocks.take(hit.block_ids)
        for group, (spec, held) in enumerate(zip(self.specs, hit.blocks, strict=True)):
            fresh = self._blocks.allocate(counts[group])
            if spec.kind is CacheKind.STATE:
                if held.ids:
                    changes.copies.append((held.ids[0], fresh[0]))
                    changes.pins += held.ids
                else:
                    changes.fresh += fresh
                request.blocks.append(GroupBlocks(0, fresh, state=True))
                continue
            changes.fresh += fresh
            first = max(self._begin(group, held, remote_stop), 0 if held.ids else hit.num_tokens // self._size)
            request.blocks.append(GroupBlocks(first, [*held.ids, *fresh]))
        request.num_computed = hit.num_tokens
        request.num_remembered = hit.num_tokens // self._size
        has_states = all(hit.blocks[group].ids for group in self._states)
        request.state_tokens = hit.num_tokens if has_states or not hit.num_tokens else -1

    def trim(self, request: Request, stop: int) -> int:
        """Gives up blocks that windows have left, and returns how many are missing for the tokens up to `stop`.

        A prompt that is computed in chunks keeps as many blocks as it will need: one is freed when another takes its
        place. So does one for another engine to its last token: that engine may draft deeper, and begin further back.
        """
        end, missing = self.num_blocks(stop), 0
        prefilling = request.num_uncomputed > 1 or request.for_remote
        for group, held in enumerate(request.blocks):
            if held.state:
                continue
            more = max(0, end - held.end)
            if self.specs[group].kind is CacheKind.WINDOW:
                stale = min(len(held.ids), self.first_needed(group, request.num_computed) - held.first)
                keep = self.peak(group) if prefilling else 0
                drop = max(0, min(stale, len(held.ids) + more - keep))
                self._blocks.free(held.ids[:drop])
                held.first, held.ids = held.first + drop, held.ids[drop:]
            missing += more
        return missing

    def extend(self, request: Request, stop: int, changes: BlockChanges) -> None:
        """Allocates the blocks that `trim` found missing. The caller has checked `fits`."""
        end = self.num_blocks(stop)
        for held in request.blocks:
            if not held.state and end > held.end:
                fresh = self._blocks.allocate(end - held.end, after=held.ids[-1] if held.ids else None)
                held.ids += fresh
                changes.fresh += fresh

    def stretch(self, request: Request, stop: int, changes: BlockChanges) -> int:
        """Allocates blocks up to `stop` for draft tokens if there are free ones. Returns up to which token there is
        room."""
        room = min((held.end * self._size for held in request.blocks if not held.state), default=stop)
        if room >= stop:
            return room
        if self._blocks.fits((), self.trim(request, stop)):
            self.extend(request, stop, changes)
        return min((held.end * self._size for held in request.blocks if not held.state), default=stop)

    def save_state(self, request: Request, changes: BlockChanges) -> bool:
        """Copies the states before a step with drafts. Returns False if there is no free block for them."""
        states = [request.blocks[group] for group in self._states]
        missing = [held for held in states if len(held.ids) == 1]
        if not self._blocks.fits((), len(missing)):
            return False
        for held in missing:
            held.ids += self._blocks.allocate(1)
        changes.copies += [(held.ids[0], held.ids[1]) for held in states]
        return True

    def restore_state(self, request: Request) -> None:
        """Goes back to the states that `save_state` copied, because a draft was rejected."""
        for group in self._states:
            request.blocks[group].ids.reverse()

    def landed(self, request: Request) -> None:
        """Records that the tokens up to `remote_stop`, with the windows and states at that position, have landed."""
        request.state_tokens = request.remote_stop
        for group in self._windows:
            window = self.specs[group].window_tokens or 0
            # Blocks before this one may be incomplete: only tokens inside the window were handed over.
            request.blocks[group].first_complete_block = self.num_blocks(max(0, request.remote_stop - window + 1))

    # Remembering

    def remember(self, request: Request, num_tokens: int) -> None:
        """Enters the whole blocks of the first `num_tokens` into the prefix cache. Their hashes must be known."""
        whole = num_tokens // self._size
        for group, held in enumerate(request.blocks):
            if not held.state:
                for at in range(
                    max(request.num_remembered, held.first, held.first_complete_block), min(whole, held.end)
                ):
                    self._blocks.remember(held.ids[at - held.first], request.hashes[at], group)
        request.num_remembered = max(request.num_remembered, whole)

    def snapshot(self, request: Request, changes: BlockChanges) -> None:
        """Plans a copy of a request's states if it is at the end of a whole block.

        While a prompt is computed, a copy may evict older cached blocks. While an answer grows, only clean blocks are
        used and only the last copy is kept: a request that continues an answer continues after all of it.
        """
        at = request.num_computed
        if not self._may_keep(request) or at % self._size or not at:
            return
        key = request.hashes[at // self._size - 1]
        groups = [group for group in self._states if self._blocks.lookup(key, group) is None]
        in_answer = at > request.num_prompt_tokens
        if not groups or len(groups) > (self._blocks.num_clean if in_answer else self._blocks.num_free):
            return
        if in_answer:
            if request.answer_snapshot is not None:
                for group in self._states:
                    self._blocks.forget(request.answer_snapshot, group)
            request.answer_snapshot = key
        for group in groups:
            page = self._blocks.allocate(1)[0]
            changes.copies.append((request.blocks[group].ids[0], page))
            changes.snapshots.append((page, key, group))

    def keep_state(self, request: Request) -> None:
        """Enters the states of a request that has ended into the prefix cache, if it is at the end of a whole block."""
        at = request.num_computed
        if self._may_keep(request) and not at % self._size and at and not request.in_flight:
            for group in self._states:
                self._blocks.remember(request.blocks[group].ids[0], request.hashes[at // self._size - 1], group)

    def _may_keep(self, request: Request) -> bool:
        at = request.num_computed
        return bool(
            self._states
            and self._caching
            and request.blocks
            and request.state_tokens == at
            and len(request.hashes) >= at // self._size
        )

    def settle(self, changes: BlockChanges) -> None:
        """Ends a plan: its snapshots enter the prefix cache, and blocks that copies read are no longer pinned."""
        for page, key, group in changes.snapshots:
            self._blocks.remember(page, key, group)
            self._blocks.free([page])
        self._blocks.free(changes.pins)


def tokens_handed_over(
    specs: Sequence[CacheGroup], *, lookahead: int = 0, first_token: bool = True
) -> Callable[[int], int]:
    """Returns a function from prompt length to the number of tokens that prefill hands over (R32).

    `specs`: the model's cache groups. Both sides use the same function. `first_token`: whether prefill passes on the
    token that it chose. If not, decode computes the last prompt token for its logits; with window groups it cannot do
    that after the whole prompt, because what the token attends to may be gone; and with a drafter, the last slot has
    read the token that was not passed on.
    """
    kinds = {spec.kind for spec in specs}
    needed = 1 if (CacheKind.WINDOW in kinds or lookahead) and not first_token else 0

    def tokens(num_prompt: int) -> int:
        there = handoff_tokens(num_prompt, mamba=CacheKind.STATE in kinds, lookahead=lookahead)
        return min(there, max(0, num_prompt - needed))

    return tokens
