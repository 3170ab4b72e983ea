"""Applies the results of hand-offs to decode requests: a request continues after what arrived, or starts again."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvferry.clock import Clock
from kvferry.connector.base import Failed, Landed, Outcome
from kvferry.engines.mini.scheduling.request import Request, State
from kvferry.engines.mini.scheduling.scheduler import Scheduler
from kvferry.errors import MalformedMessage
from kvferry.ids import RequestId
from kvferry.stats import HandoffTiming
from kvferry.wire.first_token import FirstToken, decode_first_token

__all__ = ["FollowUp", "HandoffResults"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FollowUp:
    """What the engine has still to do after some hand-offs have ended."""

    adopt: list[Request] = field(default_factory=list)
    """Requests with nothing to compute: their first token is the one that prefill chose."""
    fatal: list[tuple[Request, str]] = field(default_factory=list)
    """Requests to end with this message, because their policy is to fail."""
    broken: list[tuple[Request, Exception]] = field(default_factory=list)
    """Requests to end because of an exception, with that exception."""
    blocks_to_clear: list[int] = field(default_factory=list)
    """Blocks that a failed hand-off may have written to; they are cleared before the next step."""


class HandoffResults:
    """Used on the engine's thread. `requests` are the engine's open requests."""

    def __init__(
        self, requests: Mapping[RequestId, Request], scheduler: Scheduler, clock: Clock, *, vocab_size: int
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._clock = clock
        self._vocab_size = vocab_size

    def apply(self, outcome: Outcome) -> FollowUp:
        """Moves each request to where it continues, and releases blocks."""
        follow_up = FollowUp()
        for landed in outcome.landed:
            request = self._requests.get(landed.request)
            try:
                if request is not None:
                    self._land(request, landed, follow_up)
            except Exception as error:  # noqa: BLE001  # the engine ends this request, and reports it
                assert request is not None, "nothing was done without one"
                follow_up.broken.append((request, error))
        for failed in (*outcome.failed, *outcome.fatal):
            request = self._requests.get(failed.request)
            if request is None or request.state is not State.WAITING_FOR_KV:
                continue
            try:
                self._fail(request, failed, outcome, follow_up)
            except Exception as error:  # noqa: BLE001  # as above
                if failed.transfer not in outcome.released:  # a peer may still write to its blocks (R28)
                    self._scheduler.blocks.hold(failed.transfer, request.block_ids)
                    request.blocks = []
                follow_up.broken.append((request, error))
        for transfer in outcome.released:
            self._scheduler.blocks.release(transfer)
            self._scheduler.holder.released(transfer)
        return follow_up

    def checked(self, first: FirstToken | None, request: Request) -> FirstToken | None:
        """Returns prefill's first token if it can be used: it is in the vocabulary, and has logprobs if they are
        wanted."""
        if first is None or not 0 <= first.token < self._vocab_size:
            return None
        return first if request.sampling.logprobs is None or first.logprob is not None else None

    def _fail(self, request: Request, failed: Failed, outcome: Outcome, follow_up: FollowUp) -> None:
        """Lets a request go on without its hand-off, or end, as its policy says."""
        logger.warning("hand-off failed request=%s reason=%s", request.request_id, failed.reason)
        # A request that fetches may ask its next source: the connector says when there is none.
        request.handoff_open, request.handoff_over = False, request.from_remote
        request.reason = failed.reason
        if failed in outcome.fatal:
            self._scheduler.blocks.hold(failed.transfer, request.block_ids)
            request.blocks = []
            follow_up.fatal.append((request, failed.reason))
            return
        self._scheduler.remove(request)
        if failed.transfer in outcome.released:
            self._keep(request, failed, follow_up)
        else:
            self._scheduler.give_up_blocks(request, failed.transfer)
            self._scheduler.enqueue(request)

    def _keep(self, request: Request, failed: Failed, follow_up: FollowUp) -> None:
        """Continues a request after the complete blocks of its failed hand-off, which no peer can write to any more."""
        if not self._scheduler.groups.all_full:  # whether windows and states have arrived is known only at the end
            self._restart(request)
            return
        size = self._scheduler.block_tokens
        # What a drafter keeps of the last tokens depends on tokens that did not arrive.
        usable = min(failed.arrived.stop - self._scheduler.trailing_dependency, request.num_prompt_tokens - 1)
        arrived = usable // size * size
        if failed.arrived.start <= request.num_computed < arrived:
            request.num_computed = arrived
            self._count(request, arrived, failed.source)
        request.handoff_over = True
        for held in request.blocks:
            follow_up.blocks_to_clear += held.ids[request.num_computed // size :]
        self._scheduler.run(request)
        self._scheduler.landed(request)

    def _count(self, request: Request, stop: int, source: str) -> None:
        """Records that the tokens before `stop` have come from another engine."""
        if source:
            request.sources.fetched(stop, source)
        else:
            request.sources.handed_over(stop)

    def _restart(self, request: Request) -> None:
        """Returns a request to the queue: it gives up its blocks, which no peer uses, and computes what is not
        cached."""
        self._scheduler.give_up_blocks(request, None)
        self._scheduler.enqueue(request)

    def _land(self, request: Request, landed: Landed, follow_up: FollowUp) -> None:
        """Continues a request after the KV that has landed in its blocks."""
        now_s = self._clock.now_s()
        request.stages = replace(request.stages, landing_s=now_s - landed.transfer_s, landed_s=now_s)
        request.timing = HandoffTiming(
            num_bytes=landed.num_bytes,
            num_runs=landed.num_runs,
            transfer_s=landed.transfer_s,
            wait_s=now_s - request.arrived_s,
            verified_cells=landed.verified_cells,
            grant_s=now_s - landed.transfer_s - request.arrived_s + landed.grant_s,
        )
        if request.state is not State.WAITING_FOR_KV:
            return  # its whole prompt was in our prefix cache, so it did not wait
        request.handoff_open, request.handoff_over = False, True
        if landed.difference:
            request.first_token = None  # it follows another prompt, wherever it came from
        elif request.first_token is None and landed.note:
            request.first_token = self.checked(_first_token_in(landed.note), request)
        arrived = min(landed.arrived.stop, request.num_prompt_tokens)
        if landed.difference:
            arrived -= self._scheduler.trailing_dependency  # a drafter's last slots have read the other prompt's tokens
        if landed.arrived.start <= request.num_computed < arrived:
            request.num_computed = arrived
        self._scheduler.remove(request)
        nothing_to_compute = request.num_computed == request.num_prompt_tokens and request.first_token is None
        if not self._scheduler.groups.all_full:
            if request.num_computed != request.remote_stop or nothing_to_compute:
                request.reason = landed.difference or (
                    f"prefill handed over {request.num_computed} tokens, after which decode cannot continue"
                )
                self._restart(request)
                return
            self._scheduler.groups.landed(request)
        self._scheduler.run(request)
        if nothing_to_compute:
            request.num_computed -= 1  # the first token is chosen from the logits of the last prompt token
        self._count(request, request.num_computed, landed.source)
        if not request.from_remote:
            request.reason = landed.difference
        elif request.num_computed < request.num_prompt_tokens:
            missing = request.num_prompt_tokens - request.num_computed
            request.reason = (
                landed.difference
                or self._scheduler.tail_reason(request)
                or (f"prefill handed over all but the last {missing} prompt tokens")
            )
        self._scheduler.landed(request)
        if request.num_uncomputed == 0:
            follow_up.adopt.append(request)


def _first_token_in(note: bytes) -> FirstToken | None:
    try:
        return decode_first_token(note)
    except MalformedMessage as error:
        # The KV itself is good; this engine chooses the token.
        logger.warning("hand-off note ignored: %s", error)
        return None
