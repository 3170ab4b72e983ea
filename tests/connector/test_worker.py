"""The worker halves of an engine of several ranks: what they must know, and how their counters add up."""

import pytest

from kvferry.connector.engine import joined_stats
from kvferry.connector.worker import start_worker
from kvferry.handoff.orders import Landed, StepReport, merged
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.layout.builders import block_major, head_range
from kvferry.layout.description import Rank
from kvferry.settings import FerrySettings
from kvferry.stats import HandoffStats


def test_the_counters_of_ranks_count_the_same_hand_offs() -> None:
    ranks = [
        HandoffStats(landed=3, failed=0, bytes=100, transfer_s=0.5, open_grants=2, peers=4),
        HandoffStats(landed=2, failed=1, bytes=50, transfer_s=0.7, open_grants=2, quarantined_blocks=6, peers=4),
    ]
    want = HandoffStats(landed=3, failed=1, bytes=150, transfer_s=0.7, open_grants=2, quarantined_blocks=6, peers=4)
    assert joined_stats(ranks) == want
    assert joined_stats(ranks[:1]) == ranks[0]


def test_reports_of_one_rank_are_merged_in_order() -> None:
    def report(name: str) -> StepReport:
        landed = Landed(TransferId(name), RequestId(name), TokenRange(0, 4), 1, 1, 0.1)
        return StepReport(landed=(landed,), released=frozenset({TransferId(name)}), taken=frozenset({TransferId(name)}))

    both = merged([report("a"), report("b")])
    assert [one.request for one in both.landed] == ["a", "b"]
    assert both.released == both.taken == {"a", "b"}
    assert merged([report("a")]) == report("a")


def test_a_rank_of_several_must_know_the_layouts_of_all() -> None:
    """Without them it does not know which bytes it owes to which peer: it would send and verify nothing in push."""
    layout = block_major(
        ["layers.0.attn"],
        num_blocks=4,
        block_tokens=16,
        heads=head_range(2, 0, 2),
        head_dim=8,
        element_bytes=4,
        encoding="fp32",
        rank=Rank(0, 0, 2),
    )
    with pytest.raises(AssertionError, match="an engine of several ranks gives each all layouts"):
        start_worker(
            layout,
            (),
            engine=EngineId("e"),
            incarnation=Incarnation("1"),
            settings=FerrySettings(),
            num_ranks=2,
            engine_layouts=(layout,),
        )
