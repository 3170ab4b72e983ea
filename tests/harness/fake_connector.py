"""A connector whose peer is the test: it records the engine's orders, and answers as the test has set."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvferry.connector.base import Failed, Landed, Match, Outcome, PrefixHolder, RequestView, StepOrders, StepReport
from kvferry.engines.mini.cache.pool import KVCache
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.description import CacheKind
from kvferry.wire.first_token import FirstToken, first_token_of
from kvferry.wire.params import HandoffParams

__all__ = ["FakeConnector", "copy_tokens"]


@dataclass
class FakeConnector:
    """Both halves of a connector. The transfer id is `t-` followed by the request's id."""

    cache: KVCache
    answers: list[Match] = field(default_factory=list)
    """Answers of `match`, in order. After the last one, the whole prompt or `remote_num_tokens` comes from outside."""
    holds: bool = True
    """True if `request_finished` asks the engine to keep the blocks."""
    outcomes: list[Outcome] = field(default_factory=list)
    """What `update` returns, in order."""
    seen: list[str] = field(default_factory=list)
    tables: dict[RequestId, tuple[BlockTable, ...]] = field(default_factory=dict)
    cached: dict[RequestId, int] = field(default_factory=dict)
    progress: dict[RequestId, list[int]] = field(default_factory=dict)
    first_tokens: dict[RequestId, FirstToken | None] = field(default_factory=dict)
    open: set[RequestId] = field(default_factory=set)
    """Transfers that have not ended."""

    num_deferred: int = 0
    """The number of prompt tokens that prefill leaves to decode."""
    may_start_again: bool = False
    """Whether a request with an open hand-off may start again, as after a step that failed."""

    # Scheduler half

    def handoff_tokens(self, num_prompt_tokens: int) -> int:
        return max(0, num_prompt_tokens - self.num_deferred)

    def on_new_request(self, request: RequestView) -> None:
        self.seen.append(f"new {request.request_id}")

    def carried_first_token(self, request: RequestView) -> FirstToken | None:
        return None if request.handoff is None else first_token_of(request.handoff)

    def match(self, request: RequestView, num_cached_tokens: int) -> Match:
        self.seen.append(f"match {request.request_id} {num_cached_tokens}")
        if self.answers:
            return self.answers.pop(0)
        handoff = request.handoff
        remote = handoff.remote_num_tokens if handoff else None
        there = self.handoff_tokens(request.num_prompt_tokens)
        return Match(max(0, (there if remote is None else min(there, remote)) - num_cached_tokens))

    def after_alloc(self, request: RequestView, tables: Sequence[BlockTable], num_cached_tokens: int) -> None:
        self.seen.append(f"alloc {request.request_id}")
        self.tables[request.request_id] = tuple(tables)
        self.cached[request.request_id] = num_cached_tokens
        self.open.add(request.request_id)

    def computed(self, request: RequestView, tables: Sequence[BlockTable], num_computed_tokens: int) -> None:
        self.progress.setdefault(request.request_id, []).append(num_computed_tokens)
        self.tables[request.request_id] = tuple(tables)
        self.open.add(request.request_id)

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
        name = request.request_id
        aborted = aborted or complete  # as in pull
        self.seen.append(f"finished {name}{' aborted' if aborted else ''}")
        self.first_tokens[name] = first_token
        if request.handoff is None or name not in self.open or not self.holds:
            return None, None
        params = None
        if request.handoff.do_remote_decode and not aborted:
            params = HandoffParams(
                do_remote_prefill=True,
                transfer_id=f"t-{name}",
                remote_num_tokens=num_computed_tokens,
                first_token=first_token.token if first_token else None,
                first_logprob=first_token.logprob if first_token else None,
                first_top_logprobs=list(first_token.top) if first_token else None,
            )
        return TransferId(f"t-{name}"), params

    def preempted(self, request: RequestView) -> TransferId | None:
        name = request.request_id
        assert name not in self.open or self.may_start_again, "a request with an open hand-off was preempted"
        self.seen.append(f"preempted {name}")
        return TransferId(f"t-{name}") if name in self.open else None

    def withdraw(self, transfer: TransferId, reason: str) -> bool:
        self.seen.append(f"withdraw {transfer}")
        return False

    def decline(self, params: HandoffParams, reason: str) -> None:
        self.seen.append(f"decline {params.transfer_id} {reason}")

    def hold_prefixes(self, holder: PrefixHolder) -> None:
        self.holder = holder

    def build_orders(self) -> StepOrders:
        return StepOrders()

    def update(self, reports: Sequence[StepReport]) -> Outcome:
        return self.outcomes.pop(0) if self.outcomes else Outcome()

    def has_pending_work(self) -> bool:
        return bool(self.outcomes)

    # Worker half

    def start_step(self, orders: StepOrders) -> None:
        """Does nothing."""

    def end_step(self) -> StepReport:
        return StepReport()

    def close(self) -> None:
        self.seen.append("close")

    # The peer

    def land(self, name: str, stop: int, *, note: bytes = b"", difference: str = "") -> None:
        """Reports that the tokens up to `stop` have arrived. `difference`: how prefill's prompt is another one."""
        request = RequestId(name)
        self.open.discard(request)
        arrived = TokenRange(self.cached[request], stop)
        landed = Landed(TransferId(f"t-{name}"), request, arrived, 1000, 3, 0.5, 7, note, difference=difference)
        self.outcomes.append(Outcome(landed=(landed,)))

    def fail(self, name: str, *, recompute: bool = True, arrived: int = 0, released: bool = False) -> None:
        """Reports a failure: tokens before `arrived` have come; with `released`, no peer can touch the blocks now."""
        request, transfer = RequestId(name), TransferId(f"t-{name}")
        self.open.discard(request)
        start = self.cached.get(request, 0)
        ended = (Failed(transfer, request, "the peer is gone", TokenRange(start, max(start, arrived))),)
        outcome = Outcome(failed=ended) if recompute else Outcome(fatal=ended)
        self.outcomes.append(replace(outcome, released=(transfer,) if released else ()))

    def release(self, name: str) -> None:
        """Reports that no peer touches the transfer's blocks any more."""
        self.outcomes.append(Outcome(released=(TransferId(f"t-{name}"),)))


def copy_tokens(
    source: KVCache, source_tables: Sequence[BlockTable], target: KVCache, target_tables: Sequence[BlockTable],
    start: int, stop: int,
) -> None:  # fmt: skip
    """Copies as a transport does, token by token: what both tables have of a window, and the state after `stop`."""
    for (layer, name), (part, group, _) in source.placement.parts.items():
        from_kv, to_kv = source.view(layer, name), target.view(layer, name)
        here, there = source_tables[group], target_tables[group]
        if source.groups[group].kind is CacheKind.STATE:
            assert here.first_token == there.first_token == stop, "states of different tokens"
            to_kv[there.block_ids[0]] = from_kv[here.block_ids[0]]
            continue
        for token in range(max(start, here.first_token, there.first_token), stop):
            at, to = (token - here.first_token), (token - there.first_token)
            to_kv[there.block_ids[to // target.block_tokens]].select(part.token_at, to % target.block_tokens).copy_(
                from_kv[here.block_ids[at // source.block_tokens]].select(part.token_at, at % source.block_tokens)
            )
