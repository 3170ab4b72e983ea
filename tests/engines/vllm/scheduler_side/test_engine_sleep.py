"""How an idle engine core is woken."""

import enum
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

from kvferry.engines.vllm.scheduler_side.engine_sleep import EngineSleep, find_engine_sleep


class Words(enum.Enum):
    WAKEUP = b"\x05"


class Connector:
    def __init__(self, words: Any) -> None:
        self.wake = find_engine_sleep(words)


class Core:
    """An engine core like EngineCoreProc: first the queue, then the parts, which create the connector."""

    def __init__(self, words: Any = Words) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.connector = self.make(words)

    def make(self, words: Any) -> Connector:
        return Connector(words)


def test_the_engine_that_makes_its_connector_is_woken() -> None:
    core = Core()
    wake = core.connector.wake
    assert isinstance(wake, EngineSleep)
    wake()
    assert core.input_queue.get_nowait() == (Words.WAKEUP, None)


def test_an_engine_sleeps_until_it_is_woken_or_asked_for_something() -> None:
    core = Core()
    wake = core.connector.wake
    assert wake is not None
    began_s = time.monotonic()
    wake.sleep(0.05)
    assert time.monotonic() - began_s > 0.04
    thread = threading.Timer(0.05, wake)
    thread.start()
    wake.sleep(30.0)
    thread.join()
    wake.sleep(30.0)
    assert core.input_queue.qsize() == 1, "what was asked is the engine's to read"
    assert time.monotonic() - began_s < 20.0


def test_an_engine_that_only_waits_is_recognised() -> None:
    core: Any = Core()
    wake = core.connector.wake
    core.scheduler = SimpleNamespace(get_request_counts=lambda: (1, 2))
    assert wake.is_all(3)
    assert not wake.is_all(2), "another request could run"
    core.batch_queue = [object()]
    assert not wake.is_all(3), "a step is under way"
    core.batch_queue = []
    assert wake.is_all(3)
    core.dp_group = object()
    assert not wake.is_all(3), "other engines step with it"


def test_an_engine_that_was_asked_to_end_is_recognised() -> None:
    core: Any = Core()
    assert not core.connector.wake.ending
    core.shutdown_state = SimpleNamespace(name="RUNNING")
    assert not core.connector.wake.ending
    core.shutdown_state = SimpleNamespace(name="SHUTTING_DOWN")
    assert core.connector.wake.ending


def test_an_engine_without_a_queue_or_a_state_is_not_woken() -> None:
    assert Connector(Words).wake is None
    assert Core(SimpleNamespace()).connector.wake is None
