"""What a worker tells the scheduler."""

from kvferry.connector.base import Depart, StepReport
from kvferry.engines.vllm.news import News
from kvferry.ids import EngineId, Incarnation, TransferId


def a_report(name: str) -> StepReport:
    return StepReport(released=frozenset({TransferId(name)}))


def test_each_report_is_told_once_and_rings() -> None:  # I4
    waiting = [StepReport(), a_report("a"), StepReport(), a_report("b")]
    rings: list[None] = []
    news = News()
    news.report()  # before the half is there
    news.open(lambda: waiting.pop(0), lambda: rings.append(None))
    for _ in range(4):
        news.report()
    assert len(rings) == 2, "nothing to report is no reason to wake an engine"
    assert news.take() == ((a_report("a"), a_report("b")), ())
    assert news.take() == ((), ())


def test_a_lost_peer_rings() -> None:
    rings: list[None] = []
    news = News()
    news.open(StepReport, lambda: rings.append(None))
    news.lost(EngineId("p"), Incarnation("1"), "gone")
    assert rings
    assert news.take() == ((), (Depart(EngineId("p"), Incarnation("1"), "gone"),))
