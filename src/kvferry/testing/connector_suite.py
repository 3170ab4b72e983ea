"""What every engine must do with the two halves. Subclass ConnectorSuite, say how an engine is made, run pytest.

    class TestMine(ConnectorSuite):
        def make_engine(self, role: Role, settings: FerrySettings) -> EngineUnderTest:
            return MyAdapter(role, settings)

The suite makes a prefill and a decode engine, which meet over the side channel and hand KV over the memory transport,
in this process. Requests have prompts that share no block. Meanwhile a Contract sits between each engine and its
scheduler half, and raises ContractBroken with one sentence for each rule that the engine breaks. Whatever a test did,
in the end every block must be free again.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

from kvferry.connector.base import Match, Outcome, RequestView, StepOrders, StepReport
from kvferry.connector.engine import EngineConnector
from kvferry.connector.scheduler import HandoffScheduler
from kvferry.connector.worker import HandoffWorker
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import BlockTable
from kvferry.settings import FailurePolicy, FerrySettings, LeaseSettings, Role, TransferMode, TransferSettings
from kvferry.wire.first_token import FirstToken
from kvferry.wire.params import HandoffParams

__all__ = ["ConnectorSuite", "Contract", "ContractBroken", "Ended", "EngineUnderTest", "Pair", "prompt_of"]

_PAUSE = threading.Event()
_MODES = [TransferMode.PULL, TransferMode.PUSH]


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended."""

    request_id: str
    tokens: tuple[int, ...] = ()
    """The tokens of the answer."""
    handoff: HandoffParams | None = None
    """What a prefill engine returns for the decode engine."""
    error: str = ""


class EngineUnderTest(Protocol):
    """What the suite needs of an engine: an adapter around yours."""

    @property
    def connector(self) -> EngineConnector:
        """The engine's connector."""
        ...

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks that are not free. Cached blocks that nothing uses are free."""
        ...

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        handoff: HandoffParams | None = None,
        on_failure: FailurePolicy | None = None,
    ) -> None:
        """Queue a request, to be answered greedily with exactly `max_tokens` tokens."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request at once, whatever it is doing."""
        ...

    def step(self) -> Sequence[Ended]:
        """Make one step, and return the requests that have ended. Returns at once if there is nothing to compute."""
        ...

    def has_work(self) -> bool:
        """True while the engine must be stepped."""
        ...

    def close(self) -> None:
        """End the engine and its connector."""
        ...


class ContractBroken(AssertionError):
    """The engine has broken a rule of the two halves."""


@dataclass
class _Seen:
    """What the contract knows of one request."""

    matched: Match | None = None
    started: bool = False
    offered: int = 0
    transfer: TransferId | None = None
    blocks: set[tuple[int, int]] = field(default_factory=set)
    """(group, block id) that a peer may touch."""


