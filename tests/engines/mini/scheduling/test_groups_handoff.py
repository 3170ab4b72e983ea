"""Cache groups across a hand-off: real engines, real connectors, real plans over the memory transport.

The network checks what it reads from the cache (positions.py): missing KV, or KV of other tokens, fails the test.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.base import EngineIdentity
from kvferry.connector.by_mode import make_scheduler
from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.engines.mini.api import Output
from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.cache_spec import LayerCache, make_groups
from kvferry.engines.mini.ranks.executor import ConnectorStart
from kvferry.engines.mini.scheduling.cache_groups import tokens_handed_over
from kvferry.engines.mini.scheduling.request import Request
from kvferry.engines.mini.settings import EngineSettings
from kvferry.handoff.orders import PeerAccepted, StepOrders
from kvferry.ids import EngineId, Incarnation, RequestId
from kvferry.settings import FerrySettings, LeaseSettings, Role, TransferMode, TransferSettings
from kvferry.stats import PromptAccount
from kvferry.wire.hello import Hello, RankHello, encode_hello
from kvferry.wire.layout_codec import encode_layout
from kvferry.wire.params import HandoffParams
from tests.engines.mini.conftest import ask, tokens_of
from tests.harness.fake_connector import FakeConnector
from tests.harness.hypothesis_profile import examples
from tests.harness.positions import PositionRanks, answer, layers_of, position_engine, position_model
from tests.harness.until import let_threads_run, until

SHAPES: dict[str, dict[str, Any]] = {
    "full": {"full": 2},
    "gemma": {"full": 1, "windows": (9, 9, 9)},
    "windows": {"windows": (5, 5)},
    "mamba": {"full": 1, "states": 2},
    "all kinds": {"full": 2, "windows": (7, 7), "states": 3},
}
NUMBERS = itertools.count()
BLOCKS = [(4, 4), (4, 8), (8, 4)]
MODES = [TransferMode.PULL, TransferMode.PUSH]


class Known:
    """A peer table in which every engine was accepted long ago."""

    def __init__(self) -> None:
        self.incarnations: dict[EngineId, Incarnation] = {}

    def view(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int) -> PeerView:
        return PeerView(PeerStatus.ACCEPTED, incarnation=self.incarnations[engine])


class Side:
    """One engine with a connector."""

    def __init__(
        self,
        name: str,
        layers: Sequence[LayerCache],
        board: Known,
        transfer: TransferSettings,
        lease: LeaseSettings,
        **changes: Any,
    ) -> None:
        args = {"model": "positions", "max_batch_tokens": 16, **changes}
        self.settings = EngineSettings(**args)
        cache = KVCache(
            layers,
            make_groups(layers),
            num_blocks=args["num_blocks"],
            block_tokens=self.settings.block_tokens,
            device="cpu",
        )
        self.ranks = PositionRanks(cache, layers, None, 1)
        self.id, self.incarnation = EngineId(f"{name}{next(NUMBERS)}"), Incarnation("1")
        board.incarnations[self.id] = self.incarnation
        ferry = FerrySettings(transfer=transfer, lease=lease)
        self.ranks.connect(ConnectorStart(self.id, self.incarnation, ferry), lambda *_: None)
        count = tokens_handed_over(self.ranks.layouts[0].groups, first_token=transfer.first_token)
        identity = EngineIdentity(self.id, self.incarnation, "127.0.0.1", 1)
        self.half = make_scheduler(identity, board, ferry, count)
        self.engine = Engine(position_model(), self.ranks, self.settings, connector=self.half)

    def hello(self, role: Role) -> PeerAccepted:
        layout, metadata = encode_layout(self.ranks.layouts[0]), self.ranks.metadata[0]
        rank = RankHello(layout=layout, transport="memory", transport_metadata=metadata)
        body = Hello(engine=self.id, incarnation=self.incarnation, role=role, ranks=(rank,), host="h", port=1)
        return PeerAccepted(self.id, self.incarnation, encode_hello(body))


class Pair:
    """Prefill and decode. `go` sends requests through both; after that no block of either may be in use."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        mode: TransferMode,
        blocks: tuple[int, int],
        *,
        num_blocks: tuple[int, int] = (200, 200),
        ttl_s: float = 5.0,
        **changes: Any,
    ) -> None:
        transfer = {name: changes.pop(name) for name in ("first_token", "progress") if name in changes}
        settings = TransferSettings(mode=mode, transport="memory", staging_bytes=0, deadline_s=8.0, **transfer)
        lease = LeaseSettings(ttl_s=ttl_s, renew_every_s=ttl_s / 10, quarantine_s=0.2)
        self.mode, board = mode, Known()
        sides = (
            Side(name, layers, board, settings, lease, block_tokens=size, num_blocks=number, **changes)
            for name, size, number in zip("pd", blocks, num_blocks, strict=True)
        )
        self.p, self.d = sides
        self.p.ranks.send(StepOrders(accepted=(self.d.hello(Role.DECODE),)))
        self.d.ranks.send(StepOrders(accepted=(self.p.hello(Role.PREFILL),)))
        self.reasons: list[str] = []
        """Returns why decode computed prompt tokens, by request."""
        self._number = 0

    def close(self) -> None:
        self.p.engine.close()
        self.d.engine.close()

    def go(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 6, **params: Any) -> list[list[Output]]:
        """Returns the outputs of decode, by prompt."""
        names = [f"r{self._number + i}" for i in range(len(prompts))]
        self._number += len(prompts)
        asked = dict(zip(names, prompts, strict=True))
        for name, tokens in asked.items():
            to_p = HandoffParams(do_remote_decode=True, transfer_id=f"t-{name}")
            self.p.engine.add(ask(name, tokens, to_p, max_tokens=1))
            if self.mode is TransferMode.PUSH:
                self._to_decode(name, tokens, max_tokens, self._address(name, **params))
        done: dict[str, list[Output]] = {name: [] for name in names}
        deadline_s = time.monotonic() + 20.0
        while True:
            for output in self.p.engine.step():
                if output.finish_reason is not None and self.mode is TransferMode.PULL:
                    assert output.handoff is not None, output
                    self._to_decode(output.request_id, asked[output.request_id], max_tokens, output.handoff)
            for output in self.d.engine.step():
                done[output.request_id].append(output)
            self.p.engine.check()
            self.d.engine.check()
            ended = all(outputs and outputs[-1].finish_reason is not None for outputs in done.values())
            if ended and not self.p.engine.has_work() and not self.d.engine.has_work():
                break
            assert time.monotonic() < deadline_s, (self.p.engine.stats(), self.d.engine.stats())
            let_threads_run()
        for side in (self.p, self.d):
            assert side.engine.blocks.num_free == side.engine.blocks.num_usable, "a block is still in use"
        for name, tokens in asked.items():
            assert tokens_of(done[name]) == answer(tokens, max_tokens), name
        return list(done.values())

    def _address(self, name: str, **params: Any) -> HandoffParams:
        return HandoffParams(
            do_remote_prefill=True, transfer_id=f"t-{name}", remote_engine_id=self.p.id, remote_host="h",
            remote_port=1, **params,
        )  # fmt: skip

    def _to_decode(self, name: str, tokens: Sequence[int], max_tokens: int, handoff: HandoffParams) -> None:
        self.d.engine.add(ask(name, tokens, handoff, max_tokens=max_tokens))


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    pairs: list[Pair] = []

    def make(*args: Any, **changes: Any) -> Pair:
        pairs.append(Pair(*args, **changes))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def prompt(length: int, family: int = 0) -> list[int]:
    return [(family * 31 + i * i) % 89 for i in range(length)]


