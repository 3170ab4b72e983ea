"""The scheduler half in vLLM's terms: it translates, and forwards to kvferry's scheduler half. It imports no vllm.

The states of a request here, in addition to those of connector.scheduler:
  prefill   TRACKED from its arrival; each computed chunk is offered, and a reference to its blocks is taken, so that
            they are not reused after a preemption while a peer reads them -> finished: vLLM forgets the request, and
            the references keep the blocks until `released` (vLLM would step all the time for a request that it holds)
  decode    matched -> allocated (WAITING_FOR_REMOTE_KVS) -> landed: finished_recving
            -> failed, policy recompute: its blocks are detached from it until `released`, and it starts again
            -> failed, policy fail: FAILING, the workers report it as failed, and vLLM ends it with an error; if vLLM
            brings it back (its own policy is to recompute: under MultiConnector each child has a policy), it is an
            ordinary request from then on. A request is reported as failed once, so no policy can make it loop.
Every end is reported to vLLM through the KVConnectorOutput of the step in which it becomes known.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connector.base import Failed, Landed, StepOrders, StepReport
from kvferry.connector.scheduler import HandoffScheduler
from kvferry.engines.vllm.describe.block_tables import GroupForm, tables_of
from kvferry.engines.vllm.scheduler_side.choices import Choices
from kvferry.engines.vllm.scheduler_side.prefix_hits import take_prefix_hits
from kvferry.engines.vllm.scheduler_side.request_params import VllmRequest, handoff_params, prompt_of
from kvferry.errors import RequestError
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import BlockTable
from kvferry.layout.description import CacheKind
from kvferry.settings import FailurePolicy, TransferMode
from kvferry.wire.params import HandoffParams

__all__ = ["Ended", "VllmScheduler"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """What the workers' reports amount to: the request ids to report to vLLM."""

    received: frozenset[str] = frozenset()
    sent: frozenset[str] = frozenset()
    landed: tuple[Landed, ...] = ()
    failed: tuple[Failed, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.received or self.sent or self.landed or self.failed)

    def __add__(self, other: "Ended") -> "Ended":
        return Ended(
            self.received | other.received,
            self.sent | other.sent,
            self.landed + other.landed,
            self.failed + other.failed,
        )


@dataclass(slots=True)
class _Tracked:
    """A request that is, or was meant to be, part of a hand-off."""

    view: VllmRequest
    request: Any
    cached: int | None = None
    """vLLM's own prefix hit at the last match, in tokens; None before the first answer to a match."""
    end: int = 0
    """Decode: the token at which the hand-off ends, by the last match."""
    offered: int = 0
    """Prefill: the number of tokens that were offered."""
    ordinary: bool = False
    """Decode: no hand-off is tried for it any more."""
    failure_counted: bool = False
    settled: bool = False
    """Decode: its KV is here, or nothing will come; other choices of its prompt need not wait for it."""
    referenced_blocks: list[Any] = field(default_factory=list)
    """Prefill: the blocks to which this connector holds a reference."""