class Contract:
    """A scheduler half that checks how it is called, in front of the real one."""

    def __init__(self, half: HandoffScheduler, block_tokens: Sequence[int]) -> None:
        """`block_tokens`: per cache group; 0 for a group that keeps one state."""
        self._half = half
        self._block_tokens = block_tokens
        self._open: dict[RequestId, _Seen] = {}
        self._held: dict[TransferId, _Seen] = {}
        self.built: list[StepOrders] = []
        """Orders that a worker half must receive."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._half, name)

    def on_new_request(self, request: RequestView) -> None:
        """Once per request, before anything else about it."""
        if request.request_id in self._open:
            raise ContractBroken(f"on_new_request({request.request_id!r}) is called twice")
        self._open[request.request_id] = _Seen()
        self._half.on_new_request(request)

    def match(self, request: RequestView, num_cached_tokens: int) -> Match:
        """Only for a request that is known and has no blocks of a hand-off."""
        seen = self._seen("match", request)
        seen.matched = self._half.match(request, num_cached_tokens)
        return seen.matched

    def after_alloc(self, request: RequestView, tables: Sequence[BlockTable], num_cached_tokens: int) -> None:
        """Only after `match` has said how many tokens come, and into blocks that no peer may touch."""
        seen = self._seen("after_alloc", request)
        if seen.matched is None or seen.matched.wait or seen.matched.error:
            raise ContractBroken(f"after_alloc({request.request_id!r}) comes without a match: {seen.matched}")
        if seen.started:
            raise ContractBroken(f"after_alloc({request.request_id!r}) is called twice")
        fresh = self._blocks(tables, num_cached_tokens)
        self._check_free(request, fresh)
        seen.started, seen.blocks = True, fresh
        self._half.after_alloc(request, tables, num_cached_tokens)

    def computed(self, request: RequestView, tables: Sequence[BlockTable], num_computed_tokens: int) -> None:
        """Counts only grow, and nothing is computed in blocks that a peer of another request may touch."""
        seen = self._seen("computed", request)
        if num_computed_tokens < seen.offered:
            raise ContractBroken(
                f"computed({request.request_id!r}) goes back from {seen.offered} to {num_computed_tokens} tokens"
            )
        blocks = self._blocks(tables, 0)
        self._check_free(request, blocks)
        seen.offered, seen.blocks = num_computed_tokens, blocks
        self._half.computed(request, tables, num_computed_tokens)

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
        """Once per request."""
        seen = self._seen("request_finished", request)
        transfer, params = self._half.request_finished(
            request, tables, num_computed_tokens, first_token=first_token, aborted=aborted, complete=complete
        )
        del self._open[request.request_id]
        if transfer is not None:
            seen.blocks |= self._blocks(tables, 0)
            self._held[transfer] = seen
        return transfer, params

    def preempted(self, request: RequestView) -> TransferId | None:
        """The request goes on later; its blocks may have to wait."""
        seen = self._seen("preempted", request)
        transfer = self._half.preempted(request)
        if transfer is not None:
            self._held[transfer] = _Seen(blocks=seen.blocks)
        seen.blocks, seen.offered = set(), 0
        return transfer

    def decline(self, params: HandoffParams, reason: str) -> None:
        """For requests that never came to be."""
        self._half.decline(params, reason)

    def build_orders(self) -> StepOrders:
        """Every record of orders must reach the worker halves: see `missing_orders`."""
        orders = self._half.build_orders()
        if orders:
            self.built.append(orders)
        return orders

    def update(self, reports: Sequence[StepReport]) -> Outcome:
        """Blocks of a hand-off are the engine's again when it has landed, or is released."""
        outcome = self._half.update(reports)
        for landed in outcome.landed:
            if (seen := self._open.get(landed.request)) is not None:
                seen.blocks = set()
        for failed in (*outcome.failed, *outcome.fatal):
            if (seen := self._open.get(failed.request)) is not None:
                self._held[failed.transfer] = _Seen(blocks=seen.blocks)
                seen.blocks, seen.started, seen.matched = set(), False, None
        for transfer in outcome.released:
            self._held.pop(transfer, None)
        return outcome

    def check_ended(self) -> None:
        """Nothing may be open any more."""
        if self._open:
            raise ContractBroken(f"request_finished was never called for {sorted(self._open)}")
        if self._half.has_pending_work():
            raise ContractBroken("the engine says that it has no work, but a hand-off is open")

    def _seen(self, call: str, request: RequestView) -> _Seen:
        seen = self._open.get(request.request_id)
        if seen is None:
            raise ContractBroken(f"{call}({request.request_id!r}) comes before on_new_request or after the end")
        return seen

    def _blocks(self, tables: Sequence[BlockTable], first_token: int) -> set[tuple[int, int]]:
        """The blocks from the one of `first_token` on. What is cached before may be shared, for it is only read."""
        found = set()
        for table in tables:
            size = self._block_tokens[table.group]
            skipped = max(0, first_token - table.first_token) // size if size else 0
            found |= {(table.group, int(block)) for block in table.block_ids[skipped:]}
        return found

    def _check_free(self, request: RequestView, blocks: set[tuple[int, int]]) -> None:
        others = itertools.chain(
            self._held.items(), ((name, seen) for name, seen in self._open.items() if name != request.request_id)
        )
        for name, seen in others:
            if shared := blocks & seen.blocks:
                raise ContractBroken(
                    f"{request.request_id!r} is given blocks {sorted(shared)}, which a peer may touch for {name!r}: "
                    "they are the engine's again when `update` says so"
                )


