"""The channel between vLLM's scheduler and its workers, over its real sockets."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.connector.base import Failed, Landed, PeerAccepted, PeerGone, StepOrders, StepReport
from kvferry.engines.vllm.channel.channel_hub import ChannelHub
from kvferry.engines.vllm.channel.worker_channel import SchedulerChannel, WorkerChannel
from kvferry.handoff.orders import Fetch
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import TransferMode
from tests.harness.until import until

WAIT_S = 10.0


def came(name: str = "p", size: int = 10) -> PeerAccepted:
    return PeerAccepted(EngineId(name), Incarnation("1"), bytes(size))


def left(name: str = "p") -> PeerGone:
    return PeerGone(EngineId(name), Incarnation("1"), "it is gone")


class Worker:
    """A worker's end that records what it receives."""

    def __init__(self) -> None:
        self.orders: list[StepOrders] = []
        self.changed = threading.Condition()
        self.channel = WorkerChannel(self.receive)

    def receive(self, orders: StepOrders) -> None:
        with self.changed:
            self.orders.append(orders)
            self.changed.notify_all()

    @property
    def received(self) -> list[PeerAccepted | PeerGone]:
        peers: list[PeerAccepted | PeerGone] = []
        for one in self.orders:
            peers += one.accepted
            peers += one.gone
        return peers

    def wait_received(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.orders) >= count, WAIT_S)


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.channel.close()


@pytest.fixture
def hub() -> Iterator[ChannelHub]:
    one = ChannelHub(None)
    yield one
    one.close()


def test_no_folder_is_left_by_a_worker_that_is_killed(worker: Worker, hub: ChannelHub) -> None:
    folder = Path(worker.channel.address).parent
    assert folder.stat().st_mode & 0o077 == 0, "only its user may enter"
    hub.connect([worker.channel.address])
    assert WorkerLineReady(worker).wait()
    assert not folder.exists(), "nothing is left to be removed at the exit that a kill leaves out"


def test_no_folder_is_left_if_no_scheduler_came() -> None:
    one = Worker()
    folder = Path(one.channel.address).parent
    one.channel.close()
    assert not folder.exists()


def num_lines() -> int:
    return sum(thread.name == "kvferry-line" for thread in threading.enumerate())


def test_peers_reach_a_worker_whose_engine_does_not_step(worker: Worker, hub: ChannelHub) -> None:
    hub.connect([worker.channel.address])
    hub.send_peers(StepOrders(accepted=(came(size=1 << 20),)))
    hub.send_peers(StepOrders(gone=(left(),)))
    assert worker.wait_received(2)
    assert worker.received == [came(size=1 << 20), left()]
    assert hub.take() == ((), ())
    assert not hub.pending, "the engine need not step for them"


def test_what_was_sent_before_a_step_is_received_before_its_orders(hub: ChannelHub) -> None:
    """An order that names a peer must find it known, whichever thread reads."""
    workers = [Worker() for _ in range(2)]
    try:
        hub.connect([one.channel.address for one in workers])
        for one in workers:
            assert WorkerLineReady(one).wait()
        for count in range(1, 200):
            hub.send_peers(StepOrders(accepted=(came(f"p{count}"),)))
            for one in workers:
                one.channel.catch_up()
                assert len(one.received) == count
        assert [peer.engine for peer in workers[0].received] == [f"p{i}" for i in range(1, 200)]
    finally:
        for one in workers:
            one.channel.close()


