"""The scheduler half in vLLM's terms, with a manager and requests that behave like vLLM's."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvferry.connector.base import EngineIdentity, Failed, Landed, StepReport
from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.connector.scheduler import make_scheduler
from kvferry.engines.vllm.describe.block_tables import GroupForm
from kvferry.engines.vllm.describe.engine_facts import backoff_tokens
from kvferry.engines.vllm.scheduler_side.scheduler import VllmScheduler
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.description import CacheKind
from kvferry.settings import FailurePolicy, FerrySettings, TransferMode, TransferSettings
from kvferry.wire.prompt_digest import Agreement, Prompt

FULL = GroupForm(kind=CacheKind.FULL, block_tokens=16, kernel_tokens=16)
STATE = GroupForm(kind=CacheKind.STATE, block_tokens=0, kernel_tokens=0)


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0


@dataclass
class Pool:
    """Counts references as vLLM's BlockPool does; a block without one can be allocated."""

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1


@dataclass
class Blocks:
    blocks: tuple[list[Block], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in group] for group in self.blocks)


@dataclass
class Manager:
    held: dict[str, tuple[list[Block], ...]] = field(default_factory=dict)
    block_pool: Pool = field(default_factory=Pool)

    def allocate(self, request_id: str, *groups: int) -> Blocks:
        fresh = tuple([Block(10 * g + i + 1, 1) for i in range(count)] for g, count in enumerate(groups))
        self.held[request_id] = fresh
        return Blocks(fresh)

    def get_blocks(self, request_id: str) -> Blocks:
        return Blocks(self.held.get(request_id, ([],)))

    def pop_blocks_for_free(self, request: Any) -> list[Block]:
        return [block for group in self.held.pop(request.request_id, ()) for block in group]

    def free(self, request_id: str) -> None:
        self.block_pool.free_blocks([block for group in self.held.pop(request_id, ()) for block in group])


@dataclass
class Request:
    request_id: str
    kv_transfer_params: Any
    prompt_token_ids: list[int] = field(default_factory=lambda: list(range(40)))
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    max_tokens: int = 16
    skips_cache: bool = False
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Any = None
    prompt_embeds: Any = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self._all_token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    def get_skip_reading_prefix_cache(self) -> bool:
        return self.skips_cache


class Board:
    """The handshake's answer, as the test sets it."""

    def __init__(self) -> None:
        self.answer = PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("i"))

    def view(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int) -> PeerView:
        return self.answer


class Engine:
    """A scheduler half of one rank."""

    def __init__(
        self,
        mode: TransferMode = TransferMode.PULL,
        policy: FailurePolicy = FailurePolicy.RECOMPUTE,
        forms: tuple[GroupForm, ...] = (FULL,),
        backoff: int = 0,
    ) -> None:
        settings = FerrySettings(transfer=TransferSettings(mode=mode, on_failure=policy, first_token=False))
        self.board = Board()
        me = EngineIdentity(EngineId("me"), Incarnation("x"), "127.0.0.1", 1)
        self.half = VllmScheduler(
            make_scheduler(me, self.board, settings),
            forms,
            engine_id="me",
            mode=mode,
            policy=policy,
            backoff=backoff,
            progress=True,
            group_ids=range(len(forms)),
        )
        self.manager = Manager()
        self.half.bind(self.manager)

    def orders(self, *preempted: str) -> Any:
        self.half.prepare(preempted)
        return self.half.build_orders()


def from_prefill(transfer: str = "t1", **more: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": 5,
        **more,
    }


def landed(transfer: str = "t1", request: str = "r", stop: int = 40) -> StepReport:
    return StepReport(landed=(Landed(TransferId(transfer), RequestId(request), TokenRange(0, stop), 1, 1, 0.1),))


def failed(transfer: str = "t1", request: str = "r", *, released: bool = False) -> StepReport:
    gone = frozenset({TransferId(transfer)}) if released else frozenset()
    bad = Failed(TransferId(transfer), RequestId(request), "the peer is gone", TokenRange(0, 0))
    return StepReport(failed=(bad,), released=gone)


