"""Room and order: a large prompt waits for a bounded time, and small ones do not wait for a whole answer of others.

Real engines without a model, on a clock that goes one second per step, so seconds are steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.cache_spec import make_groups
from kvferry.engines.mini.scheduling.overtaking import Overtaking
from kvferry.engines.mini.scheduling.request import Request
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.step import ChunkInput
from kvferry.ids import RequestId
from kvferry.testing.fake_clock import FakeClock
from kvferry.wire.first_token import FirstToken, encode_first_token
from kvferry.wire.params import HandoffParams
from tests.engines.mini.conftest import ask
from tests.harness.fake_connector import FakeConnector
from tests.harness.hypothesis_profile import examples
from tests.harness.positions import PositionRanks, layers_of, position_model

BLOCK = 16
OVERTAKE_S = 8.0
FROM_REMOTE = HandoffParams(do_remote_prefill=True)
SLACK = 3
"""Steps between a block's end of use and the admission that uses it."""


class NoNetwork(PositionRanks):
    """Computes nothing: every token of an answer is the same."""

    def _compute(self, chunk: ChunkInput) -> int:
        return 5


@dataclass(frozen=True)
class Asked:
    """A request that arrives at a step."""

    at: int
    num_prompt: int
    num_answer: int
    remote: bool = False
    lands_after: int = 1


@dataclass
class Traffic:
    """An engine, what it is asked, and when each request was admitted and ended."""

    num_blocks: int
    overtake_s: float = OVERTAKE_S
    admitted: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        config = EngineSettings(
            model="none", num_blocks=1 + self.num_blocks, block_tokens=BLOCK, max_batch_tokens=8192,
            prefix_caching=False, overtake_s=self.overtake_s,
        )  # fmt: skip
        layers = layers_of(full=1)
        cache = KVCache(layers, make_groups(layers), num_blocks=1 + self.num_blocks, block_tokens=BLOCK, device="cpu")
        self.clock, self.connector = FakeClock(), FakeConnector(cache)
        ranks = NoNetwork(cache, layers, self.connector, 1)
        self.engine = Engine(position_model(), ranks, config, connector=self.connector, clock=self.clock)
        self._landing: dict[int, list[tuple[str, int]]] = {}

    def run(self, asked: Sequence[Asked], look: Callable[["Traffic"], None] = lambda traffic: None) -> None:
        """Runs until everything has ended; `look` is called after each step."""
        names = {f"r{i}": one for i, one in enumerate(asked)}
        limit = sum(one.at + one.num_answer + one.lands_after + 20 for one in asked)
        while len(self.ended) < len(names):
            for name, one in names.items():
                if one.at == self.step:
                    handoff = FROM_REMOTE if one.remote else None
                    self.engine.add(ask(name, [7] * one.num_prompt, handoff, max_tokens=one.num_answer))
            for name, num_tokens in self._landing.pop(self.step, []):
                self.connector.land(name, num_tokens, note=encode_first_token(FirstToken(token=5)))
            for output in self.engine.step():
                if output.finish_reason is not None:
                    self.ended[output.request_id] = self.step
            self.engine.check()
            for request in self.holding:
                if request.request_id not in self.admitted:
                    self.admitted[request.request_id] = self.step
                    one = names[request.request_id]
                    if one.remote:
                        at = self.step + one.lands_after
                        self._landing.setdefault(at, []).append((request.request_id, one.num_prompt))
            for name, at in self.ended.items():
                self.admitted.setdefault(name, at)
            look(self)
            self.step += 1
            self.clock.advance(1.0)
            assert self.step <= limit, f"not ended after {limit} steps: {names.keys() - self.ended.keys()}"

    @property
    def holding(self) -> list[Request]:
        """The requests that have blocks."""
        return [*self.engine.scheduler.running, *self.engine.scheduler.waiting_for_kv.values()]


class BoundedWaits:
    """Checks, step by step, that the oldest request that waits is admitted within its bound.

    The bound of a request that has waited `OVERTAKE_S` and is the oldest: when those that have blocks at that moment
    must have ended.
    """

    def __init__(self) -> None:
        self._oldest: Request | None = None
        self._bound = 0

    def __call__(self, traffic: Traffic) -> None:
        waiting = traffic.engine.scheduler.waiting
        if not waiting:
            self._oldest = None
            return
        oldest = waiting[0]
        if traffic.clock.now_s() - oldest.arrived_s < OVERTAKE_S:
            return
        if oldest is not self._oldest:
            longest = max((r.answer.max_tokens_left for r in traffic.holding), default=0)
            landing = max((4 for r in traffic.holding if r.from_remote), default=0)
            self._oldest, self._bound = oldest, traffic.step + longest + landing + SLACK
        assert traffic.step <= self._bound, (
            f"{oldest.request_id} waits since {oldest.arrived_s:g}, until {self._bound} at the latest"
        )


