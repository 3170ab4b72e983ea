"""No part of a hand-off waits for a step that it does not need, or for a poll."""

import threading
from collections.abc import Callable, Sequence

import pytest

from kvferry.connector.base import Outcome, StepOrders, StepReport
from kvferry.engines.mini.ranks.executor import LocalExecutor
from kvferry.engines.mini.server.engine_thread import EngineThread
from kvferry.handoff.orders import Offer
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.wire.params import HandoffParams
from tests.engines.mini.conftest import MakeEngine, ask, prompt_of
from tests.harness.fake_connector import FakeConnector

pytestmark = pytest.mark.engine

OFFER = Offer(TransferId("t-p"), RequestId("p"), (), TokenRange(0, 20), final=True)


class _Watched(FakeConnector):
    """Sends the final offer as the real scheduler half does, and records what its worker half receives, and when."""

    def build_orders(self) -> StepOrders:
        finished = "finished p" in self.seen and "ordered" not in self.seen
        if finished:
            self.seen.append("ordered")
        return StepOrders(offer=(OFFER,) if finished else ())

    def start_step(self, orders: StepOrders) -> None:
        if orders.offer:
            self.seen.append("worker has the offer")

    def end_step(self) -> StepReport:
        self.seen.append("fetched")
        return StepReport(released=frozenset({TransferId("t-p")})) if "released" in self.seen else StepReport()

    def update(self, reports: Sequence[StepReport]) -> Outcome:
        released = tuple(transfer for report in reports for transfer in report.released)
        return Outcome(released=released)


def test_the_last_offer_leaves_with_the_step_that_made_it(make_engine: MakeEngine) -> None:
    """It does not wait for the next step: between the two, the answer goes to the client."""
    found: list[_Watched] = []

    def connect(cache: object) -> tuple[FakeConnector, FakeConnector]:
        found.append(_Watched(cache))  # type: ignore[arg-type]  # the cache that the fixture made
        return found[0], found[0]

    engine = make_engine(connector=connect)
    engine.add(ask("p", prompt_of(20), HandoffParams(do_remote_decode=True)))
    outputs = engine.step()
    assert outputs[-1].handoff is not None
    assert found[0].seen[-1] == "worker has the offer"
    # What a worker half reports is used in the step that fetches it.
    assert engine.blocks.num_held
    found[0].seen.append("released")
    engine.step()
    assert engine.blocks.num_held == 0


class _Handoffs:
    """The part of a HandoffWorker that the executor uses."""

    has_report = False


async def test_a_report_of_a_driver_wakes_the_engines_thread() -> None:
    """A report makes the engine step, although its thread would sleep for a minute."""
    executor = LocalExecutor.__new__(LocalExecutor)
    executor._handoffs = handoffs = _Handoffs()  # type: ignore[assignment]  # a fake
    stepped, twice = threading.Event(), threading.Event()

    class _Engine:
        def on_wake(self, wake: Callable[[], None]) -> None:
            executor.on_report(wake)

        def add(self, request: object) -> None: ...

        def abort(self, request_id: object) -> None: ...

        def has_work(self) -> bool:
            return True  # a hand-off is open

        def step(self) -> list[object]:
            if handoffs.has_report:
                twice.set()
            stepped.set()
            return []

    thread = EngineThread(_Engine(), poll_s=60.0)  # type: ignore[arg-type]  # an engine without outputs
    thread.start()
    try:
        assert stepped.wait(10.0)
        executor._on_worker_report()  # changed numbers, but no report
        assert not twice.wait(0.05)
        handoffs.has_report = True
        assert executor.has_reports
        executor._on_worker_report()
        assert twice.wait(10.0), "the engine was not woken"
    finally:
        await thread.stop()
