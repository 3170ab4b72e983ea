"""How a hand-off is cut into parts: whole units before the last one, each short compared with the lease."""

import itertools

import pytest

from kvferry.handoff.actions import Peer
from kvferry.handoff.parts import Cutter, Part
from kvferry.ids import EngineId, Incarnation, PeerName
from kvferry.layout.blocks import TokenRange
from tests.harness.handoff_pair import FakeQueries

PEER = Peer(PeerName("p/1/0"), EngineId("p"), Incarnation("1"), 0)


class _PerToken(FakeQueries):
    """Layouts for which a write takes one second per token."""

    def write_s(self, peer: Peer, num_tokens: int) -> float:
        return float(num_tokens)


def cut(cutter: Cutter, queries: FakeQueries, ready_stop: int, *, final: bool, ttl_s: float = 1e9) -> list[Part]:
    parts = cutter.cut(PEER, queries, ready_stop=ready_stop, wanted_stop=100, final=final, ttl_s=ttl_s)
    return list(parts)


def test_progress_is_cut_at_whole_units_and_the_rest_comes_last() -> None:
    cutter, queries = Cutter(), FakeQueries(unit=16)
    assert cut(cutter, queries, 15, final=False) == []
    assert cut(cutter, queries, 40, final=False) == [Part(0, TokenRange(0, 32), last=False)]
    assert cut(cutter, queries, 40, final=False) == []
    assert cut(cutter, queries, 40, final=True) == [Part(1, TokenRange(32, 40), last=True)]
    assert cutter.finished
    assert cut(cutter, queries, 90, final=True) == []


def test_the_last_part_comes_even_without_a_new_token() -> None:
    cutter, queries = Cutter(), FakeQueries(unit=8)
    assert cut(cutter, queries, 32, final=False) == [Part(0, TokenRange(0, 32), last=False)]
    assert cut(cutter, queries, 32, final=True) == [Part(1, TokenRange(32, 32), last=True)]


def test_nothing_beyond_the_wanted_range_is_cut() -> None:
    (part,) = cut(Cutter(next_token=20), FakeQueries(), 300, final=True)
    assert part == Part(0, TokenRange(20, 100), last=True)


@pytest.mark.parametrize(("ttl_s", "longest"), [(400.0, 96), (200.0, 48), (100.0, 24), (10.0, 8)])
def test_no_part_takes_longer_than_a_quarter_of_the_lease_unless_one_unit_does(ttl_s: float, longest: int) -> None:
    parts = cut(Cutter(), _PerToken(unit=8), 96, final=True, ttl_s=ttl_s)
    assert max(len(part.tokens) for part in parts) == longest
    assert [part.index for part in parts] == list(range(len(parts)))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[0].tokens.start == 0
    assert parts[-1].tokens.stop == 96
    assert all(one.tokens.stop == two.tokens.start for one, two in itertools.pairwise(parts))
