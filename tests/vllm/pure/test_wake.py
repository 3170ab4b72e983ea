"""How an idle engine core is woken."""

import enum
import queue
from types import SimpleNamespace
from typing import Any

from kvferry.engines.vllm.wake import Wake, find_wake


class Words(enum.Enum):
    WAKEUP = b"\x05"


class Connector:
    def __init__(self, words: Any) -> None:
        self.wake = find_wake(words)


class Core:
    """As EngineCoreProc: the queue first, then the parts, which make the connector."""

    def __init__(self, words: Any = Words) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.connector = self.make(words)

    def make(self, words: Any) -> Connector:
        return Connector(words)


def test_the_engine_that_makes_its_connector_is_woken() -> None:
    core = Core()
    wake = core.connector.wake
    assert isinstance(wake, Wake)
    wake()
    assert core.input_queue.get_nowait() == (Words.WAKEUP, None)


def test_an_engine_that_was_told_to_end_is_known() -> None:
    core: Any = Core()
    assert not core.connector.wake.ending
    core.shutdown_state = SimpleNamespace(name="RUNNING")
    assert not core.connector.wake.ending
    core.shutdown_state = SimpleNamespace(name="SHUTTING_DOWN")
    assert core.connector.wake.ending


def test_an_engine_without_a_queue_or_a_word_is_not_woken() -> None:
    assert Connector(Words).wake is None
    assert Core(SimpleNamespace()).connector.wake is None