def released(transfer: str = "t1") -> StepReport:
    return StepReport(released=frozenset({TransferId(transfer)}))


def waiting(engine: Engine, params: dict[str, Any] | None = None, cached: int = 0) -> Request:
    """Makes a decode request that waits for its KV in its own blocks."""
    request = Request("r", params or from_prefill())
    engine.half.on_new_request(request)
    num_tokens, later = engine.half.get_num_new_matched_tokens(request, cached)
    assert num_tokens
    assert later
    blocks = engine.manager.allocate("r", *(3 for _ in engine.half._forms))
    engine.half.update_state_after_alloc(request, blocks, num_tokens)
    request.num_computed_tokens = cached + num_tokens
    return request


# Decode


def test_a_remote_prefill_from_arrival_to_landing() -> None:
    engine = Engine()
    waiting(engine)
    orders, failing = engine.orders()
    (want,) = orders.fetch
    assert (want.wanted, want.tables) == (TokenRange(0, 40), (BlockTable(0, 0, (1, 2, 3)),))
    assert not failing
    ended = engine.half.update([landed()])
    assert ended.received == {"r"}
    assert not ended.sent
    assert not engine.half.has_pending_work()


def test_what_is_cached_here_is_not_requested() -> None:  # R30
    engine = Engine()
    waiting(engine, cached=16)
    assert engine.orders()[0].fetch[0].wanted == TokenRange(16, 40)


def test_prefill_is_informed_if_all_is_cached_here() -> None:  # R25
    engine = Engine()
    request = Request("r", from_prefill())
    engine.half.on_new_request(request)
    assert engine.half.get_num_new_matched_tokens(request, 40) == (0, False)
    engine.half.update_state_after_alloc(request, engine.manager.allocate("r", 3), 0)
    assert engine.orders()[0].fetch[0].wanted == TokenRange(40, 40)
    assert engine.half.update([released()]).received == frozenset()


def test_the_second_call_after_the_load_changes_nothing() -> None:
    engine = Engine()
    request = waiting(engine)
    engine.orders()
    engine.half.update([landed()])
    engine.half.update_state_after_alloc(request, engine.manager.get_blocks("r"), 0)
    assert engine.half.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not engine.orders()[0]


def test_it_asks_again_while_the_handshake_runs() -> None:
    engine = Engine()
    engine.board.answer = PeerView(PeerStatus.ASKING)
    request = Request("r", from_prefill())
    engine.half.on_new_request(request)
    assert engine.half.get_num_new_matched_tokens(request, 0) == (None, False)
    engine.board.answer = PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("i"))
    assert engine.half.get_num_new_matched_tokens(request, 0) == (40, True)


def test_prompt_logprobs_do_not_wait_for_a_handshake() -> None:
    """vLLM continues with such a request, whatever we answer."""
    engine = Engine()
    engine.board.answer = PeerView(PeerStatus.ASKING)
    request = Request("r", from_prefill())
    engine.half.on_new_request(request)
    engine.half.get_num_new_matched_tokens(request, 0)
    engine.half.update_state_after_alloc(request, engine.manager.allocate("r", 3), 0)
    assert not engine.orders()[0].fetch
    assert engine.half.request_finished(request, ([1, 2, 3],), well=True) == (False, None)


def test_an_abort_in_flight_keeps_the_blocks_until_no_peer_can_write() -> None:  # R28
    engine = Engine()
    request = waiting(engine)
    engine.orders()
    assert engine.half.request_finished(request, ([1, 2, 3],), well=False) == (True, None)
    assert engine.orders()[0].cancel
    assert engine.half.update([failed()]).received == frozenset()
    assert engine.half.update([released()]).sent == {"r"}
    assert not engine.half.has_pending_work()


def test_an_abort_in_the_queue_frees_prefill_and_keeps_nothing() -> None:
    engine = Engine()
    request = Request("r", from_prefill())
    engine.half.on_new_request(request)
    engine.half.get_num_new_matched_tokens(request, 0)
    assert engine.half.request_finished(request, ([],), well=False) == (False, None)
    assert engine.orders()[0].cancel
    assert not engine.half.has_pending_work()


