"""vLLM's lists of block ids, as tables with positions."""

from kvferry.engines.vllm.describe.block_tables import GroupForm, tables_of
from kvferry.layout.blocks import BlockTable
from kvferry.layout.description import CacheGroup, CacheKind

FULL = GroupForm(kind=CacheKind.FULL, block_tokens=128, kernel_tokens=128)
SPLIT = GroupForm(kind=CacheKind.FULL, block_tokens=256, kernel_tokens=64)
WINDOW = GroupForm(kind=CacheKind.WINDOW, block_tokens=64, kernel_tokens=64, window_tokens=100)
STATE = GroupForm(kind=CacheKind.STATE, block_tokens=0, kernel_tokens=0, scratch_blocks=2)


def test_a_full_group_begins_at_token_0() -> None:
    assert tables_of([FULL], [[5, 9]], 200) == (BlockTable(0, 0, (5, 9)),)


def test_null_blocks_before_a_window_are_left_out_and_counted() -> None:
    assert tables_of([FULL, WINDOW], [[1], [0, 0, 7, 8]], 250)[1] == BlockTable(1, 128, (7, 8))


def test_only_null_blocks_are_an_empty_table() -> None:
    assert tables_of([WINDOW], [[0, 0]], 128) == (BlockTable(0, 128, ()),)


def test_a_manager_block_of_several_kernel_blocks() -> None:
    assert tables_of([SPLIT], [[2, 0, 3]], 768)[0] == BlockTable(0, 512, (12, 13, 14, 15))


def test_a_state_is_in_the_last_block_that_is_not_scratch() -> None:
    assert tables_of([STATE], [[4, 5, 6, 7]], 99) == (BlockTable(0, 99, (5,)),)
    assert tables_of([STATE], [[4]], 99) == (BlockTable(0, 99, (4,)),)
    assert tables_of([STATE], [[]], 99) == (BlockTable(0, 99, ()),)


def test_only_one_kind() -> None:
    found = tables_of([WINDOW, FULL, STATE], [[1], [2], [3]], 10, only=CacheKind.FULL)
    assert found == (BlockTable(1, 0, (2,)),)


def test_groups_of_the_layout_are_in_kernel_blocks() -> None:
    assert SPLIT.cache_group == CacheGroup(CacheKind.FULL, 64)
    assert WINDOW.cache_group == CacheGroup(CacheKind.WINDOW, 64, 100)
    assert STATE.cache_group == CacheGroup(CacheKind.STATE, 0)