class WorkerLineReady:
    """The scheduler is connected before it sends anything; the worker's thread may still be in its accept."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def wait(self) -> bool:
        return bool(until(lambda: self._worker.channel.connected, "the scheduler is connected", within_s=WAIT_S))


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("+p", (["p"], [])),
        ("-p", ([], ["p"])),
        ("+p -p", ([], ["p"])),
        ("-p +p", (["p"], ["p"])),
        ("+p -p +p", (["p"], ["p"])),
        ("+p +q -p", (["q"], ["p"])),
        ("+p -q", (["p"], ["q"])),
    ],
)
def test_without_a_channel_a_peer_that_came_and_went_is_gone(
    hub: ChannelHub, sent: str, expected: tuple[list[str], list[str]]
) -> None:
    """Workers take those who have gone before those who have come, so the order must not be lost in one step."""
    for one in sent.split():
        name = one[1:]
        hub.send_peers(StepOrders(accepted=(came(name),)) if one[0] == "+" else StepOrders(gone=(left(name),)))
    accepted, gone = hub.take()
    assert ([peer.engine for peer in accepted], [peer.engine for peer in gone]) == expected
    assert hub.take() == ((), ())


def test_of_two_incarnations_the_one_that_came_last_stays(hub: ChannelHub) -> None:
    second = PeerAccepted(EngineId("p"), Incarnation("2"), b"")
    hub.send_peers(StepOrders(accepted=(came(),)))
    hub.send_peers(StepOrders(gone=(left(),), accepted=(second,)))
    assert hub.take() == ((second,), (left(),))


def test_orders_come_after_the_peers_that_they_name(worker: Worker, hub: ChannelHub) -> None:
    connected = [hub.connected]
    hub.connect([worker.channel.address])
    assert [*connected, hub.connected] == [False, True]
    table = BlockTable(0, 16, (7, 8))
    want = Fetch(
        transfer=TransferId("t"),
        request=RequestId("r"),
        engine=EngineId("p"),
        incarnation=Incarnation("1"),
        mode=TransferMode.PULL,
        tables=(table,),
        wanted=TokenRange(16, 40),
        deadline_s=60.0,
    )
    hub.send_peers(StepOrders(accepted=(came(),)))
    hub.send(StepOrders(fetch=(want,)))
    assert worker.wait_received(2)
    first, second = worker.orders
    assert first.accepted == (came(),)
    (received,) = second.fetch
    assert (received.wanted, received.mode, received.transfer) == (want.wanted, want.mode, want.transfer)
    assert [(one.first_token, tuple(one.block_ids)) for one in received.tables] == [(16, (7, 8))]


def test_reports_wait_for_the_engine_and_wake_it(worker: Worker) -> None:
    woken = threading.Semaphore(0)
    hub = ChannelHub(woken.release)
    report = StepReport(
        landed=(Landed(TransferId("t"), RequestId("r"), TokenRange(0, 9), 1, 2, 0.5, note=b"n"),),
        failed=(Failed(TransferId("u"), RequestId("s"), "gone", TokenRange(0, 0)),),
        released=frozenset({TransferId("v")}),
    )
    assert not worker.channel.send(report), "no scheduler is connected"
    hub.connect([worker.channel.address])
    assert WorkerLineReady(worker).wait()
    assert worker.channel.send(report)
    assert worker.channel.send(left())
    for _ in range(2):
        assert woken.acquire(timeout=WAIT_S)
    assert (hub.has_reports, hub.pending) == (True, False)
    assert hub.take_reports() == ((report,), (left(),))
    assert not hub.has_reports
    assert hub.take_reports() == ((), ())
    hub.close()


@pytest.mark.parametrize("addresses", [[""], ["missing"], ["there", "missing"]])
def test_peers_wait_for_a_step_if_a_worker_has_no_channel(worker: Worker, addresses: list[str], tmp_path: Path) -> None:
    woken: list[None] = []
    hub = ChannelHub(lambda: woken.append(None))
    paths = {"": "", "missing": str(tmp_path / "nobody"), "there": worker.channel.address}
    hub.connect([paths[one] for one in addresses])
    hub.send_peers(StepOrders(accepted=(came(),)))
    hub.send_peers(StepOrders(gone=(left("q"),)))
    assert (hub.pending, len(woken)) == (True, 2)
    assert hub.take() == ((came(),), (left("q"),))
    assert not hub.pending
    assert not worker.received
    hub.close()


def test_nothing_is_left_of_a_channel() -> None:
    before = num_lines()
    worker = Worker()
    address = Path(worker.channel.address)
    assert address.parent.stat().st_mode & 0o077 == 0, "only its user may knock"
    end = SchedulerChannel(str(address), lambda _news: None)
    assert WorkerLineReady(worker).wait()
    assert not address.exists(), "no other process can connect"
    end.close()
    worker.channel.close()
    never = WorkerChannel(worker.receive)
    never.close()
    assert num_lines() == before


def test_a_closed_end_raises_nowhere(worker: Worker) -> None:
    end = SchedulerChannel(worker.channel.address, lambda _news: None)
    assert WorkerLineReady(worker).wait()
    worker.channel.close()
    for _ in range(3):
        end.send(StepOrders(accepted=(came(),)))
    end.close()
    assert not worker.channel.send(StepReport())
    worker.channel.catch_up()
