"""The block manager: random use with its own check, prefix chains, long runs, blocks held for transfers."""

import subprocess
import sys
from typing import NoReturn

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvferry.engines.mini.scheduling.block_manager import BlockHash, BlockManager, chain_hashes, num_runs
from kvferry.ids import TransferId
from kvferry.wire.prompt_digest import pack_tokens
from tests.harness.hypothesis_profile import examples


class Books(RuleBasedStateMachine):
    """Requests come, share blocks, grow, end and are held: no block is miscounted or allocated twice."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(24)
        self.live: list[list[int]] = []
        self.held: dict[TransferId, list[int]] = {}
        self.number = 0

    @rule(target=tables, family=st.integers(0, 2), length=st.integers(1, 8))
    def start(self, family: int, length: int) -> list[int]:
        hashes = [BlockHash(bytes((family, i))) for i in range(length)]
        known = self.manager.find(hashes[:-1])
        if not self.manager.fits(known, length - len(known)):
            return []
        self.manager.take(known)
        others = {block for table in [*self.live, *self.held.values()] for block in table}
        fresh = self.manager.allocate(length - len(known))
        assert not others & set(fresh), "a block in use was given away"
        table = known + fresh
        self.live.append(table)
        for block, key in zip(table, hashes, strict=True):
            self.manager.remember(block, key)
        return table

    @rule(table=tables)
    def grow(self, table: list[int]) -> None:
        if table and any(table is one for one in self.live) and self.manager.fits((), 1):
            others = {block for one in [*self.live, *self.held.values()] for block in one}
            fresh = self.manager.allocate(1, after=table[-1])
            assert not others & set(fresh)
            table += fresh

    @rule(table=consumes(tables), hold=st.booleans())
    def end(self, table: list[int], hold: bool) -> None:
        at = next((i for i, one in enumerate(self.live) if one is table), None)
        if at is None:
            return
        del self.live[at]
        if hold:
            transfer = TransferId(str(self.number))
            self.number += 1
            self.held[transfer] = table
            self.manager.hold(transfer, table)
        else:
            self.manager.free(table)

    @rule()
    def release(self) -> None:
        if self.held:
            transfer = next(iter(self.held))
            del self.held[transfer]
            assert self.manager.release(transfer)
            assert not self.manager.release(transfer), "twice is no error, and changes nothing"

    @invariant()
    def books_are_right(self) -> None:
        self.manager.check(self.live)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_check_finds_a_leak() -> None:
    manager = BlockManager(8)
    table = manager.allocate(3)
    with pytest.raises(AssertionError, match="block 1 has 1 references, and 0 owners"):
        manager.check([])
    manager.check([table])
    with pytest.raises(AssertionError, match="1 references, and 2 owners"):
        manager.check([table, table])


def test_a_block_that_is_freed_too_often_is_caught() -> None:
    manager = BlockManager(8)
    table = manager.allocate(1)
    manager.free(table)
    with pytest.raises(AssertionError, match="freed more often than taken"):
        manager.free(table)


def test_long_runs_are_kept_for_long_prompts() -> None:
    manager = BlockManager(1 + 20)
    a, b, c = manager.allocate(4), manager.allocate(3), manager.allocate(5)
    assert [num_runs(table) for table in (a, b, c)] == [1, 1, 1]
    manager.free(b)
    assert manager.allocate(3) == b, "the smallest hole that is large enough"
    manager.free(b)
    assert num_runs(manager.allocate(8)) == 1, "the run after the block, not the hole"
    assert manager.allocate(1, after=c[-1]) == [b[0]], "a growing answer takes the smallest hole"


def test_without_one_long_run_the_longest_are_joined() -> None:
    manager = BlockManager(1 + 12)
    table = manager.allocate(12)
    manager.free([*table[0:2], *table[3:7], *table[8:11]])
    fresh = manager.allocate(8)
    assert len(fresh) == 8
    assert num_runs(fresh) == 3
    assert fresh[:4] == table[3:7], "the longest first"


def test_growth_continues_after_the_last_block() -> None:
    manager = BlockManager(1 + 10)
    table = manager.allocate(3)
    assert manager.allocate(2, after=table[-1]) == [4, 5]


def test_the_oldest_cached_block_goes_first_and_ends_before_beginnings() -> None:
    manager = BlockManager(1 + 6)
    keys = [[BlockHash(bytes((name, i))) for i in range(3)] for name in range(2)]
    for chain in keys:
        table = manager.allocate(3)
        for block, key in zip(table, chain, strict=True):
            manager.remember(block, key)
        manager.free(table)
    assert manager.num_free == 6
    manager.allocate(1)
    assert len(manager.find(keys[0])) == 2, "the older chain lost its end"
    assert len(manager.find(keys[1])) == 3
    manager.allocate(2)
    assert manager.find(keys[0]) == []
    assert len(manager.find(keys[1])) == 3


def test_a_used_prefix_is_not_evicted_and_is_counted_right_by_fits() -> None:
    manager = BlockManager(1 + 4)
    key = BlockHash(b"k")
    table = manager.allocate(2)
    manager.remember(table[0], key)
    manager.free(table)
    known = manager.find([key])
    assert manager.fits(known, 3)
    assert not manager.fits(known, 4), "the known block is free now, and will not be once it is taken"
    manager.take(known)
    assert known[0] not in manager.allocate(3)


def test_hashes_are_chained_and_the_same_everywhere() -> None:
    known: list[BlockHash] = []
    chain_hashes(known, [1, 2, 3, 4, 5], 2)
    assert len(known) == 2, "whole blocks only"
    chain_hashes(known, [1, 2, 3, 4, 5, 6, 7], 2)
    assert len(known) == 3
    other: list[BlockHash] = []
    chain_hashes(other, [9, 2, 3, 4, 5, 6], 2)
    assert not set(known) & set(other), "a block's hash covers all before it"
    coarse: list[BlockHash] = []
    chain_hashes(coarse, [1, 2, 3, 4], 4)
    assert coarse[0] not in known
    code = (
        "from kvferry.engines.mini.scheduling.block_manager import chain_hashes as c; "
        "k=[]; c(k,[1,2,3,4,5,6],2); print(k[-1].hex())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == known[-1].hex()


def test_hashes_under_different_salts_have_nothing_in_common() -> None:  # R38
    tokens = [1, 2, 3, 4, 5, 6]
    plain, ours, theirs = [], [], []  # type: tuple[list[BlockHash], list[BlockHash], list[BlockHash]]
    for known, salt in ((plain, ""), (ours, "a"), (theirs, "b")):
        chain_hashes(known, tokens[:2], 2, salt)
        chain_hashes(known, tokens, 2, salt)
    assert len({*plain, *ours, *theirs}) == 9
    again: list[BlockHash] = []
    chain_hashes(again, tokens, 2, "a")
    assert again == ours


@pytest.mark.parametrize("num_packed", [0, 3, 16, 37, 50])
@pytest.mark.parametrize("num_known", [0, 1, 3])
def test_hashes_are_the_same_whatever_is_packed_already(num_packed: int, num_known: int) -> None:
    tokens = list(range(100, 150))
    whole: list[BlockHash] = []
    chain_hashes(whole, tokens, 16)
    assert len(whole) == 3
    known = whole[:num_known]
    chain_hashes(known, tokens, 16, "", pack_tokens(tokens[:num_packed]))
    assert known == whole


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = BlockManager(4, prefix_caching=False)
    table = manager.allocate(1)
    manager.remember(table[0], BlockHash(b"k"))
    assert manager.find([BlockHash(b"k")]) == []


class Unwalked(dict[tuple[int, BlockHash], int]):
    """The map of known hashes; it must not be walked."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("all known hashes were walked")


def test_the_mark_of_the_prefix_cache_changes_with_it_and_walks_no_hash() -> None:
    """Routers ask for it every second on the engine's thread, and a cache may know a million blocks."""
    manager = BlockManager(40)
    hashes: list[BlockHash] = []
    chain_hashes(hashes, range(30), 1)
    blocks = manager.allocate(30)
    manager._by_hash = Unwalked()
    marks = [manager.mark()]
    for block, key in zip(blocks, hashes, strict=True):
        manager.remember(block, key)
        marks.append(manager.mark())
    assert [num for _, num in marks] == list(range(31))
    manager.remember(blocks[0], hashes[0], 1)
    assert manager.mark(1) == (0, 0), "a block has one content"
    assert len({version for version, _ in marks}) == 31
    manager.free(blocks)
    for key in reversed(hashes):
        assert manager.mark() == marks.pop(), "the same hashes have the same mark"
        manager.forget(key, 0)
    assert manager.mark() == marks.pop() == (0, 0)
    assert all(0 <= version < 1 << 63 for version, _ in marks)
    manager._by_hash = {}
    manager.check([])
