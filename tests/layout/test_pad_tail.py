"""If the caller allows it, and both sides' blocks are alike, a partly wanted last block is moved whole."""

import numpy as np
import pytest

from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.description import Axis, CacheGroup, CacheKind, CacheLayout, Paging, Rank, Region, Tensor
from kvferry.layout.edge import Edge
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan

TOKENS, DIM, BLOCKS = 32, 16, 8


def dim_major(block_tokens: int = TOKENS, address: int = 1 << 20) -> CacheLayout:
    """Keys as [dim, token] in each block, as CPU kernels need them: tokens are the innermost axis."""
    tensor = Tensor(
        "layers.0.attn",
        "k",
        "fp32",
        4,
        0,
        0,
        0,
        Paging(BLOCKS, block_tokens * DIM * 4, 4),
        (Axis("dim", DIM, 0, DIM, block_tokens * 4),),
    )
    region = Region(address, BLOCKS * block_tokens * DIM * 4)
    return CacheLayout(Rank(), (region,), (CacheGroup(CacheKind.FULL, block_tokens),), (tensor,))


def moved(edge: Edge, wanted: TokenRange, *, pad_tail: bool, source: tuple[int, ...]) -> set[int]:
    """Returns the destination's bytes that are written."""
    tables = [BlockTable(0, 0, source)], [BlockTable(0, 0, (1, 2, 3))]
    written: set[int] = set()
    for runs in plan(edge, *tables, wanted, pad_tail=pad_tail):
        for at, size in zip(runs.destination, runs.length, strict=True):
            written.update(range(int(at), int(at + size)))
    return written


def num_runs(edge: Edge, wanted: TokenRange, *, pad_tail: bool) -> int:
    tables = [BlockTable(0, 0, (5, 6, 7))], [BlockTable(0, 0, (1, 2, 3))]
    return sum(len(runs) for runs in plan(edge, *tables, wanted, pad_tail=pad_tail))


def edge_of(source: CacheLayout, destination: CacheLayout) -> Edge:
    (edge,) = pair([source], destination).edges
    return edge


def test_a_tail_is_one_run_and_holds_all_that_was_wanted() -> None:
    edge, wanted = edge_of(dim_major(), dim_major(address=1 << 30)), TokenRange(0, TOKENS + 9)
    assert num_runs(edge, wanted, pad_tail=False) == 1 + DIM
    assert num_runs(edge, wanted, pad_tail=True) == 1  # the blocks are consecutive on both sides
    exact = moved(edge, wanted, pad_tail=False, source=(5, 6))
    padded = moved(edge, wanted, pad_tail=True, source=(5, 6))
    assert exact < padded
    block = TOKENS * DIM * 4
    assert padded == set(range(block, 3 * block)), "nothing outside of the blocks that are wanted"


@pytest.mark.parametrize("wanted", [TokenRange(3, 40), TokenRange(0, 2 * TOKENS)])
def test_whole_blocks_and_heads_are_not_padded(wanted: TokenRange) -> None:
    edge = edge_of(dim_major(), dim_major(address=1 << 30))
    first = moved(edge, TokenRange(wanted.start, TOKENS), pad_tail=True, source=(5, 6))
    assert first == moved(edge, TokenRange(wanted.start, TOKENS), pad_tail=False, source=(5, 6))


def test_blocks_of_two_sizes_move_exactly() -> None:
    edge, wanted = edge_of(dim_major(16), dim_major(address=1 << 30)), TokenRange(0, 40)
    assert moved(edge, wanted, pad_tail=True, source=(4, 5, 6)) == moved(edge, wanted, pad_tail=False, source=(4, 5, 6))


def test_a_tail_inside_one_block_that_begins_elsewhere_moves_exactly() -> None:
    edge, wanted = edge_of(dim_major(), dim_major(address=1 << 30)), TokenRange(4, 20)
    assert moved(edge, wanted, pad_tail=True, source=(5,)) == moved(edge, wanted, pad_tail=False, source=(5,))


def test_the_bytes_are_those_of_the_source() -> None:
    edge, wanted = edge_of(dim_major(), dim_major(address=1 << 30)), TokenRange(0, TOKENS + 9)
    near, far = np.arange(BLOCKS * TOKENS * DIM * 4) % 251, np.zeros(BLOCKS * TOKENS * DIM * 4, np.int64)
    tables = [BlockTable(0, 0, (6, 2))], [BlockTable(0, 0, (1, 4))]
    for runs in plan(edge, *tables, wanted, pad_tail=True):
        for source, at, size in zip(runs.source, runs.destination, runs.length, strict=True):
            far[at : at + size] = near[source : source + size]
    block = TOKENS * DIM * 4
    for mine, theirs in ((1, 6), (4, 2)):
        assert (far[mine * block : (mine + 1) * block] == near[theirs * block : (theirs + 1) * block]).all()
