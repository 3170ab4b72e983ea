"""Decides which requests run in the next step, and with which blocks.

cache_groups.py decides which blocks a request has, group by group.

Life of a request:

1. WAITING         in the queue, oldest first, without blocks. `_admit` moves it on when its whole prompt has blocks;
                   until then newer ones may overtake it, within bounds (overtaking.py).
2. WAITING_FOR_KV  decode only: its prompt's KV is on its way from another engine into its blocks. handoff_results.py
                   moves it on: landed -> RUNNING; failed -> WAITING, and this time it computes its prompt itself.
3. RUNNING         has a chunk in every step: a part of its prompt, or its next token. When blocks run out, the newest
                   request is preempted: it goes back to WAITING and computes everything again (`_preempt`).
4. FINISHED        after its last token, an abort or an error, from any state. The engine ends it: see engine.py.

Decoding requests come first in a step, then chunks of prompts, oldest first, until the step's token budget is used up.
After a step has failed, each of its requests runs alone for a while (`suspect`), so that the cause is found.
"""

import bisect
from collections.abc import Sequence

from kvferry.connector.base import Match, SchedulerHalf
from kvferry.connector.lookahead import extra_window_tokens, verified_tokens
from kvferry.engines.mini.scheduling.batch import ScheduledChunk, StepPlan
from kvferry.engines.mini.scheduling.block_manager import BlockHash, BlockManager, chain_hashes
from kvferry.engines.mini.scheduling.cache_groups import Groups, PrefixHit
from kvferry.engines.mini.scheduling.overtaking import Overtaking
from kvferry.engines.mini.scheduling.prefix_holder import PrefixHolder
from kvferry.engines.mini.scheduling.request import Request, State
from kvferry.ids import RequestId, TransferId
from kvferry.layout.description import CacheGroup

__all__ = ["Scheduler"]

_MAX_SKIPPED = 32
"""The most waiting requests without room that are looked at in one step."""