# Failures


def test_recompute_starts_again_at_once_and_the_old_blocks_are_not_reused() -> None:  # R28 R29
    engine = Engine()
    request = waiting(engine)
    engine.orders()
    old = [block for group in engine.manager.held["r"] for block in group]
    ended = engine.half.update([failed()])
    assert ended.received == {"r"}
    assert request.num_computed_tokens == 0
    assert engine.manager.get_blocks("r").blocks == ([],)
    assert {block.ref_cnt for block in old} == {1}, "a peer may still write into them"
    assert engine.half.has_pending_work()
    assert engine.half.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.half.update([released()])
    assert {block.ref_cnt for block in old} == {0}
    assert not engine.half.has_pending_work()


def test_a_failure_that_is_safe_already_frees_the_blocks_in_the_same_step() -> None:
    engine = Engine()
    waiting(engine)
    engine.orders()
    old = engine.manager.held["r"][0]
    engine.half.update([failed(released=True)])
    assert {block.ref_cnt for block in old} == {0}


def test_the_policy_fail_ends_the_request_and_every_worker_reports_it() -> None:  # R29
    engine = Engine(policy=FailurePolicy.FAIL)
    request = waiting(engine)
    engine.orders()
    assert engine.half.update([failed(released=True)]).received == frozenset()
    assert engine.orders()[1] == {"r"}
    assert engine.orders()[1] == frozenset(), "once"
    assert engine.half.request_finished(request, ([],), well=False) == (False, None)


@pytest.mark.parametrize(
    "raw", [from_prefill(transfer_mode="push"), {"do_remote_prefill": True}, {"do_remote_prefill": 3}]
)
def test_what_cannot_come_fails_by_policy_after_blocks_were_given(raw: dict[str, Any]) -> None:
    """vLLM ends a request with an error only while it waits for a load."""
    engine = Engine(policy=FailurePolicy.FAIL)
    request = Request("r", raw)
    engine.half.on_new_request(request)
    assert engine.half.get_num_new_matched_tokens(request, 16) == (24, True)
    engine.half.update_state_after_alloc(request, engine.manager.allocate("r", 3), 24)
    assert engine.orders()[1] == {"r"}


@pytest.mark.parametrize(
    "raw", [from_prefill(transfer_mode="push"), {"do_remote_prefill": True}, {"do_remote_prefill": 3}]
)
def test_what_cannot_come_is_computed_here_by_policy(raw: dict[str, Any]) -> None:
    engine = Engine()
    request = Request("r", raw)
    engine.half.on_new_request(request)
    assert engine.half.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.half.update_state_after_alloc(request, engine.manager.allocate("r", 3), 0)
    assert engine.half.request_finished(request, ([1, 2, 3],), well=True) == (False, None)
    assert not engine.half.has_pending_work()


def test_a_refused_peer_costs_the_next_request_nothing() -> None:  # R24
    engine = Engine()
    engine.board.answer = PeerView(PeerStatus.REFUSED, "kv.dtype differs")
    one = Request("r", from_prefill())
    engine.half.on_new_request(one)
    assert engine.half.get_num_new_matched_tokens(one, 0) == (0, False)
    engine.board.answer = PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("i"))
    other = Request("r2", from_prefill("t2"))
    engine.half.on_new_request(other)
    assert engine.half.get_num_new_matched_tokens(other, 0) == (40, True)


# Prefill


def prefilling(engine: Engine, **more: Any) -> Request:
    request = Request("r", {"do_remote_decode": True, "transfer_id": "t1", **more})
    engine.half.on_new_request(request)
    assert engine.half.get_num_new_matched_tokens(request, 0) == (0, False)
    blocks = engine.manager.allocate("r", *(1 if form is STATE else 3 for form in engine.half._forms))
    engine.half.update_state_after_alloc(request, blocks, 0)
    return request


