"""The scheduler half in vLLM's words: translates, and forwards to kvferry's. No vllm is imported.

What a request passes here, beside connector.scheduler:
  prefill   TRACKED from its arrival; each computed chunk is offered, its blocks held by a reference of ours, so that a
            preemption gives them to nobody while a peer reads -> finished: vLLM forgets the request, and the blocks
            stay HELD by our references until `released` (a request that vLLM holds for us has it step all the time)
  decode    matched -> allocated (WAITING_FOR_REMOTE_KVS) -> landed: finished_recving
            -> failed, policy recompute: its blocks are taken out of its hands until `released`, and it starts afresh
            -> failed, policy fail: DOOMED, the workers report it as failed, vLLM ends it with an error
Everything that ends is told to vLLM through the KVConnectorOutput of the step in which we learn of it.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connector.base import Failed, Landed, StepOrders, StepReport
from kvferry.connector.scheduler import HandoffScheduler
from kvferry.engines.vllm.describe.block_tables import GroupForm, tables_of
from kvferry.engines.vllm.scheduler_side.prefix_hits import take_known_blocks
from kvferry.engines.vllm.scheduler_side.request_params import VllmRequest, handoff_params
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
    """What reports came to: the ids to report to vLLM."""

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
    """A request that is part of a hand-off, or was to be."""

    view: VllmRequest
    request: Any
    cached: int | None = None
    """Decode: vLLM's own prefix hit at the last match; None: no answer was given yet."""
    end: int = 0
    """Decode: where the hand-off ends, by the last match."""
    offered: int = 0
    """Prefill: tokens that were offered."""
    touched: list[Any] = field(default_factory=list)
    """Prefill: blocks that carry a reference of ours."""


