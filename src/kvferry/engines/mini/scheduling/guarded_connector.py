"""The scheduler half as the engine calls it: what it raises for one request ends that request, and not the engine."""

import logging
from collections.abc import Sequence

from kvferry.connector.base import Match, Outcome, PrefixHolder, RequestView, SchedulerHalf, StepOrders, StepReport
from kvferry.engines.mini.api import FinishReason
from kvferry.engines.mini.scheduling.output import Finish
from kvferry.engines.mini.scheduling.request import Request
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import BlockTable
from kvferry.wire.first_token import FirstToken
from kvferry.wire.params import HandoffParams

__all__ = ["GuardedConnector"]

logger = logging.getLogger(__name__)


class GuardedConnector:
    """Implements SchedulerHalf, and passes each call on.

    `on_new_request`, `carried_first_token`, `handoff_tokens` and `match` may raise: nothing is allocated at that time,
    and their callers end the request. What any other call about one request raises is kept in `broken`, and the engine
    ends the request at the end of the step. Blocks that a peer may touch are kept all the same (R28).
    """

    def __init__(self, half: SchedulerHalf) -> None:
        self._half = half
        self.broken: dict[RequestId, Exception] = {}
        """Requests that cannot go on; the engine takes them."""

    def handoff_tokens(self, num_prompt_tokens: int) -> int:
        """Implements SchedulerHalf."""
        return self._half.handoff_tokens(num_prompt_tokens)

    def on_new_request(self, request: RequestView) -> None:
        """Implements SchedulerHalf."""
        self._half.on_new_request(request)

    def carried_first_token(self, request: RequestView) -> FirstToken | None:
        """Implements SchedulerHalf."""
        return self._half.carried_first_token(request)

    def match(self, request: RequestView, num_cached_tokens: int) -> Match:
        """Implements SchedulerHalf."""
        return self._half.match(request, num_cached_tokens)

    def after_alloc(self, request: RequestView, tables: Sequence[BlockTable], num_cached_tokens: int) -> None:
        """Implements SchedulerHalf."""
        try:
            self._half.after_alloc(request, tables, num_cached_tokens)
        except Exception as error:  # noqa: BLE001  # kept for the engine
            self.broken[request.request_id] = error

    def computed(self, request: RequestView, tables: Sequence[BlockTable], num_computed_tokens: int) -> None:
        """Implements SchedulerHalf."""
        try:
            self._half.computed(request, tables, num_computed_tokens)
        except Exception as error:  # noqa: BLE001  # kept for the engine
            self.broken[request.request_id] = error

    def request_finished(
        self,
        request: RequestView,
        tables: Sequence[BlockTable],
        num_computed_tokens: int,
        *,
        first_token: FirstToken | None,
        aborted: bool,
        complete: bool = False,
    ) -> tuple[TransferId | None, HandoffParams | None]:
        """Implements SchedulerHalf."""
        try:
            return self._half.request_finished(
                request, tables, num_computed_tokens, first_token=first_token, aborted=aborted, complete=complete
            )
        except Exception as error:
            logger.exception("a hand-off cannot be ended in order request=%s", request.request_id)
            self.broken[request.request_id] = error
            return self._transfer_of(request), None

    def end(
        self, request: Request, finish: Finish, *, aborted: bool
    ) -> tuple[TransferId | None, HandoffParams | None, Exception | None]:
        """Ends a request's part in hand-offs: `request_finished`, and what that has raised."""
        complete = request.for_remote and finish.reason is FinishReason.STOP
        offers = complete or (request.for_remote and finish.reason is FinishReason.LENGTH)
        transfer, params = self.request_finished(
            request,
            request.tables,
            request.num_computed,
            first_token=request.handed_over_token() if offers else None,
            aborted=aborted or (request.for_remote and not offers),
            complete=complete,
        )
        return transfer, params, self.broken.pop(request.request_id, None)

    def preempted(self, request: RequestView) -> TransferId | None:
        """Implements SchedulerHalf."""
        try:
            return self._half.preempted(request)
        except Exception as error:  # noqa: BLE001  # kept for the engine
            self.broken[request.request_id] = error
            return self._named_transfer(request)

    def _transfer_of(self, request: RequestView) -> TransferId | None:
        """Takes back what was offered, and returns which transfer's release frees the request's blocks."""
        try:
            withdrawn = self._half.preempted(request)
        except Exception:
            logger.exception("an offer cannot be taken back request=%s", request.request_id)
            withdrawn = None
        return withdrawn or self._named_transfer(request)

    def _named_transfer(self, request: RequestView) -> TransferId | None:
        """Returns the transfer that the request's parameters name, if a peer may touch its blocks."""
        assert isinstance(request, Request), "this engine calls with its own requests"
        if not request.handoff_open:
            return None
        return TransferId((request.handoff and request.handoff.transfer_id) or request.request_id)

    def withdraw(self, transfer: TransferId, reason: str) -> bool:
        """Implements SchedulerHalf."""
        return self._half.withdraw(transfer, reason)

    def decline(self, params: HandoffParams, reason: str) -> None:
        """Implements SchedulerHalf."""
        self._half.decline(params, reason)

    def hold_prefixes(self, holder: PrefixHolder) -> None:
        """Implements SchedulerHalf."""
        self._half.hold_prefixes(holder)

    def build_orders(self) -> StepOrders:
        """Implements SchedulerHalf."""
        return self._half.build_orders()

    def update(self, reports: Sequence[StepReport]) -> Outcome:
        """Implements SchedulerHalf."""
        return self._half.update(reports)

    def has_pending_work(self) -> bool:
        """Implements SchedulerHalf."""
        return self._half.has_pending_work()