@st.composite
def traffic_of(draw: st.DrawFn) -> tuple[int, list[Asked]]:
    """A cache, and requests that fit it: a few large ones among many small ones."""
    num_blocks = draw(st.integers(8, 40))
    room = num_blocks * BLOCK
    asked = []
    for _ in range(draw(st.integers(5, 40))):
        large = draw(st.integers(0, 4)) == 0
        num_answer = draw(st.integers(1, 40))
        most = room - num_answer + 1
        num_prompt = draw(st.integers(most // 2, most) if large else st.integers(1, max(1, most // 8)))
        asked.append(Asked(draw(st.integers(0, 60)), num_prompt, num_answer, draw(st.booleans()),
                           draw(st.integers(1, 4))))  # fmt: skip
    return num_blocks, asked


@settings(max_examples=examples(80))
@given(traffic_of())
def test_whatever_arrives_every_request_is_admitted_within_its_bound(drawn: tuple[int, list[Asked]]) -> None:
    num_blocks, asked = drawn
    Traffic(num_blocks).run(asked, BoundedWaits())


SMALL_LOOPS = [Asked(5 * i, 200, 20) for i in range(20)]
"""A new small request every five steps, for 100 steps: four are always running."""


def test_a_large_prompt_beside_a_stream_of_small_ones_waits_for_those_that_run_when_its_claim_begins() -> None:
    traffic = Traffic(127)
    traffic.run([*SMALL_LOOPS, Asked(22, 1900, 5)], BoundedWaits())
    assert traffic.admitted["r20"] <= 22 + OVERTAKE_S + 20 + SLACK


def test_without_claims_it_would_wait_as_long_as_small_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overtaking, "may_pass", lambda self, request: True)
    traffic = Traffic(127)
    traffic.run([*SMALL_LOOPS, Asked(22, 1900, 5)])
    assert traffic.admitted["r20"] >= 100


LONG = [Asked(0, 200, 90), Asked(0, 200, 90)]
"""Two long answers, which a prompt of 1,900 tokens has to wait for."""


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("at", [6, 6 + int(OVERTAKE_S) + 20], ids=["before its claim", "after its claim"])
def test_small_prompts_after_a_large_one_without_room_begin_at_once(at: int, remote: bool) -> None:
    traffic = Traffic(127)
    small = [Asked(at, 20, 10, remote) for _ in range(5)]
    traffic.run([*LONG, Asked(5, 1900, 10, remote), *small], BoundedWaits())
    assert all(traffic.admitted[f"r{i}"] <= at + 1 for i in range(3, 8)), traffic.admitted
    assert traffic.admitted["r2"] <= 90 + SLACK, "as if they had not come"


def test_a_small_prompt_with_a_longer_answer_than_the_running_ones_waits_for_a_claim() -> None:
    """It would delay the large one beyond its bound."""
    traffic = Traffic(127)
    traffic.run([*LONG, Asked(5, 1900, 10), Asked(50, 20, 100)], BoundedWaits())
    assert traffic.admitted["r2"] <= 90 + SLACK
    assert traffic.admitted["r3"] >= traffic.admitted["r2"]


def test_with_overtaking_off_only_what_cannot_delay_the_large_one_passes() -> None:
    traffic = Traffic(127, overtake_s=0.0)
    traffic.run([*LONG, Asked(5, 1900, 10), Asked(6, 20, 95), Asked(6, 20, 80)])
    assert traffic.admitted["r3"] >= traffic.admitted["r2"]
    assert traffic.admitted["r4"] == 6


def test_on_prefill_nothing_passes_a_claim() -> None:
    """Blocks that are handed over are held after a request's end, until another engine has taken them."""
    traffic = Traffic(127)
    for i in range(3):
        traffic.engine.add(ask(f"p{i}", [7] * 600, HandoffParams(do_remote_decode=True)))
    while len(traffic.connector.progress) < 3:
        traffic.engine.step()
    traffic.engine.add(ask("large", [7] * 2030, HandoffParams(do_remote_decode=True)))
    traffic.engine.step()
    traffic.engine.add(ask("early", [7] * 20, HandoffParams(do_remote_decode=True)))
    traffic.engine.step()
    assert RequestId("early") in traffic.connector.progress, "it passes before the claim"
    traffic.clock.advance(OVERTAKE_S)
    traffic.engine.step()
    traffic.engine.add(ask("late", [7] * 20, HandoffParams(do_remote_decode=True)))
    for name in ("p0", "p1", "p2", "early"):
        assert RequestId("late") not in traffic.connector.progress
        traffic.connector.release(name)
        traffic.engine.step()
    for _ in range(3):
        traffic.engine.step()
    assert RequestId("large") in traffic.connector.progress
    traffic.connector.release("large")
    for _ in range(3):
        traffic.engine.step()
    assert RequestId("late") in traffic.connector.progress


def test_an_aborted_request_gives_up_its_claim() -> None:
    traffic = Traffic(127)
    traffic.engine.add(ask("long", [7] * 400, max_tokens=300))
    traffic.engine.step()
    traffic.engine.add(ask("large", [7] * 1900, max_tokens=5))
    traffic.clock.advance(OVERTAKE_S)
    traffic.engine.step()
    traffic.engine.add(ask("next", [7] * 20, max_tokens=400))
    traffic.engine.step()
    assert [r.request_id for r in traffic.engine.scheduler.running] == ["long"], "the claim holds"
    traffic.engine.abort(RequestId("large"))
    traffic.engine.step()
    assert [r.request_id for r in traffic.engine.scheduler.running] == ["long", "next"]
