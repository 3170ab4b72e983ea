"""Which requests run in the next step, and with which blocks. Decides; computes nothing.

Life of a request:

1. WAITING         in the queue, oldest first, with no blocks. `admit` moves it on when its whole prompt has blocks.
2. WAITING_FOR_KV  decode only: its prompt's KV is coming from another engine into its blocks. The engine moves it on:
                   landed -> RUNNING; failed -> WAITING, and this time it computes its prompt itself.
3. RUNNING         has a share of every step: a piece of its prompt, or its next token. When blocks run out, the newest
                   one goes back to WAITING and computes everything again (`_preempt`).
4. FINISHED        by its last token, an abort or an error, from any state. The engine ends it: see engine.py.

Decoding requests come first in a step, then pieces of prompts, oldest first, until the step's tokens are used up.
"""

import bisect
from dataclasses import dataclass, field

from kvferry.connector.base import Match, SchedulerHalf
from kvferry.engines.mini.blocks import BlockManager, chain_hashes
from kvferry.engines.mini.request import Request, State
from kvferry.ids import RequestId, TransferId

__all__ = ["Scheduler", "Share", "StepPlan"]


@dataclass(frozen=True, slots=True)
class Share:
    """Compute tokens [start, stop) of a request."""

    request: Request
    start: int
    stop: int

    @property
    def token_ids(self) -> list[int]:
        """Those tokens."""
        return self.request.tokens[self.start : self.stop]

    @property
    def block_ids(self) -> list[int]:
        """Blocks of the request from its first token on."""
        return self.request.block_ids

    @property
    def wants_logits(self) -> bool:
        """Whether the next token can be chosen after it."""
        return self.stop == len(self.request.tokens)


@dataclass(slots=True)
class StepPlan:
    """What one step does."""

    shares: list[Share] = field(default_factory=list)
    """Decoding requests, a token each, then pieces of prompts."""
    fresh_blocks: list[int] = field(default_factory=list)
    """To be cleared before anybody writes to them."""
    adopted: list[Request] = field(default_factory=list)
    """Their whole prompt was in our prefix cache and the other engine chose the first token: nothing to compute."""
    refused: list[tuple[Request, str]] = field(default_factory=list)
    """The connector ended these, with a message for the client."""