def account_of(outputs: Sequence[Output]) -> PromptAccount:
    """Returns the account of one request."""
    account = outputs[-1].account
    assert account is not None
    return account


def left(shape: str) -> int:
    """Returns how many prompt tokens decode computes by R32."""
    return 1 if "states" in SHAPES[shape] else 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_nothing_is_computed_twice(
    make_pair: MakePair, shape: str, blocks: tuple[int, int], mode: TransferMode
) -> None:
    """R22, R23, R32, R36: prompts shorter and longer than windows, chunks and blocks; several at once; hits on both."""
    pair = make_pair(layers_of(**SHAPES[shape]), mode, blocks)
    lengths = (2, 9, 16, 17, 33, 50)
    for outputs, length in zip(pair.go([prompt(n, n) for n in lengths]), lengths, strict=True):
        account = account_of(outputs)
        assert (account.handed_over, account.cached) == (length - left(shape), 0)
        assert account.recomputed == left(shape)
        assert ("recurrent state" in account.reason) == bool(left(shape)), account.reason
    again = account_of(pair.go([prompt(50, 50)])[0])  # a hit on both sides
    assert again.recomputed == left(shape)
    assert again.cached > 0 or shape == "windows"
    longer = account_of(pair.go([[*prompt(50, 50), *prompt(30, 7)]])[0])  # a hit on both sides, and more
    assert longer.recomputed == left(shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_what_decode_has_is_not_moved_again(make_pair: MakePair, shape: str, mode: TransferMode) -> None:
    """R30: decode has none, a part, or all of the prompt in its cache."""
    pair = make_pair(layers_of(**SHAPES[shape]), mode, (4, 4))
    length = 48 + left(shape)
    for name, hit in (("a", 0), ("b", 24), ("c", 48)):
        tokens = prompt(length, 1 + ord(name))
        if hit:
            pair.d.engine.add(ask(f"own-{name}", [*tokens[: hit + left(shape)]], max_tokens=2))
            while pair.d.engine.has_work():
                pair.d.engine.step()
        account = account_of(pair.go([tokens])[0])
        # In push decode does not know, when it looks into its cache, that prefill will send its first token.
        short = 4 if hit == 48 and mode is TransferMode.PUSH and not left(shape) else 0
        assert account.cached == hit - short, (name, account)
        assert account.recomputed == left(shape), (name, account)


@pytest.mark.parametrize("shape", ["gemma", "mamba"])
def test_prefill_also_continues_after_its_own_prefix(make_pair: MakePair, shape: str) -> None:
    pair = make_pair(layers_of(**SHAPES[shape]), TransferMode.PULL, (4, 4))
    pair.go([prompt(48 + left(shape))])
    before = pair.p.engine.stats().cached_tokens
    pair.go([prompt(48 + left(shape))])
    assert pair.p.engine.stats().cached_tokens - before == (48 if left(shape) else 44)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_prompt_of_one_token(make_pair: MakePair, shape: str, mode: TransferMode) -> None:
    """With a state nothing of such a prompt can be handed over, but it is answered."""
    pair = make_pair(layers_of(**SHAPES[shape]), mode, (4, 4))
    assert account_of(pair.go([[5]])[0]).recomputed == left(shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["full", "gemma", "windows"])
def test_without_a_first_token_decode_computes_the_last_prompt_token(
    make_pair: MakePair, shape: str, mode: TransferMode
) -> None:
    """What the last token attends to has landed: with windows, prefill stops one token before the end."""
    pair = make_pair(layers_of(**SHAPES[shape]), mode, (4, 4), first_token=False)
    for outputs in pair.go([prompt(33, 1), prompt(64, 2)]):
        assert account_of(outputs).recomputed == 1


@pytest.mark.parametrize("shape", ["gemma", "mamba", "all kinds"])
def test_a_hand_off_that_fails_is_computed_from_what_decode_can_use(make_pair: MakePair, shape: str) -> None:
    """R29: nothing of windows and states can be kept; the blocks are released, and every token is right."""
    pair = make_pair(layers_of(**SHAPES[shape]), TransferMode.PULL, (4, 4))
    pair.d.engine.add(ask("own", prompt(24), max_tokens=2))
    while pair.d.engine.has_work():
        pair.d.engine.step()
    tokens = prompt(60)
    missing = HandoffParams(
        do_remote_prefill=True, transfer_mode=TransferMode.PULL, transfer_id="unclaimed", remote_engine_id=pair.p.id,
        remote_incarnation="1", remote_host="h", remote_port=1, remote_num_tokens=60,
    )  # fmt: skip
    pair.d.engine.add(ask("r", tokens, missing, max_tokens=4))
    done: list[Output] = []
    pair.p.ranks.drain()  # so that the unknown request is refused at once
    deadline_s = time.monotonic() + 20.0
    while not done or done[-1].finish_reason is None or pair.d.engine.has_work():
        done += [output for output in pair.d.engine.step() if output.request_id == "r"]
        pair.d.engine.check()
        pair.p.engine.step()
        assert time.monotonic() < deadline_s, pair.d.engine.stats()
        let_threads_run()
    assert tokens_of(done) == answer(tokens, 4)
    account = account_of(done)
    assert account.handed_over == 0
    assert account.cached == 24
    assert "shutting down" in account.reason
    assert pair.d.engine.blocks.num_free == pair.d.engine.blocks.num_usable


def test_truncation_happens_once(make_pair: MakePair) -> None:  # R33
    """A preempted and resumed prefill request leaves as much to decode as before."""
    pair = make_pair(layers_of(**SHAPES["mamba"]), TransferMode.PULL, (4, 4))
    scheduler = pair.p.engine.scheduler
    pair.p.engine.add(ask("r", prompt(40), HandoffParams(do_remote_decode=True, transfer_id="t"), max_tokens=1))
    pair.p.engine.step()
    request: Request = scheduler.running[0]
    assert request.num_target_tokens == 39
    request.handoff_open = False
    scheduler._preempt(request)
    assert request.num_target_tokens == 39
    outputs: list[Output] = []
    while not outputs:
        outputs = pair.p.engine.step()
    assert outputs[0].handoff is not None
    assert outputs[0].handoff.remote_num_tokens == 39
    assert outputs[0].handoff.first_token is None
    assert outputs[0].token_ids == ()
    pair.p.half.withdraw(next(iter(pair.p.half._by_transfer)), "test")
    engine = pair.p.engine
    until(lambda: not (engine.has_work() or engine.stats().held_blocks), "prefill is idle", meanwhile=engine.step)
    assert RequestId("r") not in pair.p.engine._requests


def test_a_block_of_which_only_the_windows_end_was_moved_is_not_shared(make_pair: MakePair) -> None:
    """Prefill has tokens from 25 on, decode's block holds [24, 32): a request that continues after 32 needs token
    24."""
    layers = layers_of(full=1, windows=(9,))
    pair = make_pair(layers, TransferMode.PULL, (5, 8), max_batch_tokens=17)
    pair.go([prompt(35)])
    pair.d.engine.add(ask("own", prompt(34), max_tokens=3))
    done: list[Output] = []
    while pair.d.engine.has_work():
        done += pair.d.engine.step()
    assert tokens_of(done) == answer(prompt(34), 3)


def test_a_state_that_never_came_is_not_cached(make_pair: MakePair) -> None:
    """The request is aborted while it waits for its KV, after full blocks of ours at whose end no state is cached."""
    pair = make_pair(layers_of(**SHAPES["mamba"]), TransferMode.PULL, (4, 4))
    engine = pair.d.engine

    def idle() -> None:
        done = lambda: not (engine.has_work() or engine.stats().held_blocks)  # noqa: E731
        until(done, "decode is idle", within_s=20.0, meanwhile=engine.step)

    engine.add(ask("own", prompt(45), max_tokens=1))
    idle()
    tokens = [*prompt(42), 7, 7, 7]
    unclaimed = HandoffParams(
        do_remote_prefill=True, transfer_mode=TransferMode.PULL, transfer_id="unclaimed", remote_engine_id=pair.p.id,
        remote_incarnation="1", remote_host="h", remote_port=1, remote_num_tokens=44,
    )  # fmt: skip
    engine.add(ask("gone", tokens, unclaimed))
    engine.step()
    assert engine.scheduler.waiting_for_kv[RequestId("gone")].num_computed == 40
    engine.abort(RequestId("gone"))
    idle()
    engine.add(ask("next", tokens, max_tokens=3))
    done: list[Output] = []
    while not done or done[-1].finish_reason is None:
        done += [output for output in engine.step() if output.request_id == "next"]
    assert tokens_of(done) == answer(tokens, 3)
    assert account_of(done).cached == 32


@pytest.mark.parametrize("shape", ["gemma", "mamba"])
@pytest.mark.parametrize("arrived", [20, 28])
def test_a_hand_off_that_lands_short_is_completed_by_computing(shape: str, arrived: int) -> None:
    """Windows and states can be used only at the position they were made for, not after a shorter prefix."""
    halves: list[FakeConnector] = []

    def connect(cache: KVCache) -> tuple[FakeConnector, FakeConnector]:
        halves.append(FakeConnector(cache))
        return halves[0], halves[0]

    engine = position_engine(layers_of(**SHAPES[shape]), connect, block_tokens=4)
    handoff = HandoffParams(do_remote_prefill=True, transfer_id="t", remote_num_tokens=30)
    engine.add(ask("r", prompt(31), handoff, max_tokens=3))
    engine.step()
    halves[0].land("r", arrived)
    done: list[Output] = []
    while engine.has_work():
        done += engine.step()
    assert tokens_of(done) == answer(prompt(31), 3)
    assert account_of(done).recomputed == 31
    assert f"prefill handed over {arrived} tokens" in account_of(done).reason


def test_decode_learns_at_once_that_a_prefill_was_aborted_in_the_queue(make_pair: MakePair) -> None:
    """In push decode waits before prefill has computed anything, and must not wait until its deadline."""
    pair = make_pair(layers_of(full=1), TransferMode.PUSH, (4, 4))
    _traffic(pair, [(0, 20, 4, 0)], {0: ("p", 0)})
    assert pair.d.engine.stats().handed_over_tokens == 0
    [said] = pair.reasons
    assert "aborted on the prefill side" in said


@settings(max_examples=examples(25))
@given(
    shape=st.sampled_from(list(SHAPES)),
    mode=st.sampled_from(MODES),
    blocks=st.sampled_from(BLOCKS),
    spare=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    chunk=st.integers(1, 24),
    first_token=st.booleans(),
    asked=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=5
    ),
    aborts=st.dictionaries(st.integers(0, 4), st.tuples(st.sampled_from("pd"), st.integers(0, 30)), max_size=2),
)
def test_any_traffic_between_two_full_caches_gives_right_answers_and_loses_no_block(
    shape: str, mode: TransferMode, blocks: tuple[int, int], spare: tuple[int, int], chunk: int, first_token: bool,
    asked: list[tuple[int, int, int, int]], aborts: dict[int, tuple[str, int]],
) -> None:  # fmt: skip
    """Neither cache has room for many more blocks than the longest request needs: requests wait, are preempted, are
    aborted on either side, and find each other's prefixes."""
    layers = layers_of(**SHAPES[shape])
    of_p, of_d = (
        1 + more + _need(layers, size, chunk, max(length + (new if side else 1) for _, length, new, _ in asked))
        for side, (size, more) in enumerate(zip(blocks, spare, strict=True))
    )
    pair = Pair(
        layers, mode, blocks, num_blocks=(of_p, of_d), ttl_s=0.5, max_batch_tokens=chunk, first_token=first_token
    )
    try:
        _traffic(pair, asked, aborts)
    finally:
        pair.close()


