"""The scheduler half: which request is part of which hand-off. It sees ids, block ids and counts; no memory, no socket.

A prefill request (do_remote_decode):  OFFERED on its first computed chunk -> FINAL when it has ended
                                       -> every rank reports `released` -> forgotten, and the engine frees its blocks.
A decode request (do_remote_prefill):  HELD in the queue (the peer's grant is kept alive)
                                       -> WANTED once it has blocks -> every rank reports landed, or one failed
                                       -> after a failure or cancel: every rank reports `released`.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvferry.connector.base import EngineIdentity, Match, Outcome, RequestView
from kvferry.connector.entries import (
    DecodeHandoff,
    OrdersBuilder,
    OutcomeBuilder,
    PrefillHandoff,
    joined,
)
from kvferry.connector.peers import PeerBoard, PeerStatus
from kvferry.handoff.orders import (
    Cancel,
    Fetch,
    KeepAlive,
    Offer,
    StepOrders,
    StepReport,
    Withdraw,
)
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import FailurePolicy, FerrySettings, TransferMode
from kvferry.wire.first_token import FirstToken, encode_first_token
from kvferry.wire.params import HandoffParams

__all__ = ["HandoffScheduler", "PullScheduler", "PushScheduler", "make_scheduler"]

logger = logging.getLogger(__name__)


class HandoffScheduler:
    """The scheduler half of a connector. A subclass states its transfer mode, or cannot be defined (R14)."""

    mode: ClassVar[TransferMode]

    def __init_subclass__(cls, *, mode: TransferMode | None = None) -> None:
        if mode is None:
            raise TypeError(
                f"{cls.__name__} does not state its transfer mode: "
                f"class {cls.__name__}(HandoffScheduler, mode=TransferMode.PULL), or PUSH"
            )
        cls.mode = mode

    def __init__(
        self,
        identity: EngineIdentity,
        peers: PeerBoard,
        settings: FerrySettings,
        handoff_tokens: Callable[[int], int] | None = None,
    ) -> None:
        """`handoff_tokens`: of how many tokens of a prompt KV is handed over (R32); None: all."""
        self._me = identity
        self._handoff_tokens = handoff_tokens
        self._peers = peers
        self._settings = settings
        self._offered: dict[RequestId, PrefillHandoff] = {}
        self._wanted: dict[RequestId, DecodeHandoff] = {}
        self._by_transfer: dict[TransferId, PrefillHandoff | DecodeHandoff] = {}
        self._given_up: dict[RequestId, str] = {}
        self._preempted: set[RequestId] = set()
        """Prefill requests whose first offer was taken back."""
        self._next = OrdersBuilder()

    # Arrival and matching

    def handoff_tokens(self, num_prompt_tokens: int) -> int:
        """See SchedulerHalf."""
        return num_prompt_tokens if self._handoff_tokens is None else self._handoff_tokens(num_prompt_tokens)

    def on_new_request(self, request: RequestView) -> None:
        """Remember a request that another engine prefills, and start the handshake with that engine."""
        params = request.handoff
        if params is None or not params.do_remote_prefill:
            return
        missing = [
            name
            for name in ("transfer_id", "remote_engine_id", "remote_host", "remote_port")
            if getattr(params, name) is None
        ]
        if missing:
            self._given_up[request.request_id] = f"kv_transfer_params lack {', '.join(missing)}"
            return
        if params.transfer_mode is not None and params.transfer_mode is not self.mode:
            self._given_up[request.request_id] = (
                f"prefill hands over by {params.transfer_mode.value}, this worker by {self.mode.value}: "
                f"{self._me.mode_remedy}"
            )
            return
        transfer = TransferId(str(params.transfer_id))
        if transfer in self._by_transfer:
            self._given_up[request.request_id] = f"transfer id {transfer!r} is in use here: one dispatch, one id"
            return
        target = self.handoff_tokens(request.num_prompt_tokens)
        if params.remote_num_tokens is not None:
            target = min(target, params.remote_num_tokens)
        entry = DecodeHandoff(
            request=request.request_id,
            transfer=transfer,
            engine=EngineId(str(params.remote_engine_id)),
            incarnation=Incarnation(params.remote_incarnation) if params.remote_incarnation else None,
            num_tokens=target,
            policy=self._policy(request),
        )
        self._wanted[request.request_id] = entry
        self._by_transfer[transfer] = entry
        self._meet(entry, params)

    def match(self, request: RequestView, num_cached_tokens: int) -> Match:
        """How many tokens after `num_cached_tokens` the prefill engine brings; `wait` while we shake hands."""
        entry = self._wanted.get(request.request_id)
        if entry is None or entry.started:
            return self._without(request)
        assert request.handoff is not None, "only a request with handoff parameters is in _wanted"
        status, reason = self._meet(entry, request.handoff)
        if status is PeerStatus.ASKING:
            return Match(wait=True)
        if status is PeerStatus.REFUSED:
            self._give_up(entry, reason)
            return self._without(request)
        return Match(num_tokens=max(0, entry.num_tokens - num_cached_tokens))

    def _meet(self, entry: DecodeHandoff, params: HandoffParams) -> tuple[PeerStatus, str]:
        view = self._peers.view(entry.engine, entry.incarnation, str(params.remote_host), int(params.remote_port or 0))
        if view.status is PeerStatus.ACCEPTED and not entry.held:
            entry.incarnation = view.incarnation
            entry.held = True
            assert view.incarnation is not None, "an accepted peer has an incarnation"
            self._next.keep_alive.append(KeepAlive(entry.transfer, entry.engine, view.incarnation))
        return view.status, view.reason

    def _policy(self, request: RequestView) -> FailurePolicy:
        return request.on_failure or self._settings.transfer.on_failure

    def _without(self, request: RequestView) -> Match:
        reason = self._given_up.get(request.request_id, "")
        if reason and self._policy(request) is FailurePolicy.FAIL:
            return Match(error=f"the prompt's KV cache did not arrive, and on_failure is 'fail': {reason}")
        return Match(reason=reason)

    def _give_up(self, entry: DecodeHandoff, reason: str) -> None:
        self._given_up[entry.request] = reason
        self._drop(entry, reason)

    def _drop(self, entry: DecodeHandoff, reason: str) -> None:
        """Forget a hand-off into which no block was given; free the peer's grant if it has one."""
        if entry.held and entry.incarnation is not None:
            self._next.cancel.append(Cancel(entry.transfer, entry.engine, entry.incarnation, reason))
        self._forget(entry)

    # Decode

    def after_alloc(self, request: RequestView, tables: Sequence[BlockTable], num_cached_tokens: int) -> None:
        """Start the hand-off of [num_cached_tokens, end) into `tables`. R30: what is cached is not asked for."""
        entry = self._wanted.get(request.request_id)
        if entry is None or entry.started:
            return
        assert entry.incarnation is not None, "match() was answered with tokens before blocks were allocated"
        entry.started = True
        wanted = TokenRange(min(num_cached_tokens, entry.num_tokens), entry.num_tokens)
        entry.told = not len(wanted)  # all of it was cached: the peer has to know, the engine does not wait
        self._next.fetch.append(
            Fetch(
                transfer=entry.transfer,
                request=entry.request,
                engine=entry.engine,
                incarnation=entry.incarnation,
                mode=self.mode,
                tables=tuple(tables),
                wanted=wanted,
                deadline_s=self._settings.transfer.deadline_s,
            )
        )

    # Prefill

    def computed(self, request: RequestView, tables: Sequence[BlockTable], num_computed_tokens: int) -> None:
        """Offer what is stored so far; the peer may take it while the next chunk is computed."""
        if request.handoff is None or not request.handoff.do_remote_decode or not self._settings.transfer.progress:
            return
        if self._has_lost_its_peer(request):
            return
        self._offer(request, tables, num_computed_tokens, final=False, note=b"")

    def _has_lost_its_peer(self, request: RequestView) -> bool:
        """Push: decode was told that the hand-off failed, and goes on alone; nobody will learn of a new one."""
        return self.mode is TransferMode.PUSH and request.request_id in self._preempted

    def _offer(
        self, request: RequestView, tables: Sequence[BlockTable], num_tokens: int, *, final: bool, note: bytes
    ) -> PrefillHandoff:
        entry = self._offered.get(request.request_id)
        if entry is None:
            assert request.handoff is not None, "only a do_remote_decode request is offered"
            transfer = TransferId(request.handoff.transfer_id or "")
            if not transfer or request.request_id in self._preempted or transfer in self._by_transfer:
                # One dispatch, one id: the one that was asked for is withdrawn, or serves another request.
                transfer = TransferId(f"{self._me.engine}-{secrets.token_hex(8)}")
            entry = PrefillHandoff(request.request_id, transfer)
            self._offered[request.request_id] = entry
            self._by_transfer[transfer] = entry
        self._next.offer[entry.transfer] = Offer(
            transfer=entry.transfer,
            request=entry.request,
            tables=tuple(tables),
            ready=TokenRange(0, num_tokens),
            final=final,
            note=note,
        )
        return entry

    def request_finished(
        self,
        request: RequestView,
        tables: Sequence[BlockTable],
        num_computed_tokens: int,
        *,
        first_token: FirstToken | None,
        aborted: bool,
    ) -> tuple[TransferId | None, HandoffParams | None]:
        """See SchedulerHalf. A prefill request that ends well is offered; one that doesn't is withdrawn."""
        self._given_up.pop(request.request_id, None)
        aborted = aborted or self._has_lost_its_peer(request)
        result = self._finished(request, tables, num_computed_tokens, first_token, aborted=aborted)
        self._preempted.discard(request.request_id)
        return result

    def _finished(
        self,
        request: RequestView,
        tables: Sequence[BlockTable],
        num_computed_tokens: int,
        first_token: FirstToken | None,
        *,
        aborted: bool,
    ) -> tuple[TransferId | None, HandoffParams | None]:
        wanted = self._wanted.get(request.request_id)
        if wanted is not None:
            return (None if wanted.told else self._decode_ended(wanted)), None
        if request.handoff is None or not request.handoff.do_remote_decode:
            return None, None
        offered = self._offered.get(request.request_id)
        if aborted or (offered is not None and offered.unwanted):
            reason = (offered and offered.unwanted) or "the request was aborted on the prefill side"
            if offered is not None:
                offered.finished, offered.unwanted = True, reason
                self._next.withdraw.append(Withdraw(offered.transfer, reason))
                return offered.transfer, None
            asked = TransferId(request.handoff.transfer_id or "")
            if asked and asked not in self._by_transfer:
                # Nothing of it is computed, but in push decode may be waiting for it already.
                self._next.withdraw.append(Withdraw(asked, reason))
            return None, None
        if not self._settings.transfer.first_token:
            first_token = None
        note = encode_first_token(first_token) if first_token is not None else b""
        entry = self._offer(request, tables, num_computed_tokens, final=True, note=note)
        entry.finished = True
        return entry.transfer, self._params(entry, tables, num_computed_tokens, first_token)

    def _params(
        self,
        entry: PrefillHandoff,
        tables: Sequence[BlockTable],
        num_tokens: int,
        first_token: FirstToken | None,
    ) -> HandoffParams:
        """R15: what the router carries to decode, under the names that existing routers read."""
        return HandoffParams(
            do_remote_prefill=True,
            do_remote_decode=False,
            transfer_mode=self.mode,
            transfer_id=entry.transfer,
            remote_engine_id=self._me.engine,
            remote_incarnation=self._me.incarnation,
            remote_request_id=entry.request,
            remote_host=self._me.host,
            remote_port=self._me.port,
            remote_block_ids=[[int(block) for block in table.block_ids] for table in tables],
            remote_block_first_tokens=[table.first_token for table in tables],
            remote_num_tokens=num_tokens,
            tp_size=self._me.tp_size,
            pp_size=self._me.pp_size,
            first_token=first_token.token if first_token else None,
            first_logprob=first_token.logprob if first_token else None,
            first_top_logprobs=list(first_token.top) if first_token else None,
        )

    def _decode_ended(self, entry: DecodeHandoff) -> TransferId | None:
        if not entry.started:
            self._drop(entry, "the request was aborted on the decode side")
            return None
        # In flight: the blocks stay ours until no peer can touch them. The engine asked for the end: it needs no news.
        assert entry.incarnation is not None, "a started hand-off has a peer"
        entry.told = True
        self._next.cancel.append(
            Cancel(entry.transfer, entry.engine, entry.incarnation, "the request was aborted on the decode side")
        )
        return entry.transfer

    def withdraw(self, transfer: TransferId, reason: str) -> bool:
        """Prefill: nobody will take this hand-off. True: its blocks come back by `released`, sooner than by the lease.

        A decode engine that has claimed it all the same is told, and waited for (R28). False: there is no such offer,
        or it was withdrawn already. On the engine's thread, like everything here; from a router, so any id may come.
        """
        entry = self._by_transfer.get(transfer)
        if not isinstance(entry, PrefillHandoff) or entry.unwanted:
            return False
        entry.unwanted = reason
        if entry.finished:  # else the engine does not hold the blocks for it yet: when the request ends
            self._next.withdraw.append(Withdraw(transfer, reason))
        return True

    def preempted(self, request: RequestView) -> TransferId | None:
        """Take back what was offered: a peer that has begun is told, and the next offer has a new transfer id."""
        entry = self._offered.pop(request.request_id, None)
        if entry is None:
            return None
        self._preempted.add(request.request_id)
        self._next.offer.pop(entry.transfer, None)
        self._next.withdraw.append(Withdraw(entry.transfer, "prefill ran out of blocks and preempted the request"))
        return entry.transfer

    # The two records a step

    def build_orders(self) -> StepOrders:
        """All orders since the last step."""
        now, self._next = self._next, OrdersBuilder()
        return now.orders()

    def update(self, reports: Sequence[StepReport]) -> Outcome:
        """Join the ranks' reports: landed when all have landed, failed when all have ended and one failed."""
        news = OutcomeBuilder()
        for report in reports:
            for good in report.landed:
                if (entry := self._decode_entry(good.transfer)) is not None:
                    entry.landed.append(good)
                    self._conclude(entry, news)
            for bad in report.failed:
                if (entry := self._decode_entry(bad.transfer)) is not None:
                    entry.failed.append(bad)
                    self._conclude(entry, news)
            for transfer in report.released:
                self._released(transfer, news)
        return news.outcome()

    def _decode_entry(self, transfer: TransferId) -> DecodeHandoff | None:
        entry = self._by_transfer.get(transfer)
        return entry if isinstance(entry, DecodeHandoff) else None

    def _released(self, transfer: TransferId, news: OutcomeBuilder) -> None:
        entry = self._by_transfer.get(transfer)
        if entry is None:
            logger.debug("release of an unknown transfer=%s", transfer)
            return
        entry.released_by += 1
        if isinstance(entry, DecodeHandoff):
            self._conclude(entry, news)
        elif entry.released_by == self._me.num_ranks:
            del self._by_transfer[transfer]
            if self._offered.get(entry.request) is entry:
                del self._offered[entry.request]
            news.released.append(transfer)

    def _conclude(self, entry: DecodeHandoff, news: OutcomeBuilder) -> None:
        """Called after each report about `entry`: has it ended, and are its blocks safe?"""
        if not entry.told and len(entry.landed) + len(entry.failed) == self._me.num_ranks:
            entry.told = True
            if not entry.failed:
                self._forget(entry)
                news.landed.append(joined(entry.landed))
                return
            worst = min(entry.failed, key=lambda one: one.arrived.stop)
            self._given_up[entry.request] = worst.reason
            (news.fatal if entry.policy is FailurePolicy.FAIL else news.failed).append(worst)
        if entry.told and len(entry.landed) + entry.released_by == self._me.num_ranks:
            self._forget(entry)
            news.released.append(entry.transfer)

    def _forget(self, entry: DecodeHandoff) -> None:
        self._wanted.pop(entry.request, None)
        self._by_transfer.pop(entry.transfer, None)

    @property
    def num_receiving(self) -> int:
        """Decode requests that have blocks and wait for what comes into them."""
        return sum(entry.started and not entry.told for entry in self._wanted.values())

    @property
    def has_orders(self) -> bool:
        """The worker halves have something to learn: the engine should make a step."""
        return bool(self._next.orders())

    def has_pending_work(self) -> bool:
        """True while a hand-off is open here, on either side."""
        return bool(self._by_transfer) or bool(self._next.cancel or self._next.withdraw)


class PullScheduler(HandoffScheduler, mode=TransferMode.PULL):
    """Decode reads prefill's blocks."""


class PushScheduler(HandoffScheduler, mode=TransferMode.PUSH):
    """Prefill writes into decode's blocks."""


def make_scheduler(
    identity: EngineIdentity,
    peers: PeerBoard,
    settings: FerrySettings,
    handoff_tokens: Callable[[int], int] | None = None,
) -> HandoffScheduler:
    """The scheduler half for the configured transfer mode."""
    kinds = {kind.mode: kind for kind in (PullScheduler, PushScheduler)}
    return kinds[settings.transfer.mode](identity, peers, settings, handoff_tokens)
