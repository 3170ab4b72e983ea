"""What a worker reports to the scheduler."""

import pytest

from kvferry.connector.base import PeerGone, StepReport
from kvferry.engines.vllm.channel.report_queue import ReportQueue
from kvferry.ids import EngineId, Incarnation, TransferId

GONE = PeerGone(EngineId("p"), Incarnation("1"), "gone")


def a_report(name: str) -> StepReport:
    return StepReport(released=frozenset({TransferId(name)}))


@pytest.mark.parametrize("line", [True, False])
def test_each_report_is_delivered_once(line: bool) -> None:  # I4
    """Reports go over the channel, or with a step if there is none."""
    waiting = [StepReport(), a_report("a"), StepReport(), a_report("b")]
    reported: list[StepReport | PeerGone] = []

    def tell(news: StepReport | PeerGone) -> bool:
        if line:
            reported.append(news)
        return line

    news = ReportQueue()
    news.report()  # before the scheduler half exists
    news.open(lambda: waiting.pop(0), tell)
    for _ in range(4):
        news.report()
    news.lost(GONE.engine, GONE.incarnation, GONE.reason)
    taken = news.take()
    if line:
        assert reported == [a_report("a"), a_report("b"), GONE], "without a report the engine is not woken"
        assert taken == ((), ())
    else:
        assert taken == ((a_report("a"), a_report("b")), (GONE,))
    assert news.take() == ((), ())