def test_a_remote_decode_from_arrival_to_release() -> None:  # R15 R25
    engine = Engine()
    request = prefilling(engine)
    request.num_computed_tokens = 40
    blocks = engine.manager.held["r"][0]
    keep, returned = engine.half.request_finished(request, ([1, 2, 3],), well=True)
    assert not keep, "a request that vLLM holds for us has it step all the time"
    engine.manager.free("r")
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert returned is not None
    assert returned["do_remote_prefill"] is True
    assert returned["transfer_mode"] == "pull"
    assert (returned["remote_engine_id"], returned["remote_request_id"], returned["remote_num_tokens"]) == (
        "me",
        "r",
        40,
    )
    assert (returned["remote_block_ids"], returned["tp_size"], returned["pp_size"]) == ([[1, 2, 3]], 1, 1)
    had_orders = engine.half.has_orders
    (offer,) = engine.orders()[0].offer
    assert had_orders
    assert offer.final
    assert not engine.half.has_orders, "the engine may sleep"
    assert engine.half.has_pending_work()
    assert engine.half.update([released()]).sent == frozenset(), "vLLM has forgotten it"
    assert [block.ref_cnt for block in blocks] == [0, 0, 0]
    assert not engine.half.has_pending_work()


def test_blocks_that_were_offered_chunk_by_chunk_come_back_once() -> None:  # R28
    engine = Engine(forms=(FULL, STATE))
    request = prefilling(engine)
    blocks = [block for group in engine.manager.held["r"] for block in group]
    request.num_computed_tokens = 16
    engine.orders()
    request.num_computed_tokens = 40
    engine.half.request_finished(request, ([1, 2, 3], [11]), well=True)
    engine.manager.free("r")
    assert [block.ref_cnt for block in blocks] == [1, 1, 1, 1]
    engine.half.update([released()])
    assert [block.ref_cnt for block in blocks] == [0, 0, 0, 0]


def test_only_stored_tokens_of_a_chunk_are_offered() -> None:
    engine = Engine()
    request = prefilling(engine)
    request.num_computed_tokens, request.num_in_flight_tokens = 32, 16  # the second chunk is being computed
    (offer,) = engine.orders()[0].offer
    assert (offer.ready, offer.final) == (TokenRange(0, 16), False)
    assert not engine.orders()[0].offer, "nothing new"


def test_a_prefix_hit_is_offered_only_after_a_step_of_its_own_request() -> None:  # R28
    """Another request's step may still be writing the blocks of the hit: vLLM schedules asynchronously."""
    engine = Engine()
    request = prefilling(engine)
    assert engine.half.get_num_new_matched_tokens(request, 16) == (0, False)
    request.num_computed_tokens = 16
    assert not engine.orders()[0].offer
    request.num_computed_tokens, request.num_in_flight_tokens = 32, 16
    assert not engine.orders()[0].offer
    request.num_in_flight_tokens = 0
    (offer,) = engine.orders()[0].offer
    assert (offer.ready, offer.final) == (TokenRange(0, 32), False)


def test_after_a_preemption_offered_blocks_are_not_reused_until_the_peer_is_done() -> None:  # R28
    engine = Engine()
    request = prefilling(engine)
    request.num_computed_tokens = 16
    engine.orders()
    blocks = engine.manager.held["r"][0]
    engine.manager.free("r")  # vLLM frees before it informs us
    request.num_computed_tokens = 0
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    orders, _ = engine.orders("r")
    assert orders.withdraw
    engine.half.update([released()])
    assert [block.ref_cnt for block in blocks] == [0, 0, 0]


def test_a_prefill_that_ends_for_another_reason_is_withdrawn() -> None:
    engine = Engine()
    request = prefilling(engine)
    request.num_computed_tokens = 16
    engine.orders()
    blocks = engine.manager.held["r"][0]
    keep, returned = engine.half.request_finished(request, ([1, 2, 3],), well=False)
    assert (keep, returned) == (False, None)
    engine.manager.free("r")
    assert engine.orders()[0].withdraw
    assert [block.ref_cnt for block in blocks] == [1, 1, 1], "a peer may be reading them"
    engine.half.update([released()])
    assert [block.ref_cnt for block in blocks] == [0, 0, 0]