class Pair:
    """A prefill and a decode engine, and what has ended on them."""

    def __init__(self, prefill: EngineUnderTest, decode: EngineUnderTest, mode: TransferMode) -> None:
        self.prefill, self.decode, self.mode = prefill, decode, mode
        self.ended: dict[EngineUnderTest, dict[str, Ended]] = {prefill: {}, decode: {}}

    def step(self) -> None:
        """Step both engines."""
        for engine, ended in self.ended.items():
            for one in engine.step():
                assert one.request_id not in ended, f"{one.request_id} has ended twice"
                ended[one.request_id] = one

    def until(self, done: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
        """Step until the condition holds."""
        until_s = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < until_s, f"not in {timeout_s:g} s: {what}"
            self.step()
            _PAUSE.wait(0.0005)

    def prefilled(self, name: str, prompt: Sequence[int]) -> HandoffParams:
        """Prefill a request. Returns what its decode engine is given, in either mode."""
        self.start_prefill(name, prompt)
        return self.await_prefill(name)

    def await_prefill(self, name: str) -> HandoffParams:
        """Step until the prefill has ended. Returns the same."""
        self.until(lambda: name in self.ended[self.prefill], f"the prefill of {name}")
        params = self.ended[self.prefill][name].handoff
        assert params is not None, f"the prefill of {name} returned no parameters"
        return params if self.mode is TransferMode.PULL else self.address(name)

    def start_prefill(self, name: str, prompt: Sequence[int]) -> None:
        """Queue a request whose prompt is all that prefill computes."""
        params = HandoffParams(do_remote_decode=True, transfer_id=f"t-{name}")
        self.prefill.add(name, prompt, max_tokens=1, handoff=params)

    def address(self, name: str, transfer: str | None = None) -> HandoffParams:
        """What a router tells decode in push mode, before prefill has answered."""
        identity = self.prefill.connector.identity
        return HandoffParams(
            do_remote_prefill=True,
            transfer_mode=self.mode,
            transfer_id=transfer or f"t-{name}",
            remote_engine_id=identity.engine,
            remote_host=identity.host,
            remote_port=identity.port,
        )

    def decoded(self, name: str) -> Ended:
        """The end of a request on the decode engine."""
        self.until(lambda: name in self.ended[self.decode], f"the end of {name}")
        return self.ended[self.decode][name]

    def settle(self) -> None:
        """Step until neither engine has work; then every block must be free."""
        self.until(lambda: not self.prefill.has_work() and not self.decode.has_work(), "an end of all work")
        in_use = {name: getattr(self, name).num_blocks_in_use for name in ("prefill", "decode")}
        assert in_use == {"prefill": 0, "decode": 0}, f"blocks are still in use: {in_use}"


def prompt_of(index: int, length: int = 50) -> list[int]:
    """A prompt that shares no block with those of other indices. Token ids are below 250."""
    return [1 + (index * 37 + position * (index + 3)) % 249 for position in range(length)]


class ConnectorSuite:
    """Subclass it; say how an engine is made."""

    max_tokens = 6

    def make_engine(self, role: Role, settings: FerrySettings) -> EngineUnderTest:
        """A new engine with room for ten prompts of 64 tokens, on a model that every engine of this suite has."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contracts: list[Contract] = []
        start = EngineConnector.start

        def watched(connector: EngineConnector, ranks: Any, send: Any) -> Any:
            groups = ranks[0].layout.groups
            contract = Contract(start(connector, ranks, send), [group.block_tokens for group in groups])
            self.contracts.append(contract)
            return contract

        monkeypatch.setattr(EngineConnector, "start", watched)

    @pytest.fixture(params=_MODES)
    def pair(self, request: pytest.FixtureRequest) -> Iterator[Pair]:
        """Two engines in either mode, with short times. After the test nothing is open, and no block is in use."""
        settings = FerrySettings(
            transfer=TransferSettings(mode=request.param, transport="memory", staging_bytes=0, deadline_s=1.0),
            lease=LeaseSettings(ttl_s=1.0, renew_every_s=0.1, quarantine_s=0.1, standstill_s=0.1),
        )
        prefill = self.make_engine(Role.PREFILL, settings)
        try:
            decode = self.make_engine(Role.DECODE, settings)
            try:
                pair = Pair(prefill, decode, request.param)
                yield pair
                pair.settle()
                for contract in self.contracts:
                    contract.check_ended()
            finally:
                decode.close()
        finally:
            prefill.close()

    def alone(self, pair: Pair, prompt: Sequence[int]) -> tuple[int, ...]:
        """The answer of the decode engine without a hand-off. Asked after the hand-off, so that nothing is cached."""
        pair.decode.add("alone", prompt, max_tokens=self.max_tokens)
        return pair.decoded("alone").tokens

    # A hand-off that goes well

    def test_the_answer_is_the_one_of_one_engine_alone(self, pair: Pair) -> None:
        """Also if prefill's blocks are only then given back when the answer is under way."""
        prompt = prompt_of(0)
        pair.decode.add("r", prompt, max_tokens=self.max_tokens, handoff=pair.prefilled("r", prompt))
        answer = pair.decoded("r")
        assert answer.error == ""
        assert answer.tokens == self.alone(pair, prompt)
        assert len(answer.tokens) == self.max_tokens

    @pytest.mark.parametrize("pair", [TransferMode.PUSH], indirect=True)  # in pull, decode is asked after prefill
    def test_decode_may_be_asked_before_prefill_has_begun(self, pair: Pair) -> None:
        prompt = prompt_of(1)
        pair.decode.add("r", prompt, max_tokens=self.max_tokens, handoff=pair.address("r"))
        pair.step()
        pair.start_prefill("r", prompt)
        assert pair.decoded("r").tokens == self.alone(pair, prompt)

    def test_many_requests_are_handed_over_at_once(self, pair: Pair) -> None:
        prompts = {f"r{i}": prompt_of(i, 20 + 5 * i) for i in range(5)}
        for name, prompt in prompts.items():
            pair.start_prefill(name, prompt)
        for name, prompt in prompts.items():
            pair.decode.add(name, prompt, max_tokens=self.max_tokens, handoff=pair.await_prefill(name))
        answers = {name: pair.decoded(name) for name in prompts}
        assert [answer.error for answer in answers.values()] == [""] * 5

    def test_a_request_without_a_hand_off_is_an_ordinary_one(self, pair: Pair) -> None:
        pair.decode.add("r", prompt_of(2), max_tokens=self.max_tokens)
        assert len(pair.decoded("r").tokens) == self.max_tokens
        assert pair.decode.num_blocks_in_use == 0

    # Blocks

    def test_prefill_keeps_its_blocks_until_they_are_released(self, pair: Pair) -> None:
        """R25: without a decode engine that takes them, until the lease has ended."""
        pair.start_prefill("r", prompt_of(3))
        pair.until(lambda: "r" in pair.ended[pair.prefill], "the prefill")
        assert pair.prefill.num_blocks_in_use > 0
        assert pair.prefill.has_work(), "an engine steps while it holds blocks: nothing else would free them"

    def test_an_aborted_prefill_gives_its_blocks_back(self, pair: Pair) -> None:
        pair.start_prefill("r", prompt_of(4))
        pair.step()
        pair.prefill.abort("r")

    def test_an_abort_while_kv_comes_gives_all_blocks_back(self, pair: Pair) -> None:
        """The fixture checks the blocks of both engines; the contract, that none is used again too early."""
        prompt = prompt_of(5)
        pair.decode.add("r", prompt, max_tokens=self.max_tokens, handoff=pair.prefilled("r", prompt))
        pair.until(lambda: pair.decode.num_blocks_in_use or "r" in pair.ended[pair.decode], "blocks for the request")
        pair.decode.abort("r")
        pair.decode.add("next", prompt_of(6), max_tokens=self.max_tokens)
        assert len(pair.decoded("next").tokens) == self.max_tokens

    def test_an_abort_while_the_request_waits_for_a_handshake_gives_all_blocks_back(self, pair: Pair) -> None:
        prompt = prompt_of(7)
        pair.decode.add("r", prompt, max_tokens=self.max_tokens, handoff=pair.prefilled("r", prompt))
        pair.decode.abort("r")

    # Failure

    @pytest.mark.parametrize("policy", list(FailurePolicy))
    def test_kv_that_never_comes_is_computed_or_fails_the_request(self, pair: Pair, policy: FailurePolicy) -> None:
        """R29: no engine prefills this transfer, so the deadline ends it. The blocks come back in either case."""
        prompt = prompt_of(8)
        params = pair.address("r", transfer="never")
        pair.decode.add("r", prompt, max_tokens=self.max_tokens, handoff=params, on_failure=policy)
        self._check_failed(pair, prompt, policy)

    @pytest.mark.parametrize("policy", list(FailurePolicy))
    def test_a_peer_that_cannot_be_used_is_done_without_or_fails_the_request(
        self, pair: Pair, policy: FailurePolicy
    ) -> None:
        """`match` says so: either it returns no tokens, with the reason, or an error."""
        prompt = prompt_of(9)
        params = pair.address("r").to_dict() | {"remote_engine_id": "somebody-else"}
        handoff = HandoffParams.from_dict(params)
        pair.decode.add("r", prompt, max_tokens=self.max_tokens, handoff=handoff, on_failure=policy)
        self._check_failed(pair, prompt, policy)

    def _check_failed(self, pair: Pair, prompt: Sequence[int], policy: FailurePolicy) -> None:
        answer = pair.decoded("r")
        if policy is FailurePolicy.FAIL:
            assert answer.error, "the request ends with the reason"
            assert answer.tokens == ()
        else:
            assert answer.error == ""
            assert answer.tokens == self.alone(pair, prompt)

    # Every step

    def test_orders_reach_the_worker_half(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every record that `build_orders` returns is given to `start_step`, once, in the same order."""
        prompt = prompt_of(10)
        received: list[StepOrders] = []
        start_step = HandoffWorker.start_step

        def watched(worker: HandoffWorker, orders: StepOrders) -> None:
            if orders and not (orders.accepted or orders.gone):
                received.append(orders)
            start_step(worker, orders)

        monkeypatch.setattr(HandoffWorker, "start_step", watched)
        pair.decode.add("r", prompt, max_tokens=self.max_tokens, handoff=pair.prefilled("r", prompt))
        pair.decoded("r")
        for contract in self.contracts:
            missing = [orders for orders in contract.built if orders not in received]
            assert missing == []
        assert len(received) == sum(len(contract.built) for contract in self.contracts)