class VllmScheduler:
    """One per engine, used on the engine's thread. Methods are named after the hooks that call them."""

    def __init__(
        self,
        half: HandoffScheduler,
        forms: Sequence[GroupForm],
        *,
        engine_id: str,
        mode: TransferMode,
        policy: FailurePolicy,
        backoff: int,
        progress: bool,
        group_ids: Sequence[int],
    ) -> None:
        """`backoff` is the result of engine_facts.backoff_tokens; `group_ids` names vLLM's groups that are handed
        over.
        """
        self._half = half
        self._forms = tuple(forms)
        self._engine_id = engine_id
        self._mode = mode
        self._policy = policy
        self._backoff = backoff
        self._progress = progress
        self._group_ids = tuple(group_ids)
        self._manager: Any = None
        self._tracked: dict[str, _Tracked] = {}
        self._choices = Choices()
        self._standing_back: set[str] = set()
        """Decode: choices that wait until their prompt's KV has come for another one."""
        self._held: dict[TransferId, str] = {}
        self._detached_blocks: dict[TransferId, list[Any]] = {}
        """Blocks that were taken from their request before the peer was done with them."""
        self._failing: set[str] = set()
        self._failures_to_report: set[str] = set()
        self._reported_failing: set[str] = set()
        """Requests of `_failing` that were reported to vLLM, or are about to be."""
        self._num_unstarted_failures = 0

    def bind(self, manager: Any) -> None:
        """Receives vLLM's KVCacheManager."""
        self._manager = manager

    # ---- arrival and matching

    def on_new_request(self, request: Any) -> None:
        """Registers a request. Never raises, because its parameters come from a client."""
        raw = request.kv_transfer_params
        if not raw:
            return
        request_id = str(request.request_id)
        try:
            params = handoff_params(raw, engine_id=self._engine_id, request_id=request_id, mode=self._mode)
        except RequestError as error:
            logger.warning("hand-off not understood request=%s cause=%s", request_id, error)
            self._refuse(request, str(error))
            return
        if params is None or not (params.do_remote_decode or params.do_remote_prefill):
            return
        another_carries_it = self._choices.arrived(request_id) is not None  # another choice of the same prompt
        prompt = None if another_carries_it else prompt_of(request)
        if params.do_remote_decode:
            self._truncate(request)
        if prompt is None:
            return
        tokens = request.num_prompt_tokens
        if params.do_remote_prefill and tokens > self._backoff:
            tokens -= self._backoff
        view = VllmRequest(RequestId(request_id), tokens, params, prompt)
        self._tracked[request_id] = _Tracked(view, request)
        self._half.on_new_request(view)

    def _refuse(self, request: Any, reason: str) -> None:
        """No KV can come for this request: by policy it fails, or is served as an ordinary request."""
        raw = request.kv_transfer_params
        if not isinstance(raw, dict) or not raw.get("do_remote_prefill"):
            return
        self._num_unstarted_failures += 1
        if self._policy is FailurePolicy.FAIL:
            self._fail_request(str(request.request_id), reason)

    def _truncate(self, request: Any) -> None:
        """Leaves the end of the prompt to decode (R32, R33). Called once per request, when it arrives."""
        backoff = self._backoff
        if not backoff or request.num_prompt_tokens <= backoff or request.get_skip_reading_prefix_cache():
            return
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-backoff:]
        elif request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-backoff]
        else:
            return
        del request._all_token_ids[-backoff:]
        request.num_prompt_tokens -= backoff
        request.max_tokens = 1

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns (number of tokens, whether they arrive asynchronously), or (None, False) to be asked again next
        step.
        """
        request_id = str(request.request_id)
        if request_id in self._reported_failing:
            self._recover(request_id, "vLLM's own kv_load_failure_policy is to recompute")
        if request_id in self._failing:
            return request.num_tokens - num_computed_tokens, True
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.ordinary:
            return (None, False) if self._stands_back(request) else (0, False)
        match = self._half.match(tracked.view, num_computed_tokens)
        if match.wait:
            return None, False
        tracked.settled = match.num_tokens == 0
        tracked.cached, tracked.end = num_computed_tokens, num_computed_tokens + match.num_tokens
        if match.error or match.reason:
            self._count_failure(tracked)
        if match.error:
            self._fail_request(request_id, match.error)
            return request.num_tokens - num_computed_tokens, True
        if match.reason:
            tracked.ordinary = True
            logger.info("prompt is computed here request=%s cause=%s", request_id, match.reason)
        return match.num_tokens, match.num_tokens > 0

    def _count_failure(self, tracked: _Tracked) -> None:
        """Counts a hand-off that has failed before it had blocks."""
        self._num_unstarted_failures += not tracked.failure_counted
        tracked.failure_counted = True

    def take_num_unstarted_failures(self) -> int:
        """Returns how many hand-offs have failed before they had blocks, since the last call."""
        number, self._num_unstarted_failures = self._num_unstarted_failures, 0
        return number

    def _recover(self, request_id: str, reason: str) -> None:
        """A request that was to fail goes on as an ordinary one."""
        self._failing.discard(request_id)
        self._reported_failing.discard(request_id)
        if (tracked := self._tracked.get(request_id)) is not None:
            tracked.ordinary = True
        logger.info("prompt is computed here request=%s cause=%s", request_id, reason)

    def _stands_back(self, request: Any) -> bool:
        """Whether a request waits because its prompt's KV is about to come for another choice, and can be shared."""
        request_id = str(request.request_id)
        carrier = self._tracked.get(self._choices.carrier_of(request_id) or "")
        waits = carrier is not None and not carrier.settled and self._manager.prefix_cache_lookup_enabled(request)
        (self._standing_back.add if waits else self._standing_back.discard)(request_id)
        return waits

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Starts the hand-off into the blocks that were just allocated, if any token is to come."""
        request_id = str(request.request_id)
        if request_id in self._failing:
            if num_external_tokens:
                self._report_failing(request_id)
            else:  # a child of MultiConnector that was not chosen: another one brings the prompt's KV
                self._recover(request_id, "another connector has its KV")
            return
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.view.handoff is None or not tracked.view.handoff.do_remote_prefill:
            return
        if tracked.cached is None:
            # vLLM did not wait for the match (it computes prompt logprobs itself), so nothing is to come.
            self._half.request_finished(tracked.view, (), 0, first_token=None, aborted=True)
            tracked.view, tracked.settled = tracked.view.without_handoff(), True
            return
        cached = tracked.cached if num_external_tokens else tracked.view.num_prompt_tokens
        tables = self._tables(blocks.get_block_ids(), tracked.end)
        if num_external_tokens and (begin := self._use_prefix_hits(request, tables, cached)) > cached:
            cached = begin
            tables = self._tables(self._manager.get_blocks(request_id).get_block_ids(), tracked.end)
        self._half.after_alloc(tracked.view, tables, cached)

    def _use_prefix_hits(self, request: Any, tables: Sequence[BlockTable], cached: int) -> int:
        """Uses what decode already has of the prompt (R30) in a model with windows.

        In a model with recurrent states no hit reaches further than its states, so nothing is gained there.
        """
        kinds = [form.kind for form in self._forms]
        if CacheKind.WINDOW not in kinds or CacheKind.STATE in kinds:
            return cached
        windows = {
            self._group_ids[table.group]: table.first_token
            for table in tables
            if kinds[table.group] is CacheKind.WINDOW
        }
        return take_prefix_hits(self._manager, request, self._full_groups(), windows, cached)

    def _tables(self, block_ids: Sequence[Sequence[int]], num_tokens: int, only: CacheKind | None = None) -> Any:
        return tables_of(self._forms, [block_ids[index] for index in self._group_ids], num_tokens, only=only)

    # ---- prefill

    def prepare(self, preempted: Iterable[str]) -> None:
        """Prepares a step: withdraws what it preempts, and offers what earlier steps have stored."""
        for request_id in preempted:
            self._preempted(request_id)
        if self._progress:
            for tracked in self._tracked.values():
                self._offer(tracked)

    def take_orders(self) -> StepOrders:
        """Returns the orders that have accumulated since the last call."""
        return self._half.build_orders()

    def build_orders(self) -> tuple[StepOrders, frozenset[str]]:
        """Returns the orders of this step, and the requests that the workers must report as failed."""
        failing, self._failures_to_report = frozenset(self._failures_to_report), set()
        return self.take_orders(), failing

    def _offer(self, tracked: _Tracked) -> None:
        """Offers what earlier steps have stored of a prompt that is not completely computed yet."""
        handoff, request = tracked.view.handoff, tracked.request
        if handoff is None or not handoff.do_remote_decode:
            return
        stored = request.num_computed_tokens - request.num_in_flight_tokens
        # A step in flight, of another request, may still be writing the blocks of a prefix hit: it has ended once a
        # step of this request has.
        if not max(tracked.offered, tracked.cached or 0) < stored < request.num_prompt_tokens:
            return
        self._reference(tracked, self._full_groups())
        tracked.offered = stored
        blocks = self._manager.get_blocks(request.request_id)
        self._half.computed(tracked.view, self._tables(blocks.get_block_ids(), stored, CacheKind.FULL), stored)

    def _reference(self, tracked: _Tracked, groups: Iterable[int]) -> None:
        """Takes a reference to each block of these groups to which none is held yet."""
        blocks = self._manager.get_blocks(tracked.request.request_id).blocks
        known = {id(block) for block in tracked.referenced_blocks}
        fresh = [block for index in groups for block in blocks[index] if id(block) not in known]
        self._manager.block_pool.touch(fresh)
        tracked.referenced_blocks.extend(fresh)

    def _full_groups(self) -> list[int]:
        """Returns vLLM's indices of the groups that keep every token, and so can be handed over chunk by chunk."""
        return [index for index, form in zip(self._group_ids, self._forms, strict=True) if form.kind is CacheKind.FULL]

    def _preempted(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.offered:
            return
        transfer = self._half.preempted(tracked.view)
        self._drop_references(tracked, transfer)
        tracked.offered = 0

    def _drop_references(self, tracked: _Tracked, transfer: TransferId | None) -> None:
        """Gives up the references to blocks: now, or when `transfer` is released."""
        blocks, tracked.referenced_blocks = tracked.referenced_blocks, []
        if transfer is None:
            self._free(blocks)
        elif blocks:
            self._detached_blocks.setdefault(transfer, []).extend(blocks)

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], *, well: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request; `well` says that it ended as asked.

        Returns whether vLLM must keep the blocks until the id is reported, and the parameters for the client.
        """
        request_id = str(request.request_id)
        self._failing.discard(request_id)
        self._reported_failing.discard(request_id)
        self._standing_back.discard(request_id)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return False, self._choices.returned_for(request_id) if well else None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        tables = self._tables(block_ids, num_tokens) if any(block_ids) else ()
        aborted = not well or not num_tokens
        transfer, params = self._half.request_finished(
            tracked.view, tables, num_tokens, first_token=None, aborted=aborted
        )
        handoff = tracked.view.handoff
        if transfer is not None and handoff is not None and handoff.do_remote_decode:
            self._reference(tracked, range(len(self._manager.get_blocks(request_id).blocks)))
            self._drop_references(tracked, transfer)
            returned = _client_params(params)
            self._choices.carrier_returned(request_id, returned)
            return False, returned
        self._drop_references(tracked, None)
        if transfer is None:
            return False, None
        self._held[transfer] = request_id  # decode: the request waits for its KV, so vLLM keeps its blocks anyway
        return True, _client_params(params)

    # ---- what the workers report

    def update(self, reports: Sequence[StepReport]) -> Ended:
        """Joins the ranks' reports, and returns what must be reported to vLLM."""
        outcome = self._half.update(reports)
        received: set[str] = set()
        sent: set[str] = set()
        for landed in outcome.landed:
            received.add(landed.request)
            self._resume_after(landed)
            self._settle(landed.request)
            logger.debug(
                "hand-off landed request=%s transfer=%s tokens=%d bytes=%d runs=%d ms=%.1f",
                landed.request,
                landed.transfer,
                len(landed.arrived),
                landed.num_bytes,
                landed.num_runs,
                1e3 * landed.transfer_s,
            )
        for failed in outcome.failed:
            if self._take_blocks(failed):
                self._tracked[failed.request].request.num_computed_tokens = 0
                received.add(failed.request)
        for failed in outcome.fatal:
            if self._take_blocks(failed):
                self._fail_request(failed.request, failed.reason)
                self._report_failing(failed.request)
        for transfer in outcome.released:
            request_id = self._held.pop(transfer, None)
            if request_id is not None:
                sent.add(request_id)
            self._free(self._detached_blocks.pop(transfer, []))
        return Ended(frozenset(received), frozenset(sent), outcome.landed, (*outcome.failed, *outcome.fatal))

    def _settle(self, request_id: str) -> None:
        if (tracked := self._tracked.get(request_id)) is not None:
            tracked.settled = True

    def _resume_after(self, landed: Landed) -> None:
        """Lets vLLM compute what was matched and not handed over: prefill's prompt was another one, or shorter (R51).

        Windows and states are those at the end of the match. Without that end they are of no use, so all is computed.
        """
        tracked = self._tracked.get(landed.request)
        if tracked is None or landed.arrived.stop >= tracked.end:
            return
        logger.warning(
            "hand-off is shorter than matched request=%s transfer=%s tokens=%d matched=%d cause=%s",
            landed.request,
            landed.transfer,
            landed.arrived.stop,
            tracked.end,
            landed.difference or "prefill had no more",
        )
        if all(form.kind is CacheKind.FULL for form in self._forms):
            tracked.request.num_computed_tokens = landed.arrived.stop
        else:
            self._free(self._manager.pop_blocks_for_free(tracked.request))  # they are ours again: it has landed
            tracked.request.num_computed_tokens = 0

    def _take_blocks(self, failed: Failed) -> bool:
        """R28: a peer may still write into them, so they must not be freed with the request."""
        self._settle(failed.request)
        tracked = self._tracked.get(failed.request)
        if tracked is None:
            return False
        tracked.failure_counted = True
        logger.warning(
            "hand-off failed request=%s transfer=%s policy=%s cause=%s",
            failed.request,
            failed.transfer,
            self._policy,
            failed.reason,
        )
        self._detached_blocks.setdefault(failed.transfer, []).extend(self._manager.pop_blocks_for_free(tracked.request))
        return True

    def _fail_request(self, request_id: str, reason: str) -> None:
        if request_id not in self._failing:
            logger.warning("request fails, by kv_load_failure_policy request=%s cause=%s", request_id, reason)
        self._failing.add(request_id)

    def _report_failing(self, request_id: str) -> None:
        self._failures_to_report.add(request_id)
        self._reported_failing.add(request_id)

    def _free(self, blocks: list[Any]) -> None:
        if blocks:
            self._manager.block_pool.free_blocks(reversed(blocks))

    @property
    def has_orders(self) -> bool:
        """Whether there are orders that the workers have not received."""
        return self._half.has_orders or bool(self._failures_to_report)

    @property
    def num_receiving(self) -> int:
        """The number of requests that wait for their KV."""
        return self._half.num_receiving

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for KV: their own, or that of another choice of their prompt."""
        return self.num_receiving + len(self._standing_back)

    def has_pending_work(self) -> bool:
        """Whether a hand-off is open, or blocks are still to come back."""
        return self._half.has_pending_work() or bool(self._detached_blocks) or bool(self._failures_to_report)

    @property
    def num_held(self) -> int:
        """The number of requests whose blocks are kept for a peer."""
        return len(self._held)


def _client_params(params: HandoffParams | None) -> dict[str, Any] | None:
    """Returns the parameters for the client or the router, without empty fields."""
    if params is None:
        return None
    return {key: value for key, value in params.to_dict().items() if value is not None}