def test_the_end_of_the_prompt_is_left_to_decode_once() -> None:  # R32 R33
    engine = Engine(forms=(FULL, STATE), backoff=1)
    request = Request("r", {"do_remote_decode": True, "transfer_id": "t1"})
    engine.half.on_new_request(request)
    assert (request.num_prompt_tokens, request.num_tokens, request.max_tokens) == (39, 39, 1)
    engine.half.get_num_new_matched_tokens(request, 0)
    engine.manager.allocate("r", 3, 1)
    request.num_computed_tokens = 39
    engine.half.request_finished(request, ([1, 2, 3], [11]), well=True)
    (offer,) = engine.orders()[0].offer
    assert offer.tables[1] == BlockTable(1, 39, (11,))
    assert offer.ready == TokenRange(0, 39)


def test_decode_requests_what_prefill_computes_and_no_more() -> None:  # R32
    engine = Engine(TransferMode.PUSH, forms=(FULL, STATE), backoff=1)
    waiting(engine)
    (want,) = engine.orders()[0].fetch
    assert want.wanted == TokenRange(0, 39)
    assert want.tables[1].first_token == 39


@pytest.mark.parametrize(
    ("lookahead", "states", "windows", "wanted"),
    [(0, False, False, 0), (1, False, False, 0), (3, False, False, 2), (0, True, False, 1), (0, False, True, 1),
     (3, True, True, 2)],
)  # fmt: skip
def test_the_back_off(lookahead: int, states: bool, windows: bool, wanted: int) -> None:  # R32
    assert backoff_tokens(lookahead, states=states, windows=windows) == wanted


def test_a_shorter_hand_off_goes_on_after_what_arrived() -> None:  # R51
    """Prefill's prompt was another one: vLLM computes the rest, and caches nothing of what was matched beyond."""
    engine = Engine()
    request = waiting(engine)
    engine.orders()
    short = replace(landed().landed[0], arrived=TokenRange(0, 17), difference="another prompt")
    assert engine.half.update([StepReport(landed=(short,))]).received == {"r"}
    assert request.num_computed_tokens == 17
    assert engine.manager.get_blocks("r").get_block_ids() != ([],)


def test_a_shorter_hand_off_of_windows_or_states_starts_from_nothing() -> None:  # R51
    engine = Engine(forms=(FULL, STATE))
    request = waiting(engine)
    engine.orders()
    short = replace(landed().landed[0], arrived=TokenRange(0, 17))
    assert engine.half.update([StepReport(landed=(short,))]).received == {"r"}
    assert request.num_computed_tokens == 0
    assert engine.manager.get_blocks("r").get_block_ids() == ([],)  # vLLM allocates them again


def test_offers_and_fetches_know_the_prompt_to_its_last_token_and_its_salt() -> None:  # R51
    engine = Engine(backoff=1)
    request = Request("r", {"do_remote_decode": True, "transfer_id": "t1"}, cache_salt="tenant")
    whole = Prompt.of(list(request.prompt_token_ids), "[('cache_salt', 'tenant')]")
    engine.half.on_new_request(request)
    assert request.num_prompt_tokens == 39  # the back-off is not computed here, and still part of the prompt
    engine.manager.allocate("r", 3)
    request.num_computed_tokens = 39
    engine.half.request_finished(request, ([1, 2, 3],), well=True)
    (offer,) = engine.orders()[0].offer
    assert offer.prompt == whole
    decode = Engine(backoff=1)
    asked = Request("r", from_prefill(), cache_salt="other")
    decode.half.on_new_request(asked)
    tokens, _ = decode.half.get_num_new_matched_tokens(asked, 0)
    assert tokens == 39
    decode.half.update_state_after_alloc(asked, decode.manager.allocate("r", 3), tokens)
    (fetch,) = decode.orders()[0].fetch
    assert whole.agreement(fetch.prompt) == Agreement(0, whole=False)