class Scheduler:
    """Called on the engine's thread only. Never blocks."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        block_tokens: int,
        max_batch_tokens: int,
        max_running: int,
        prefix_caching: bool,
        connector: SchedulerHalf | None = None,
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.waiting: list[Request] = []
        self.waiting_for_kv: dict[RequestId, Request] = {}
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._prefix_caching = prefix_caching
        self._connector = connector

    def enqueue(self, request: Request) -> None:
        """A new request, or one that has to start again: by its arrival."""
        request.state = State.WAITING
        bisect.insort(self.waiting, request, key=lambda r: r.number)

    def run(self, request: Request) -> None:
        """A request with blocks joins the running ones, by its arrival."""
        request.state = State.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.number)

    def remove(self, request: Request) -> None:
        """Out of whichever queue it is in. Its blocks stay its own."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.WAITING_FOR_KV:
            del self.waiting_for_kv[request.request_id]
        elif request.state is State.RUNNING:
            self.running.remove(request)

    def schedule(self) -> StepPlan:
        """Plan the next step."""
        plan = StepPlan()
        budget = self._max_batch_tokens
        preempted = self.num_preemptions
        for decoding in (True, False):
            for request in [r for r in self.running if (r.num_missing == 1) is decoding]:
                count = min(request.num_missing, budget)
                if count and request.state is State.RUNNING and self._grow(request, count, plan):
                    plan.shares.append(Share(request, request.num_computed, request.num_computed + count))
                    budget -= count
        # A request preempted after its turn must not run; nor is there room for new ones then.
        plan.shares = [share for share in plan.shares if share.request.state is State.RUNNING]
        if self.num_preemptions == preempted:
            self._admit(plan, budget)
        plan.shares.sort(key=lambda share: share.stop - share.start > 1)
        return plan

    def _grow(self, request: Request, count: int, plan: StepPlan) -> bool:
        """Blocks for `count` more tokens, if need be from newer requests. False: the request had to go itself."""
        missing = self._num_blocks(request.num_computed + count) - len(request.block_ids)
        while missing > 0 and not self.blocks.fits((), missing):
            victim = next((r for r in reversed(self.running) if not r.handoff_open), None)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        if missing > 0:
            fresh = self.blocks.allocate(missing, after=request.block_ids[-1] if request.block_ids else None)
            request.block_ids += fresh
            plan.fresh_blocks += fresh
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        request.num_preemptions += 1
        transfer = self._connector.preempted(request) if self._connector is not None else None
        self.running.remove(request)
        self.give_up_blocks(request, transfer)
        request.why = request.why or "preempted: the cache was full"
        self.enqueue(request)

    def give_up_blocks(self, request: Request, transfer: TransferId | None) -> None:
        """The request lets go of its blocks; they are free, or stay as they are until the transfer is released."""
        if transfer is None:
            self.blocks.free(request.block_ids)
        else:
            self.blocks.hold(transfer, request.block_ids)
        request.block_ids = []
        request.num_computed = request.num_remembered = 0

    def _admit(self, plan: StepPlan, budget: int) -> None:
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) + len(self.waiting_for_kv) >= self._max_running:
                return
            known = self._find_known(request)
            num_known = len(known) * self.block_tokens
            match = self._match(request, min(num_known, len(request.tokens)))
            if match.error:
                plan.refused.append((request, match.error))
                continue
            if match.wait:
                continue
            num_fresh = self._num_blocks(len(request.tokens)) - len(known)
            if not self.blocks.fits(known, num_fresh):
                return  # nobody overtakes a request for which there is no room
            self.waiting.remove(request)
            self._start(request, known, num_fresh, match, plan)
            if request.state is State.RUNNING and request.num_missing:
                count = min(request.num_missing, budget)
                plan.shares.append(Share(request, request.num_computed, request.num_computed + count))
                budget -= count

    def _find_known(self, request: Request) -> list[int]:
        if not self._prefix_caching:
            return []
        chain_hashes(request.hashes, request.tokens, self.block_tokens)
        # At least one token has to be computed, for there is nothing else to choose the next one from;
        # unless the other engine has chosen it.
        limit = len(request.tokens) - (0 if self._may_adopt(request) else 1)
        return self.blocks.find(request.hashes[: limit // self.block_tokens])

    @staticmethod
    def _may_adopt(request: Request) -> bool:
        return request.from_remote and not request.handoff_over and request.first_token is not None

    def _match(self, request: Request, num_known: int) -> Match:
        if self._connector is None or not request.from_remote or request.handoff_over:
            return Match()
        match = self._connector.match(request, num_known)
        room = request.num_prompt_tokens - num_known
        assert match.wait or 0 <= match.num_tokens <= room, f"connector matched {match.num_tokens} of {room} tokens"
        return match

    def _start(self, request: Request, known: list[int], num_fresh: int, match: Match, plan: StepPlan) -> None:
        self.blocks.take(known)
        fresh = self.blocks.allocate(num_fresh)
        plan.fresh_blocks += fresh
        request.block_ids = known + fresh
        request.num_remembered = len(known)
        request.num_computed = min(len(known) * self.block_tokens, len(request.tokens))
        self._account(request, min(request.num_computed, request.num_prompt_tokens))
        asks = self._connector is not None and request.from_remote and not request.handoff_over
        if asks and (match.num_tokens or not match.reason):
            assert self._connector is not None, "asks"
            self._connector.after_alloc(request, request.tables, request.num_cached)
        if match.num_tokens:
            request.state = State.WAITING_FOR_KV
            request.handoff_open = True
            self.waiting_for_kv[request.request_id] = request
            return
        if asks:
            request.why = match.reason
            if request.num_missing and not match.reason:
                request.why = f"prefill offered no token beyond the {request.num_cached} that were cached here"
            if request.num_missing == 0:
                plan.adopted.append(request)
            request.handoff_over = True
        self.run(request)

    @staticmethod
    def _account(request: Request, num_known: int) -> None:
        """Where prompt tokens came from. After a preemption, what is still known keeps the name it had."""
        if request.num_preemptions:
            request.num_handed_over = min(request.num_handed_over, max(0, num_known - request.num_cached))
            request.num_cached = min(request.num_cached, num_known)
        else:
            request.num_cached, request.num_handed_over = num_known, 0

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)