class VllmScheduler:
    """One an engine; on the engine's thread. Methods are named after the hooks that call them."""

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
        """`backoff`: see facts.backoff_tokens. `group_ids`: which of vLLM's groups are handed over."""
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
        self._held: dict[TransferId, str] = {}
        self._loose: dict[TransferId, list[Any]] = {}
        """Blocks that left their request before the peer was done with them."""
        self._doomed: set[str] = set()
        self._tell_doomed: set[str] = set()

    def bind(self, manager: Any) -> None:
        """vLLM's KVCacheManager."""
        self._manager = manager

    # ---- arrival and matching

    def on_new_request(self, request: Any) -> None:
        """Never raises: parameters come from a client."""
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
        if params.do_remote_decode:
            self._truncate(request)
        tokens = request.num_prompt_tokens
        if params.do_remote_prefill and tokens > self._backoff:
            tokens -= self._backoff
        view = VllmRequest(RequestId(request_id), tokens, params)
        self._tracked[request_id] = _Tracked(view, request)
        self._half.on_new_request(view)

    def _refuse(self, request: Any, reason: str) -> None:
        """Nothing can come for it: by policy it ends, or is an ordinary request."""
        raw = request.kv_transfer_params
        if self._policy is FailurePolicy.FAIL and isinstance(raw, dict) and raw.get("do_remote_prefill"):
            self._doom(str(request.request_id), reason)

    def _truncate(self, request: Any) -> None:
        """R32, R33: prefill leaves the end of the prompt to decode. Once a request: it arrives once."""
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
        """(tokens, asynchronously), or (None, False): ask again at the next step."""
        request_id = str(request.request_id)
        if request_id in self._doomed:
            return request.num_tokens - num_computed_tokens, True
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return 0, False
        match = self._half.match(tracked.view, num_computed_tokens)
        if match.wait:
            return None, False
        tracked.cached, tracked.end = num_computed_tokens, num_computed_tokens + match.num_tokens
        if match.error:
            self._doom(request_id, match.error)
            return request.num_tokens - num_computed_tokens, True
        if match.reason:
            logger.info("prompt is computed here request=%s cause=%s", request_id, match.reason)
        return match.num_tokens, match.num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there, and the request waits in them, if any token is to come."""
        request_id = str(request.request_id)
        if request_id in self._doomed:
            self._tell_doomed.add(request_id)
            return
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.view.handoff is None or not tracked.view.handoff.do_remote_prefill:
            return
        if tracked.cached is None:
            # vLLM did not wait for our answer (it computes prompt logprobs itself): nothing is to come.
            self._half.request_finished(tracked.view, (), 0, first_token=None, aborted=True)
            tracked.view = tracked.view.without_handoff()
            return
        cached = tracked.cached if num_external_tokens else tracked.view.num_prompt_tokens
        tables = self._tables(blocks.get_block_ids(), tracked.end)
        if num_external_tokens and (begin := self._know(request, tables, cached)) > cached:
            cached = begin
            tables = self._tables(self._manager.get_blocks(request_id).get_block_ids(), tracked.end)
        self._half.after_alloc(tracked.view, tables, cached)

    def _know(self, request: Any, tables: Sequence[BlockTable], cached: int) -> int:
        """R30, for a model with windows; one with states has no hit that reaches further than its states."""
        kinds = [form.kind for form in self._forms]
        if CacheKind.WINDOW not in kinds or CacheKind.STATE in kinds:
            return cached
        windows = {
            self._group_ids[table.group]: table.first_token
            for table in tables
            if kinds[table.group] is CacheKind.WINDOW
        }
        return take_known_blocks(self._manager, request, self._full_groups(), windows, cached)

    def _tables(self, block_ids: Sequence[Sequence[int]], num_tokens: int, only: CacheKind | None = None) -> Any:
        return tables_of(self._forms, [block_ids[index] for index in self._group_ids], num_tokens, only=only)

    # ---- prefill

    def prepare(self, preempted: Iterable[str]) -> None:
        """A step is being made: what it preempts is withdrawn, and what earlier ones have stored is offered."""
        for request_id in preempted:
            self._preempted(request_id)
        if self._progress:
            for tracked in self._tracked.values():
                self._offer(tracked)

    def take_orders(self) -> StepOrders:
        """What the workers have to learn, since the last call."""
        return self._half.build_orders()

    def build_orders(self) -> tuple[StepOrders, frozenset[str]]:
        """The orders of this step, and the requests that the workers are to report as failed."""
        doomed, self._tell_doomed = frozenset(self._tell_doomed), set()
        return self.take_orders(), doomed

    def _offer(self, tracked: _Tracked) -> None:
        """What earlier steps have stored of a prompt that is not computed whole yet."""
        handoff, request = tracked.view.handoff, tracked.request
        if handoff is None or not handoff.do_remote_decode:
            return
        stored = request.num_computed_tokens - request.num_in_flight_tokens
        if not tracked.offered < stored < request.num_prompt_tokens:
            return
        self._touch(tracked, self._full_groups())
        tracked.offered = stored
        blocks = self._manager.get_blocks(request.request_id)
        self._half.computed(tracked.view, self._tables(blocks.get_block_ids(), stored, CacheKind.FULL), stored)

    def _touch(self, tracked: _Tracked, groups: Iterable[int]) -> None:
        """A reference of ours to each block of these groups that has none."""
        blocks = self._manager.get_blocks(tracked.request.request_id).blocks
        known = {id(block) for block in tracked.touched}
        fresh = [block for index in groups for block in blocks[index] if id(block) not in known]
        self._manager.block_pool.touch(fresh)
        tracked.touched.extend(fresh)

    def _full_groups(self) -> list[int]:
        """vLLM's indices of the groups that keep every token, and so can be handed over chunk by chunk."""
        return [index for index, form in zip(self._group_ids, self._forms, strict=True) if form.kind is CacheKind.FULL]

    def _preempted(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.offered:
            return
        transfer = self._half.preempted(tracked.view)
        self._let_go(tracked, transfer)
        tracked.offered = 0

    def _let_go(self, tracked: _Tracked, transfer: TransferId | None) -> None:
        """Give up our references: now, or when `transfer` is released."""
        blocks, tracked.touched = tracked.touched, []
        if transfer is None:
            self._free(blocks)
        elif blocks:
            self._loose.setdefault(transfer, []).extend(blocks)

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], *, well: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """`well`: it ended as asked. (keep the blocks until we report the id, what the client gets)."""
        request_id = str(request.request_id)
        self._doomed.discard(request_id)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return False, None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        tables = self._tables(block_ids, num_tokens) if any(block_ids) else ()
        aborted = not well or not num_tokens
        transfer, params = self._half.request_finished(
            tracked.view, tables, num_tokens, first_token=None, aborted=aborted
        )
        handoff = tracked.view.handoff
        if transfer is not None and handoff is not None and handoff.do_remote_decode:
            self._touch(tracked, range(len(self._manager.get_blocks(request_id).blocks)))
            self._let_go(tracked, transfer)
            return False, _told(params)
        self._let_go(tracked, None)
        if transfer is None:
            return False, None
        self._held[transfer] = request_id  # decode: the request waits for its KV, so vLLM keeps its blocks anyway
        return True, _told(params)

    # ---- what the workers report

    def update(self, reports: Sequence[StepReport]) -> Ended:
        """Join the ranks' reports. Afterwards, tell vLLM what came of them."""
        outcome = self._half.update(reports)
        received: set[str] = set()
        sent: set[str] = set()
        for landed in outcome.landed:
            received.add(landed.request)
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
                self._doom(failed.request, failed.reason)
                self._tell_doomed.add(failed.request)
        for transfer in outcome.released:
            request_id = self._held.pop(transfer, None)
            if request_id is not None:
                sent.add(request_id)
            self._free(self._loose.pop(transfer, []))
        return Ended(frozenset(received), frozenset(sent), outcome.landed, (*outcome.failed, *outcome.fatal))

    def _take_blocks(self, failed: Failed) -> bool:
        """R28: a peer may still write into them, so they must not be freed with the request."""
        tracked = self._tracked.get(failed.request)
        if tracked is None:
            return False
        logger.warning(
            "hand-off failed request=%s transfer=%s policy=%s cause=%s",
            failed.request,
            failed.transfer,
            self._policy,
            failed.reason,
        )
        self._loose.setdefault(failed.transfer, []).extend(self._manager.pop_blocks_for_free(tracked.request))
        return True

    def _doom(self, request_id: str, reason: str) -> None:
        if request_id not in self._doomed:
            logger.warning("request fails, by kv_load_failure_policy request=%s cause=%s", request_id, reason)
        self._doomed.add(request_id)

    def _free(self, blocks: list[Any]) -> None:
        if blocks:
            self._manager.block_pool.free_blocks(reversed(blocks))

    @property
    def has_orders(self) -> bool:
        """The workers have something to learn."""
        return self._half.has_orders or bool(self._tell_doomed)

    @property
    def num_receiving(self) -> int:
        """Requests that wait for their KV, and of which nothing else is known yet."""
        return self._half.num_receiving

    def has_pending_work(self) -> bool:
        """Something is open: a hand-off, or blocks that come back."""
        return self._half.has_pending_work() or bool(self._loose) or bool(self._tell_doomed)

    @property
    def num_held(self) -> int:
        """Requests whose blocks are kept for a peer."""
        return len(self._held)


def _told(params: HandoffParams | None) -> dict[str, Any] | None:
    """What the client, or the router, gets; nothing that says nothing."""
    if params is None:
        return None
    return {key: value for key, value in params.to_dict().items() if value is not None}
