"""The scheduler half: which request is part of which hand-off. It sees ids, block ids and counts; no memory, no socket.

A prefill request (do_remote_decode):  Offer after each computed chunk -> the final Offer when it has ended
                                       -> every rank reports `released` -> forgotten, and the engine frees its blocks.
A decode request (do_remote_prefill):  KeepAlive while it waits in the queue, so that the peer's grant stays
                                       -> Fetch once it has blocks -> every rank reports landed, or one failed
                                       -> after a failure or Cancel: every rank reports `released`.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from kvferry.connector.base import EngineIdentity, Match, Outcome, PrefixHolder, RequestView
from kvferry.connector.declined import DeclinedHandoffs, missing_fields, unusable_reason
from kvferry.connector.entries import (
    DecodeHandoff,
    OrdersBuilder,
    OutcomeBuilder,
    PrefillHandoff,
    answer_params,
    is_for,
    joined,
)
from kvferry.connector.fetches import Fetches, Granted, Looking, PrefixFetch
from kvferry.connector.holdings import Holdings
from kvferry.connector.peers import PeerBoard, PeerStatus, PrefixBoard
from kvferry.handoff.binding import too_old
from kvferry.handoff.orders import Cancel, Failed, Fetch, KeepAlive, Offer, StepOrders, StepReport, Withdraw
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import FailurePolicy, FerrySettings, OlderPeers, TransferMode
from kvferry.wire.first_token import FirstToken, encode_first_token, first_token_of
from kvferry.wire.params import HandoffParams
from kvferry.wire.prompt_digest import Prompt
from kvferry.wire.versions import BINDING

__all__ = ["HandoffScheduler"]

logger = logging.getLogger(__name__)


class HandoffScheduler:
    """The scheduler half of a connector. A subclass must state its transfer mode (R14)."""

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
        *,
        hash_ahead: Callable[[Prompt], None] | None = None,
        prefixes: PrefixBoard | None = None,
    ) -> None:
        """`handoff_tokens` says how many tokens of a prompt are handed over (R32). None means all of them. `hash_ahead`
        takes the prompts of prefill, whose digests are needed when they are computed."""
        self._identity = identity
        self._handoff_tokens = handoff_tokens
        self._hash_ahead = hash_ahead
        self._peers = peers
        self._settings = settings
        self._prefilling: dict[RequestId, PrefillHandoff] = {}
        self._decoding: dict[RequestId, DecodeHandoff] = {}
        self._by_transfer: dict[TransferId, PrefillHandoff | DecodeHandoff] = {}
        self._gave_up: dict[RequestId, str] = {}
        self._duplicates: dict[RequestId, str] = {}
        """Requests with another one's transfer id. No hand-off of theirs has failed, so they are computed under any
        policy."""
        self._preempted: set[RequestId] = set()
        """Prefill requests that were preempted after their first offer."""
        self._meeting: dict[RequestId, tuple[DecodeHandoff, HandoffParams]] = {}
        """Decode requests whose prefill engine is being asked: its grant is kept alive as soon as it has answered, also
        if the engine does not look at the request (R25)."""
        self._declined = DeclinedHandoffs(peers)
        self._fetching: dict[RequestId, PrefixFetch] = {}
        """Requests whose prompt's beginning other engines may hold."""
        self._fetches = Fetches(identity, peers, prefixes, settings.fetch)
        self._holdings = Holdings(prefixes, settings.fetch)
        self._next = OrdersBuilder()

    # Arrival and matching

    def handoff_tokens(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt are handed over (SchedulerHalf)."""
        return num_prompt_tokens if self._handoff_tokens is None else self._handoff_tokens(num_prompt_tokens)

    def on_new_request(self, request: RequestView) -> None:
        """Remember a request that another engine prefills, and start the handshake with that engine."""
        params = request.handoff
        if params is not None and params.do_remote_decode and self._hash_ahead is not None:
            self._hash_ahead(request.prompt)
        if params is None or not params.do_remote_prefill:
            if (fetch := self._fetches.new(request, self.handoff_tokens)) is not None:
                self._fetching[request.request_id] = fetch
            return
        if reason := unusable_reason(params, self.mode, self._identity.mode_remedy):
            self._gave_up[request.request_id] = reason
            return
        transfer = TransferId(str(params.transfer_id))
        if transfer in self._by_transfer:
            self._duplicates[request.request_id] = f"transfer id {transfer!r} is in use here: one dispatch, one id"
            return
        target = expected = self.handoff_tokens(request.num_prompt_tokens)
        if params.remote_num_tokens is not None:
            target = min(target, params.remote_num_tokens)
        prompt = request.prompt
        entry = DecodeHandoff(
            request=request.request_id,
            transfer=transfer,
            engine=EngineId(str(params.remote_engine_id)),
            incarnation=Incarnation(params.remote_incarnation) if params.remote_incarnation else None,
            num_tokens=target,
            # Parameters that name this very prompt need no links: either prefill says the same, or nothing is taken.
            prompt=prompt.stated(params.remote_prompt_tokens, links=not is_for(params, prompt)),
            expected_tokens=expected,
            policy=self._policy(request),
            answered=self.mode is TransferMode.PULL and params.remote_num_tokens is not None,
        )
        self._decoding[request.request_id] = entry
        self._by_transfer[transfer] = entry
        if self._find_peer(entry, params)[0] is PeerStatus.ASKING:
            self._meeting[request.request_id] = (entry, params)

    def decline(self, params: HandoffParams, reason: str) -> None:
        """The engine has refused the request with these parameters: free the peer's grant before its lease ends."""
        if params.do_remote_prefill and not missing_fields(params) and params.transfer_id not in self._by_transfer:
            self._declined.add(params, reason)

    def carried_first_token(self, request: RequestView) -> FirstToken | None:
        """Return the first token in the request's parameters, if they are for this very prompt (R51).

        Older releases state no digest. Then the number of tokens must be the expected one, or the setting refuses it.
        """
        entry, params = self._decoding.get(request.request_id), request.handoff
        if entry is None or params is None:
            return None
        counted = self._settings.transfer.older_peers is OlderPeers.COUNT
        return first_token_of(params) if entry.is_for(params, counted=counted) else None

    def match(self, request: RequestView, num_cached_tokens: int) -> Match:
        """Return how many tokens after `num_cached_tokens` the prefill engine brings, or to wait for the handshake."""
        if (fetch := self._fetching.get(request.request_id)) is not None:
            return self._match_fetch(request, fetch, num_cached_tokens)
        entry = self._decoding.get(request.request_id)
        if entry is None or entry.started:
            return self._no_match(request)
        assert request.handoff is not None, "only a request with hand-off parameters is in _decoding"
        status, reason = self._find_peer(entry, request.handoff)
        if status is PeerStatus.ASKING:
            return Match(wait=True)
        if status is PeerStatus.REFUSED:
            self._give_up(entry, reason)
            return self._no_match(request)
        return Match(num_tokens=max(0, entry.num_tokens - num_cached_tokens))

    def _match_fetch(self, request: RequestView, fetch: PrefixFetch, num_cached_tokens: int) -> Match:
        """Return how many tokens another engine has granted beyond our own, or to wait for its answer."""
        entry = self._decoding.get(request.request_id)
        while entry is None or entry.outcome_reported or entry.num_tokens <= num_cached_tokens:
            if entry is not None and not entry.outcome_reported:
                self._drop(entry, "its tokens are cached here by now")
                fetch.next_source("")
            looked = self._fetches.look(fetch, num_cached_tokens)
            if looked is Looking.WAIT:
                return Match(wait=True)
            if isinstance(looked, Looking):
                return Match(reason=fetch.reason)
            entry = self._granted(request, fetch, looked)
        return Match(num_tokens=entry.num_tokens - num_cached_tokens)

    def _granted(self, request: RequestView, fetch: PrefixFetch, granted: Granted) -> DecodeHandoff:
        """From here on a fetch is a hand-off, whose failure is no failure of the request."""
        entry = fetch.handoff(request.request_id, granted)
        self._decoding[entry.request] = self._by_transfer[entry.transfer] = entry
        self._next.keep_alive.append(KeepAlive(entry.transfer, entry.engine, granted.incarnation))
        return entry

    def _find_peer(self, entry: DecodeHandoff, params: HandoffParams) -> tuple[PeerStatus, str]:
        view = self._peers.view(entry.engine, entry.incarnation, str(params.remote_host), int(params.remote_port or 0))
        if view.status is PeerStatus.ACCEPTED and not entry.kept_alive:
            entry.incarnation = view.incarnation
            entry.kept_alive = True
            assert view.incarnation is not None, "an accepted peer has an incarnation"
            self._next.keep_alive.append(KeepAlive(entry.transfer, entry.engine, view.incarnation))
        older = view.status is PeerStatus.ACCEPTED and view.protocol < BINDING
        if older and self._settings.transfer.older_peers is OlderPeers.REFUSE:
            return PeerStatus.REFUSED, too_old(entry.engine, view.protocol)
        return view.status, view.reason

    def _policy(self, request: RequestView) -> FailurePolicy:
        return request.on_failure or self._settings.transfer.on_failure

    def _no_match(self, request: RequestView) -> Match:
        if (duplicate := self._duplicates.get(request.request_id)) is not None:
            return Match(reason=duplicate)
        reason = self._gave_up.get(request.request_id, "")
        if reason and self._policy(request) is FailurePolicy.FAIL:
            return Match(error=f"the prompt's KV cache did not arrive, and on_failure is 'fail': {reason}")
        return Match(reason=reason)

    def _give_up(self, entry: DecodeHandoff, reason: str) -> None:
        self._gave_up[entry.request] = reason
        self._drop(entry, reason)

    def _drop(self, entry: DecodeHandoff, reason: str) -> None:
        """Forget a hand-off that has no blocks here, and free the peer's grant if there is one."""
        if entry.kept_alive and entry.incarnation is not None:
            self._next.cancel.append(Cancel(entry.transfer, entry.engine, entry.incarnation, reason))
        self._forget(entry)

    # Decode

    def after_alloc(self, request: RequestView, tables: Sequence[BlockTable], num_cached_tokens: int) -> None:
        """Start the hand-off of [num_cached_tokens, end) into `tables`. Cached tokens are not fetched (R30)."""
        entry = self._decoding.get(request.request_id)
        if entry is None or entry.started:
            return
        assert entry.incarnation is not None, "match() was answered with tokens before blocks were allocated"
        wanted = TokenRange(min(num_cached_tokens, entry.num_tokens), entry.num_tokens)
        entry.outcome_reported = not len(wanted)  # all is cached: only the peer needs to know
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
                prompt=entry.prompt,
                expected_tokens=entry.expected_tokens,
                answered=entry.answered,
            )
        )
        entry.started = True

    # Prefill

    def computed(self, request: RequestView, tables: Sequence[BlockTable], num_computed_tokens: int) -> None:
        """Offer the tokens that are stored so far: the peer may take them while the next chunk is computed."""
        if request.handoff is None or not request.handoff.do_remote_decode or not self._settings.transfer.progress:
            return
        if self._has_lost_its_peer(request):
            return
        self._offer(request, tables, num_computed_tokens, final=False, note=b"")

    def _has_lost_its_peer(self, request: RequestView) -> bool:
        """Push: preemption has failed the hand-off, and decode goes on alone: it cannot learn a new transfer id."""
        return self.mode is TransferMode.PUSH and request.request_id in self._preempted

    def _offer(
        self, request: RequestView, tables: Sequence[BlockTable], num_tokens: int, *, final: bool, note: bytes
    ) -> PrefillHandoff:
        entry = self._prefilling.get(request.request_id)
        if entry is None:
            assert request.handoff is not None, "only a do_remote_decode request is offered"
            transfer = TransferId(request.handoff.transfer_id or "")
            if not transfer or request.request_id in self._preempted or transfer in self._by_transfer:
                # One dispatch has one id: the requested one was withdrawn, or belongs to another request.
                transfer = TransferId(f"{self._identity.engine}-{secrets.token_hex(8)}")
            entry = PrefillHandoff(request.request_id, transfer, request.prompt)
            self._prefilling[request.request_id] = entry
            self._by_transfer[transfer] = entry
        self._next.offer[entry.transfer] = Offer(
            transfer=entry.transfer,
            request=entry.request,
            tables=tuple(tables),
            ready=TokenRange(0, num_tokens),
            final=final,
            note=note,
            prompt=entry.prompt,
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
        complete: bool = False,
    ) -> tuple[TransferId | None, HandoffParams | None]:
        """Offer a prefill request that ends well, withdraw one that does not; cancel a hand-off that is under way."""
        self._gave_up.pop(request.request_id, None)
        self._duplicates.pop(request.request_id, None)
        if (fetch := self._fetching.pop(request.request_id, None)) is not None:
            self._fetches.abandon(fetch)
        aborted = aborted or self._has_lost_its_peer(request) or (complete and self.mode is TransferMode.PULL)
        result = self._end_request(request, tables, num_computed_tokens, first_token, aborted=aborted)
        self._preempted.discard(request.request_id)
        return result

    def _end_request(
        self,
        request: RequestView,
        tables: Sequence[BlockTable],
        num_computed_tokens: int,
        first_token: FirstToken | None,
        *,
        aborted: bool,
    ) -> tuple[TransferId | None, HandoffParams | None]:
        decode = self._decoding.get(request.request_id)
        held = self._cancel(decode) if decode is not None and not decode.outcome_reported else None
        if request.handoff is None or not request.handoff.do_remote_decode:
            return held, None
        prefill = self._prefilling.get(request.request_id)
        if aborted or (prefill is not None and prefill.withdrawn_reason):
            reason = (prefill and prefill.withdrawn_reason) or "the request was aborted on the prefill side"
            if prefill is not None:
                prefill.finished, prefill.withdrawn_reason = True, reason
                self._next.withdraw.append(Withdraw(prefill.transfer, reason))
                return prefill.transfer, None
            asked = TransferId(request.handoff.transfer_id or "")
            if asked and asked not in self._by_transfer:
                # Nothing of it is computed, but in push decode may already be waiting for it.
                self._next.withdraw.append(Withdraw(asked, reason))
            return held, None
        if not self._settings.transfer.first_token:
            first_token = None
        note = encode_first_token(first_token) if first_token is not None else b""
        entry = self._offer(request, tables, num_computed_tokens, final=True, note=note)
        entry.finished = True
        return entry.transfer, answer_params(self._identity, self.mode, entry, tables, num_computed_tokens, first_token)

    def _cancel(self, entry: DecodeHandoff) -> TransferId | None:
        if not entry.started:
            self._drop(entry, "the request was aborted on the decode side")
            return None
        # In flight: the blocks stay ours until no peer can touch them. The engine knows of the end: it asked for it.
        assert entry.incarnation is not None, "a started hand-off has a peer"
        entry.outcome_reported = True
        self._next.cancel.append(
            Cancel(entry.transfer, entry.engine, entry.incarnation, "the request was aborted on the decode side")
        )
        return entry.transfer

    def withdraw(self, transfer: TransferId, reason: str) -> bool:
        """Prefill: take back an offer that no decode engine will claim; its blocks come back before the lease ends.

        Returns False if there is no such offer, or it was withdrawn already: a router may send any id. A decode engine
        that has claimed it all the same learns of the end, and is waited for (R28).
        """
        entry = self._by_transfer.get(transfer)
        if not isinstance(entry, PrefillHandoff) or entry.withdrawn_reason:
            return False
        entry.withdrawn_reason = reason
        if entry.finished:  # else it is withdrawn when the request ends: until then the engine does not hold its blocks
            self._next.withdraw.append(Withdraw(transfer, reason))
        return True

    def preempted(self, request: RequestView) -> TransferId | None:
        """Take back what was offered. A peer that has begun learns of it, and the next offer has a new transfer id."""
        entry = self._prefilling.pop(request.request_id, None)
        if entry is None:
            return None
        self._preempted.add(request.request_id)
        self._next.offer.pop(entry.transfer, None)
        self._next.withdraw.append(Withdraw(entry.transfer, "prefill ran out of blocks and preempted the request"))
        return entry.transfer

    # Once per step

    def build_orders(self) -> StepOrders:
        """Return all orders since the last step."""
        for request, (entry, params) in list(self._meeting.items()):
            try:
                if entry.started or self._find_peer(entry, params)[0] is not PeerStatus.ASKING:
                    self._meeting.pop(request, None)
            except Exception as error:
                logger.exception("a peer cannot be asked peer=%s request=%s", entry.engine, request)
                self._give_up(entry, f"its prefill engine cannot be asked: {type(error).__name__}: {error}")
        self._next.cancel += [*self._declined.take_cancels(), *self._fetches.take_cancels()]
        self._by_transfer |= {one.transfer: one for one in self._holdings.answer(self._by_transfer, self._next)}
        built, self._next = self._next, OrdersBuilder()
        return built.orders()

    def update(self, reports: Sequence[StepReport]) -> Outcome:
        """Join the ranks' reports: landed when all ranks have landed, failed when all have ended and one has failed."""
        outcome = OutcomeBuilder()
        for report in reports:
            for landed in report.landed:
                if (entry := self._decode_entry(landed.transfer)) is not None:
                    entry.landed.append(landed)
                    self._try_to_advance(entry, outcome)
            for failed in report.failed:
                if (entry := self._decode_entry(failed.transfer)) is not None:
                    entry.failed.append(failed)
                    self._try_to_advance(entry, outcome)
            for transfer in report.released:
                self._released(transfer, outcome)
        return outcome.outcome()

    def _decode_entry(self, transfer: TransferId) -> DecodeHandoff | None:
        entry = self._by_transfer.get(transfer)
        return entry if isinstance(entry, DecodeHandoff) else None

    def _released(self, transfer: TransferId, outcome: OutcomeBuilder) -> None:
        entry = self._by_transfer.get(transfer)
        if entry is None:
            logger.debug("release of an unknown transfer=%s", transfer)
            return
        entry.released_by += 1
        if isinstance(entry, DecodeHandoff):
            self._try_to_advance(entry, outcome)
        elif entry.released_by == self._identity.num_ranks:
            del self._by_transfer[transfer]
            if self._prefilling.get(entry.request) is entry:
                del self._prefilling[entry.request]
            outcome.released.append(transfer)

    def _try_to_advance(self, entry: DecodeHandoff, outcome: OutcomeBuilder) -> None:
        """Advance one hand-off. What that raises fails this hand-off, and no other."""
        reported = entry.outcome_reported
        try:
            self._advance(entry, outcome)
        except Exception as error:
            logger.exception("a hand-off cannot be ended in order transfer=%s", entry.transfer)
            entry.outcome_reported = True
            if not reported:
                reason = f"decode could not take what was reported of it: {type(error).__name__}: {error}"
                outcome.failed.append(Failed(entry.transfer, entry.request, reason, TokenRange(0, 0)))
            self._release_if_ended(entry, outcome)

    def _advance(self, entry: DecodeHandoff, outcome: OutcomeBuilder) -> None:
        """Report the outcome once every rank has ended, and release the blocks once no peer can touch them."""
        if not entry.outcome_reported and len(entry.landed) + len(entry.failed) == self._identity.num_ranks:
            entry.outcome_reported = True
            if not entry.failed:
                outcome.landed.append(joined(entry))
                self._forget(entry)
                return
            worst = min(entry.failed, key=lambda one: one.arrived.stop)
            self._gave_up_on(entry, worst.reason)
            worst = replace(worst, source=entry.source)
            (outcome.fatal if entry.policy is FailurePolicy.FAIL else outcome.failed).append(worst)
        self._release_if_ended(entry, outcome)

    def _release_if_ended(self, entry: DecodeHandoff, outcome: OutcomeBuilder) -> None:
        if entry.outcome_reported and len(entry.landed) + entry.released_by == self._identity.num_ranks:
            self._forget(entry)
            outcome.released.append(entry.transfer)

    def _gave_up_on(self, entry: DecodeHandoff, reason: str) -> None:
        if (fetch := self._fetching.get(entry.request)) is not None:
            fetch.next_source(reason)
        else:
            self._gave_up[entry.request] = reason

    def _forget(self, entry: DecodeHandoff) -> None:
        if self._decoding.get(entry.request) is entry:  # else the request fetches from another engine by now
            del self._decoding[entry.request]
        self._meeting.pop(entry.request, None)
        self._by_transfer.pop(entry.transfer, None)

    @property
    def num_receiving(self) -> int:
        """The number of decode requests that have blocks and wait for KV to come into them."""
        return sum(entry.started and not entry.outcome_reported for entry in self._decoding.values())

    @property
    def has_orders(self) -> bool:
        """True if orders wait for the next step."""
        return bool(self._next.orders())

    def has_pending_work(self) -> bool:
        """True while a hand-off is open here, on either side."""
        orders = self._next.cancel or self._next.withdraw
        return bool(self._by_transfer or self._declined or orders or self._fetches or self._holdings.num_questions)

    def hold_prefixes(self, holder: PrefixHolder) -> None:
        """From now on other engines may fetch what is in this engine's cache (SchedulerHalf)."""
        self._holdings.holder = holder
