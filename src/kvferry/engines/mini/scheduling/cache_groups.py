"""The blocks of one request, group by group: what each kind of cache needs, keeps, and can take from the prefix cache.

FULL     every block from the first token on.
WINDOW   the blocks that the next token can look back on. Those that the window has left are given up.
STATE    one block, which holds the state after all tokens so far, and is overwritten with each step. So what the prefix
         cache has of a state is a snapshot: a copy, taken where a step begins at the end of a whole block.

A request can go on behind c tokens of the prefix cache if all groups have what the next token needs: FULL the blocks of
[0, c), WINDOW those of the last tokens before c, STATE a snapshot at c. If another engine brings the tokens up to n, it
brings every state, and of windows what is not here: then FULL alone decides, and what a window at n needs before c.
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
    """Tokens [0, num_tokens) of a request, as the prefix cache has them."""

    num_tokens: int
    blocks: tuple[GroupBlocks, ...]
    """One a group, not taken. STATE: the snapshot, or nothing."""

    @property
    def block_ids(self) -> list[int]:
        """Of all groups."""
        return [block for held in self.blocks for block in held.ids]


class Groups:
    """Stateless but for the block manager. On the engine's thread only."""

    def __init__(
        self,
        specs: Sequence[CacheGroup],
        blocks: BlockManager,
        *,
        block_tokens: int,
        chunk_tokens: int,
        prefix_caching: bool,
        extra_window_tokens: int = 0,
    ) -> None:
        """`chunk_tokens`: the most that one request computes in a step. `extra_window_tokens`: R34."""
        self.specs = tuple(specs)
        self.all_full = all(spec.kind is CacheKind.FULL for spec in specs)
        self.has_state = any(spec.kind is CacheKind.STATE for spec in specs)
        self._blocks = blocks
        self._size = block_tokens
        self._chunk = chunk_tokens
        self._caching = prefix_caching
        self._extra = extra_window_tokens
        self._states = [i for i, spec in enumerate(specs) if spec.kind is CacheKind.STATE]
        self._windows = [i for i, spec in enumerate(specs) if spec.kind is CacheKind.WINDOW]
        self._full = [i for i, spec in enumerate(specs) if spec.kind is CacheKind.FULL]

    @property
    def telling(self) -> int:
        """The group whose known blocks say best how much of a prompt need not be computed, or moved, again."""
        return next(iter([*self._full, *self._windows]), 0)

    # How many

    def num_blocks(self, num_tokens: int) -> int:
        """That hold so many tokens from the first one on."""
        return -(-num_tokens // self._size)

    def first_needed(self, group: int, position: int) -> int:
        """The first block that the token at `position` looks back on, or, by R34, one a few tokens before it."""
        window = self.specs[group].window_tokens
        if window is None or self.specs[group].kind is not CacheKind.WINDOW:
            return 0
        return max(0, position - window + 1 - self._extra) // self._size

    def peak(self, group: int) -> int:
        """The most blocks that a request ever needs in a window group, wherever it is."""
        window = self.specs[group].window_tokens or 0
        return self.num_blocks(window - 1 + self._extra + self._chunk) + 1

    def need(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens needs at its worst moment."""
        full = self.num_blocks(num_tokens)
        windows = sum(min(full, self.peak(group)) for group in self._windows)
        return full * len(self._full) + windows + len(self._states)

    def room_tokens(self) -> int:
        """The longest request that fits into the whole cache."""
        low, high = 0, (self._blocks.num_usable + 1) * self._size << (0 if self._full else 20)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.need(middle) <= self._blocks.num_usable else (low, middle - 1)
        return low // self._size * self._size

    # The prefix cache

    def nothing(self) -> PrefixHit:
        """No token is known."""
        return PrefixHit(0, tuple(GroupBlocks() for _ in self.specs))

    def find(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        """The longest prefix behind which a request can go on by itself. `hashes`: of the blocks that may be used."""
        count = self._longest_full(hashes)
        while count:
            position = count * self._size
            fewer = min((self._usable(group, count, hashes, position) for group in self._windows), default=count)
            if fewer == count and self._has_snapshot(hashes[count - 1]):
                return self._known(hashes, count, count * self._size, states=True)
            count = fewer if fewer < count else count - 1
        return self.nothing()

    def find_before(self, hashes: Sequence[BlockHash], stop: int) -> PrefixHit:
        """The longest prefix, shorter than that, which need not come from the engine that brings the tokens up to
        `stop`."""
        # Without a FULL group only what can be gone on behind is known to be here: the rest may be just not needed.
        here = self._longest_full(hashes) if self._full else self.find(hashes).num_tokens // self._size
        count = min(here, max(0, stop - 1) // self._size)
        while count:
            fewer = min((self._usable(group, count, hashes, stop) for group in self._windows), default=count)
            if fewer == count:
                break
            count = fewer
        return self._known(hashes, count, stop, states=False)

    def _has_snapshot(self, key: BlockHash) -> bool:
        return all(self._blocks.lookup(key, group) is not None for group in self._states)

    def _longest_full(self, hashes: Sequence[BlockHash]) -> int:
        return min((len(self._blocks.find(hashes, group)) for group in self._full), default=len(hashes))

    def _usable(self, group: int, count: int, hashes: Sequence[BlockHash], position: int) -> int:
        """`count`, if the window before `position` has all its blocks below `count`; else a smaller number to try."""
        for at in range(count - 1, self.first_needed(group, position) - 1, -1):
            if self._blocks.lookup(hashes[at], group) is None:
                return at
        return count

    def _known(self, hashes: Sequence[BlockHash], count: int, position: int, *, states: bool) -> PrefixHit:
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

    def admission(self, known: PrefixHit, num_target_tokens: int, remote_stop: int | None) -> list[int]:
        """How many fresh blocks each group needs for a request of `num_target_tokens` tokens that begins with `known`.

        `remote_stop`: the tokens before it come from another engine, together with the windows that end there. A window
        group gets as many blocks as it ever needs at once, so that a request that must not be preempted never waits
        for another block.
        """
        end, counts = self.num_blocks(num_target_tokens), []
        for group, (spec, held) in enumerate(zip(self.specs, known.blocks, strict=True)):
            if spec.kind is CacheKind.STATE:
                counts.append(1)
                continue
            begin = max(known.num_tokens // self._size, self._begin(group, held, remote_stop))
            missing = end - begin
            if spec.kind is CacheKind.WINDOW:
                # Blocks that it begins with others may refer to as well: to give them up frees nothing.
                missing = min(missing, self.peak(group))
            counts.append(missing)
        return counts

    def _begin(self, group: int, held: GroupBlocks, remote_stop: int | None) -> int:
        return held.first if held.ids or remote_stop is None else self.first_needed(group, remote_stop)

    def admit(
        self, request: Request, known: PrefixHit, counts: Sequence[int], remote_stop: int | None, changes: BlockChanges
    ) -> None:
        """Give a request its blocks. The caller has asked `fits`."""
        request.blocks, request.block_tokens = [], self._size
        self._blocks.take(known.block_ids)
        for group, (spec, held) in enumerate(zip(self.specs, known.blocks, strict=True)):
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
            first = max(self._begin(group, held, remote_stop), 0 if held.ids else known.num_tokens // self._size)
            request.blocks.append(GroupBlocks(first, [*held.ids, *fresh]))
        request.num_computed = known.num_tokens
        request.num_remembered = known.num_tokens // self._size
        has_states = all(known.blocks[group].ids for group in self._states)
        request.state_tokens = known.num_tokens if has_states or not known.num_tokens else -1

    def trim(self, request: Request, stop: int) -> int:
        """Give up blocks that the window has left; how many blocks are missing for the tokens up to `stop`.

        A prompt that is computed in pieces keeps as many as it will need: a block goes when another one takes its
        place.
        """
        end, missing = self.num_blocks(stop), 0
        prefilling = request.num_uncomputed > 1
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
        """The blocks that `trim` has found missing. The caller has asked `fits`."""
        end = self.num_blocks(stop)
        for held in request.blocks:
            if not held.state and end > held.end:
                fresh = self._blocks.allocate(end - held.end, after=held.ids[-1] if held.ids else None)
                held.ids += fresh
                changes.fresh += fresh

    def stretch(self, request: Request, stop: int, changes: BlockChanges) -> int:
        """Blocks up to `stop`, if there are any, for tokens that are only guessed. The request has room up to here."""
        room = min((held.end * self._size for held in request.blocks if not held.state), default=stop)
        if room >= stop:
            return room
        if self._blocks.fits((), self.trim(request, stop)):
            self.extend(request, stop, changes)
        return min((held.end * self._size for held in request.blocks if not held.state), default=stop)

    def save_state(self, request: Request, changes: BlockChanges) -> bool:
        """Keep the states as they are before a step with drafts. False: there is no block for them."""
        states = [request.blocks[group] for group in self._states]
        missing = [held for held in states if len(held.ids) == 1]
        if not self._blocks.fits((), len(missing)):
            return False
        for held in missing:
            held.ids += self._blocks.allocate(1)
        changes.copies += [(held.ids[0], held.ids[1]) for held in states]
        return True

    def restore_state(self, request: Request) -> None:
        """A draft fell: the states are those that were set aside."""
        for group in self._states:
            request.blocks[group].ids.reverse()

    def landed(self, request: Request) -> None:
        """Another engine has brought its tokens, up to `remote_stop`, with windows and states as they are there."""
        request.state_tokens = request.remote_stop
        for group in self._windows:
            window = self.specs[group].window_tokens or 0
            # Before that only what both sides happened to have was moved: no whole block for anybody else.
            request.blocks[group].first_complete_block = self.num_blocks(max(0, request.remote_stop - window + 1))

    # Remembering

    def remember(self, request: Request, num_tokens: int) -> None:
        """Whole blocks of the first `num_tokens` may serve other requests from now on. Their hashes are there."""
        whole = num_tokens // self._size
        for group, held in enumerate(request.blocks):
            if not held.state:
                for at in range(
                    max(request.num_remembered, held.first, held.first_complete_block), min(whole, held.end)
                ):
                    self._blocks.remember(held.ids[at - held.first], request.hashes[at], group)
        request.num_remembered = max(request.num_remembered, whole)

    def snapshot(self, request: Request, changes: BlockChanges) -> None:
        """Copy the states of a request that is about to go on, if it stands at the end of a whole block.

        While a prompt is computed, copies may take the place of older known blocks; beside an answer only clean blocks
        are used, and only its last copy is kept: whoever goes on with the answer goes on behind all of it.
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
        """The request has ended: its states are snapshots themselves, if it stands at the end of a whole block."""
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
        """The plan is made: snapshots are known, and what copies read may be given away by the next one."""
        for page, key, group in changes.snapshots:
            self._blocks.remember(page, key, group)
            self._blocks.free([page])
        self._blocks.free(changes.pins)


def tokens_handed_over(
    specs: Sequence[CacheGroup], *, lookahead: int = 0, first_token: bool = True
) -> Callable[[int], int]:
    """How many tokens of a prompt prefill hands over, for a model with these cache groups. R32; both sides ask it.

    `first_token`: prefill tells the token that it chose. Where it does not, decode has to compute the last prompt token
    for its logits; with windows it cannot do so behind the whole prompt, for what that token looks back on may be gone.
    And a drafter's last slot has read the token that was not told.
    """
    kinds = {spec.kind for spec in specs}
    needed = 1 if (CacheKind.WINDOW in kinds or lookahead) and not first_token else 0

    def tokens(num_prompt: int) -> int:
        there = handoff_tokens(num_prompt, mamba=CacheKind.STATE in kinds, lookahead=lookahead)
        return min(there, max(0, num_prompt - needed))

    return tokens