class Scheduler:
    """The scheduler of one engine. Called on the engine's thread only; never blocks."""

    def __init__(
        self,
        blocks: BlockManager,
        specs: Sequence[CacheGroup],
        *,
        block_tokens: int,
        max_batch_tokens: int,
        max_running: int,
        prefix_caching: bool,
        lookahead: int = 0,
        trailing_dependency: int = 0,
        slots_ahead: int = 0,
        drafter_starts_cold: bool = False,
        overtake_s: float = 0.0,
        connector: SchedulerHalf | None = None,
    ) -> None:
        """`specs`: the cache groups of the whole model. `lookahead`: connector.lookahead.num_prefill_lookahead_tokens.
        `trailing_dependency`: how many tokens after a block influence its content (MTP). `slots_ahead`: how many slots
        after the last token a drafter writes to. `drafter_starts_cold`: KV from another engine has nothing for our
        drafter. `overtake_s`: how long a request without room may be overtaken."""
        self.blocks = blocks
        self.groups = Groups(
            specs,
            blocks,
            block_tokens=block_tokens,
            chunk_tokens=max_batch_tokens,
            prefix_caching=prefix_caching,
            extra_window_tokens=extra_window_tokens(lookahead, trailing_dependency),
            trailing_dependency=trailing_dependency,
        )
        self.holder = PrefixHolder(blocks, self.groups, block_tokens=block_tokens)
        """What is kept for engines that fetch from this one."""
        if connector is not None:
            connector.hold_prefixes(self.holder)
        self.block_tokens = block_tokens
        self.waiting: list[Request] = []
        self.waiting_for_kv: dict[RequestId, Request] = {}
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._prefix_caching = prefix_caching
        self.trailing_dependency = trailing_dependency
        self._slots_ahead = slots_ahead
        self._drafter_starts_cold = drafter_starts_cold
        self._overtaking = Overtaking(overtake_s, max_batch_tokens=max_batch_tokens)
        self._connector = connector

    def enter(self, request: Request) -> None:
        """Takes a new request. Decides, once, how much of its prompt is left for decode to compute (R33)."""
        if request.for_remote:
            request.num_deferred = self._num_deferred(request)
        self.enqueue(request)

    def _num_deferred(self, request: Request) -> int:
        """Returns how many prompt tokens prefill leaves for decode to compute (R32)."""
        num_prompt = request.num_prompt_tokens
        return 0 if self._connector is None else num_prompt - self._connector.handoff_tokens(num_prompt)

    def enqueue(self, request: Request) -> None:
        """Queues a request that is new or starts again, in order of arrival."""
        request.state = State.WAITING
        bisect.insort(self.waiting, request, key=lambda r: r.number)

    def run(self, request: Request) -> None:
        """Adds a request that has blocks to the running ones, in order of arrival."""
        request.state = State.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.number)

    def remove(self, request: Request) -> None:
        """Removes a request from its queue. It keeps its blocks. One that broke between two queues is in none."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self.waiting_for_kv.pop(request.request_id, None)

    def schedule(self, now_s: float, max_chunks: int | None = None) -> StepPlan:
        """Plans the next step. At most `max_chunks` running requests take part, and none that is in flight."""
        plan = StepPlan()
        for suspect in [r for r in (*self.running, *self.waiting) if r.suspect and not r.in_flight]:
            self._fill(plan, [suspect], now_s, None)
            if plan.chunks:
                break
        else:  # without the suspects that wait, for blocks or for a peer: others can go on
            self._fill(plan, [r for r in (*self.running, *self.waiting) if not r.suspect], now_s, max_chunks)
        plan.chunks.sort(key=lambda chunk: chunk.stop - chunk.start > 1)
        self.groups.settle(plan.changes)
        return plan

    @property
    def has_suspects(self) -> bool:
        """Whether a request has to run alone."""
        return any(request.suspect for request in (*self.running, *self.waiting))

    def _fill(self, plan: StepPlan, requests: Sequence[Request], now_s: float, max_chunks: int | None) -> None:
        """Plans chunks of these running and waiting requests, until the step's budget is used up."""
        budget = self._max_batch_tokens
        preempted = self.num_preemptions
        running = [r for r in requests if r.state is State.RUNNING and not r.in_flight]
        for decoding in (True, False):
            for request in [r for r in running if (r.num_uncomputed == 1) is decoding]:
                if max_chunks is not None and len(plan.chunks) >= max_chunks:
                    break
                count = min(request.num_uncomputed, budget)
                if count and request.state is State.RUNNING:
                    stop = self._cut(request, request.num_computed + count)
                    if self._grow(request, stop, plan):
                        budget -= self._add_chunk(plan, request, stop, budget)
        # A request that was preempted after it was scheduled must not run; and there is no room for new requests then.
        plan.chunks = [chunk for chunk in plan.chunks if chunk.request.state is State.RUNNING]
        if self.num_preemptions == preempted:
            self._admit(plan, [r for r in requests if r.state is State.WAITING], budget, now_s)

    def _add_chunk(self, plan: StepPlan, request: Request, stop: int, budget: int) -> int:
        """Adds a request's chunk, with as many drafts as fit, and returns its number of tokens."""
        self.groups.snapshot(request, plan.changes)
        start, drafts = request.num_computed, request.drafts if stop == len(request.tokens) else ()
        drafts = drafts[: max(0, budget - (stop - start))]
        if stop == len(request.tokens):
            wanted = stop + len(drafts) + self._slots_ahead
            room = self.groups.stretch(request, wanted, plan.changes)
            drafts = drafts[: max(0, room - stop)]
        if drafts and self.groups.has_state and not self.groups.save_state(request, plan.changes):
            drafts = ()
        chunk = ScheduledChunk(request, start, stop + len(drafts), drafts)
        plan.chunks.append(chunk)
        return chunk.stop - start

    def _cut(self, request: Request, stop: int) -> int:
        """Returns where a chunk that could reach `stop` ends.

        A prompt with recurrent states is cut where a snapshot can serve other requests: at the end of its last whole
        block, and at the end of a block wherever it is cut anyway.
        """
        if not (self.groups.has_state and self._prefix_caching) or request.num_uncomputed <= 1:
            return stop
        if request.num_computed >= request.num_prompt_tokens:
            return stop  # part of an answer, computed again after a rejected draft
        last = (request.num_target_tokens - (0 if request.num_deferred else 1)) // self.block_tokens * self.block_tokens
        if request.num_computed < last < stop:
            return last
        whole = stop // self.block_tokens * self.block_tokens
        return whole if request.num_computed < whole and stop < request.num_target_tokens else stop

    def _grow(self, request: Request, stop: int, plan: StepPlan) -> bool:
        """Allocates blocks for the tokens before `stop`, preempting newer requests if needed.

        Returns False if the request itself was preempted, or nothing can be.
        """
        missing = self.groups.trim(request, stop)
        while not self.blocks.fits((), missing):
            victim = next((r for r in reversed(self.running) if not r.handoff_open and not r.in_flight), None)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        self.groups.extend(request, stop, plan.changes)
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._start_again(request, "preempted: the cache was full")

    def suspect(self, request: Request, until: int) -> None:
        """Lets a running request of a step that failed start again, and run alone until `until` tokens are computed."""
        request.suspect_until = max(request.suspect_until, until)
        request.state_tokens = -1  # the step may have overwritten the states
        self._start_again(request, "computed again after a step that failed")

    def _start_again(self, request: Request, reason: str) -> None:
        request.num_preemptions += 1
        transfer = self._connector.preempted(request) if self._connector is not None else None
        self.running.remove(request)
        self.give_up_blocks(request, transfer)
        if request.stages.first_token_s is None:
            request.reason = request.reason or reason
        self.enqueue(request)

    def give_up_blocks(self, request: Request, transfer: TransferId | None) -> None:
        """Takes a request's blocks away. They are freed, or with a transfer stay as they are until that is released."""
        self.groups.keep_state(request)
        if transfer is None:
            for held in request.blocks:
                self.blocks.free(held.ids)
        else:
            self.blocks.hold(transfer, request.block_ids)
        request.start_over()

    def landed(self, request: Request) -> None:
        """Records that the tokens before `num_computed` came from another engine."""
        if self._drafter_starts_cold:
            request.draft_cache_start = -(-request.num_computed // self.block_tokens) * self.block_tokens
        self.remember(request)

    def remember(self, request: Request) -> None:
        """Enters the request's whole blocks, computed or landed, into the prefix cache."""
        if self._prefix_caching and request.blocks and not request.draft_cache_start:
            num_tokens = verified_tokens(request.num_computed, len(request.tokens), self.trailing_dependency)
            if num_tokens // self.block_tokens > request.num_remembered:
                chain_hashes(request.hashes, request.tokens, self.block_tokens, request.salt, request.prompt.packed)
                self.groups.remember(request, num_tokens)

    def _admit(self, plan: StepPlan, requests: Sequence[Request], budget: int, now_s: float) -> None:
        """Admits these waiting requests, oldest first. One without room may be overtaken (overtaking.py)."""
        num_skipped = 0
        for request in requests:
            if budget <= 0 or len(self.running) + len(self.waiting_for_kv) >= self._max_running:
                return
            if num_skipped >= _MAX_SKIPPED:
                return
            if not self._overtaking.may_pass(request):
                num_skipped += 1
                continue
            try:
                hit, match, remote_stop, counts = self._look_up(request)
            except Exception as error:  # noqa: BLE001  # nothing was allocated yet, so this request can end alone
                plan.broken.append((request, error))
                continue
            if match.error:
                plan.refused.append((request, match.error))
                continue
            if match.wait:
                continue
            num_missing = self.blocks.num_missing(hit.block_ids, sum(counts))
            if num_missing:
                self._take_back(num_missing)
                self._overtaking.no_room(request, num_missing, [*self.running, *self.waiting_for_kv.values()], now_s)
                num_skipped += 1
                continue
            self.waiting.remove(request)
            self._overtaking.admitted(request)
            self.groups.admit(request, hit, counts, remote_stop, plan.changes)
            try:
                self._start(request, match, remote_stop, plan)
            except Exception as error:  # noqa: BLE001  # its blocks are its own, and are freed when it ends
                plan.broken.append((request, error))
                continue
            if request.state is State.RUNNING and request.num_uncomputed > 0:
                stop = self._cut(request, request.num_computed + min(request.num_uncomputed, budget))
                if self._grow(request, stop, plan):
                    budget -= self._add_chunk(plan, request, stop, budget)

    def _take_back(self, num_blocks: int) -> None:
        """Gives up what is kept for other engines, so that a request of ours has room as soon as they have let go."""
        for transfer in self.holder.give_up(num_blocks):
            assert self._connector is not None, "only a connector holds prefixes"
            self._connector.withdraw(transfer, "the engine that holds it needs its blocks")

    def _look_up(self, request: Request) -> tuple[PrefixHit, Match, int | None, list[int]]:
        """Returns what the prefix cache has of a request, what the connector offers, up to which token KV is handed
        over (None: there is no hand-off), and how many fresh blocks each group needs."""
        hashes = request.hashes
        if self._prefix_caching:
            chain_hashes(hashes, request.tokens, self.block_tokens, request.salt, request.prompt.packed)
        hit, match, remote_stop = self._find(request, hashes)
        counts = self.groups.admission(hit, request.num_target_tokens, remote_stop)
        if hit.num_tokens and len(hit.block_ids) + sum(counts) > self.blocks.num_usable:
            # Besides its own blocks a request references the windows and states that it begins with. If the whole cache
            # has no room for both, the request computes them itself; else it would wait forever.
            hit, match, remote_stop = self._find(request, [])
            counts = self.groups.admission(hit, request.num_target_tokens, remote_stop)
        return hit, match, remote_stop, counts

    def _find(self, request: Request, hashes: Sequence[BlockHash]) -> tuple[PrefixHit, Match, int | None]:
        """Returns the first three of `_look_up`, if the prefix cache may be used for blocks with these hashes."""
        asks = self._connector is not None and request.takes_kv and not request.handoff_over
        # At least one token must be computed, to choose the next one from its logits; unless the other engine has
        # chosen that, or will.
        free = request.num_deferred or (asks and request.first_token is not None)
        usable = (
            hashes[: (request.num_target_tokens - (0 if free else 1)) // self.block_tokens]
            if self._prefix_caching
            else []
        )
        usable = self.groups.usable(usable)
        here = self.groups.find(usable)
        if not asks:
            return here, Match(), None
        hit, match = here, self._match(request, here)
        stop = here.num_tokens + match.num_tokens
        if match.num_tokens and not self.groups.all_full:
            # The other engine hands over states, and the windows at `stop`: more of our own blocks may be of use then.
            hit = self.groups.find_before(usable, stop)
            match = self._match(request, hit)
            assert hit.num_tokens + match.num_tokens == stop, f"the connector moved the end of a hand-off from {stop}"
        return hit, match, stop if match.num_tokens else None

    def _match(self, request: Request, hit: PrefixHit) -> Match:
        assert self._connector is not None, "only a request from another engine is matched"
        match = self._connector.match(request, hit.num_tokens)
        room = request.num_prompt_tokens - hit.num_tokens
        assert match.wait or 0 <= match.num_tokens <= max(0, room), f"matched {match.num_tokens} of {room} tokens"
        return match

    def _start(self, request: Request, match: Match, remote_stop: int | None, plan: StepPlan) -> None:
        request.sources.admitted(request.num_computed)
        asks = self._connector is not None and request.takes_kv and not request.handoff_over
        if asks and (match.num_tokens or not match.reason):
            assert self._connector is not None, "asks"
            tables = request.tables_at(request.num_computed if remote_stop is None else remote_stop)
            self._connector.after_alloc(request, tables, request.num_computed)
        if remote_stop is not None:
            request.state = State.WAITING_FOR_KV
            request.handoff_open = True
            request.remote_stop = remote_stop
            self.waiting_for_kv[request.request_id] = request
            return
        if asks:
            request.reason = match.reason
            if request.from_remote and request.num_uncomputed > 0 and not match.reason:
                request.reason = self.tail_reason(request) or (
                    f"prefill offered no token beyond the {request.num_computed} that were cached here"
                )
            if request.num_uncomputed <= 0:
                plan.adopted.append(request)
            request.handoff_over = True
        elif request.num_uncomputed <= 0:
            plan.complete.append(request)
        self.run(request)

    def tail_reason(self, request: Request) -> str:
        """Returns why decode computes only the last tokens of a prompt; empty if no rule makes it do so."""
        left = self._num_deferred(request)
        missing = request.num_prompt_tokens - request.num_computed
        if not 0 < missing <= left:
            return ""
        cause = "the model keeps a recurrent state" if self.groups.has_state else "the drafter reads ahead"
        return f"{cause}: prefill leaves the last {left} prompt token{'s' if left > 1 else ''} to decode"