def _need(layers: Sequence[LayerCache], block: int, chunk: int, num_tokens: int) -> int:
    sized = position_engine(layers, num_blocks=10, block_tokens=block, max_batch_tokens=chunk)
    return sized.scheduler.groups.need(num_tokens)


def _traffic(pair: Pair, asked: list[tuple[int, int, int, int]], aborts: dict[int, tuple[str, int]]) -> None:
    """`asked`: family, length, new tokens and the step in which it comes; `aborts`: the side and the step."""
    prompts = {f"r{number}": prompt(length, family) for number, (family, length, _, _) in enumerate(asked)}
    new = {f"r{number}": tokens for number, (_, _, tokens, _) in enumerate(asked)}
    done: dict[str, list[Output]] = {name: [] for name in prompts}
    there: set[str] = set()
    deadline_s = time.monotonic() + 30.0

    def to_decode(name: str, handoff: HandoffParams | None) -> None:
        if name not in there:
            there.add(name)
            pair.d.engine.add(ask(name, prompts[name], handoff, max_tokens=new[name]))

    for step in itertools.count():
        for number, (_, _, _, at) in enumerate(asked):
            if at == step:
                name = f"r{number}"
                to_p = HandoffParams(do_remote_decode=True, transfer_id=f"t-{name}")
                pair.p.engine.add(ask(name, prompts[name], to_p, max_tokens=1))
                if pair.mode is TransferMode.PUSH:
                    to_decode(name, pair._address(name))
        for number, (side, at) in aborts.items():
            if at == step:
                (pair.p if side == "p" else pair.d).engine.abort(RequestId(f"r{number}"))
        for output in pair.p.engine.step():
            if output.finish_reason is not None and pair.mode is TransferMode.PULL:
                to_decode(output.request_id, output.handoff)
        for output in pair.d.engine.step():
            done[output.request_id].append(output)
            if output.finish_reason is not None:
                pair.reasons.append(account_of([output]).reason)
        pair.p.engine.check()
        pair.d.engine.check()
        idle = not pair.p.engine.has_work() and not pair.d.engine.has_work()
        if idle and step > max(at for at in (*(at for *_, at in asked), *(at for _, at in aborts.values()))):
            break
        assert time.monotonic() < deadline_s, (pair.p.engine.stats(), pair.d.engine.stats())
        let_threads_run()
    for engine in (pair.p.engine, pair.d.engine):
        assert engine.blocks.num_free == engine.blocks.num_usable, "a block is still in use"
    late = [why for why in pair.reasons if "has not ended" in why or "no such request came" in why]
    assert not late, "a deadline is only for what no peer reports"
    for number, (name, tokens) in enumerate(prompts.items()):
        got = tokens_of(done[name])
        assert got == answer(tokens, new[name])[: len(got)], name
        assert number in aborts or len(got) == new[name], name
