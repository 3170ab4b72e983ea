"""Single rules of planning: coalescing, windows, states, prefixes, pieces."""

from dataclasses import replace
from typing import Any

import pytest

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, Runs, TokenRange
from kvferry.layout.builders import AxisOrder, KvPlace, LayoutBuilder, block_major, head_range, mamba2_parts
from kvferry.layout.cells import Cell, cell_runs, sample_cells
from kvferry.layout.description import CacheLayout, Rank
from kvferry.layout.edge import Edge
from kvferry.layout.packing import plan_staged
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan
from tests.layout.samples import attention

LAYERS = [f"layers.{i}.attn" for i in range(6)]


def major(block_tokens: int = 4, *, tp_rank: int = 0, tp_size: int = 1) -> CacheLayout:
    return block_major(
        LAYERS,
        num_blocks=64,
        block_tokens=block_tokens,
        heads=head_range(4, tp_rank, tp_size),
        head_dim=8,
        element_bytes=2,
        encoding="bf16",
        rank=Rank(tp_rank, tp_rank, tp_size),
    )


def edge_of(source: CacheLayout, destination: CacheLayout) -> Edge:
    (edge,) = pair([source], destination).edges
    return edge


def lengths(runs: list[Runs]) -> list[int]:
    return sorted(int(n) for piece in runs for n in piece.length)


def planned(edge: Edge, near: list[int], far: list[int], tokens: int, start: int = 0) -> list[Runs]:
    return list(plan(edge, [BlockTable(0, 0, near)], [BlockTable(0, 0, far)], TokenRange(start, tokens)))


BLOCK = 6 * 2 * 4 * 4 * 8 * 2


@pytest.mark.parametrize(
    ("near", "far", "expected"),
    [
        ([3, 4, 5, 6], [10, 11, 12, 13], [4 * BLOCK]),
        ([6, 5, 4, 3], [13, 12, 11, 10], [4 * BLOCK]),
        ([3, 4, 8, 9], [10, 11, 12, 13], [2 * BLOCK, 2 * BLOCK]),
        ([3, 4, 5, 6], [10, 11, 20, 21], [2 * BLOCK, 2 * BLOCK]),
        ([3, 4, 5, 6], [13, 12, 11, 10], [BLOCK] * 4),
        ([3, 9, 5, 30], [1, 20, 3, 40], [BLOCK] * 4),
    ],
)
def test_block_major_caches_give_one_run_per_stretch_of_blocks(
    near: list[int], far: list[int], expected: list[int]
) -> None:
    assert lengths(planned(edge_of(major(), major()), near, far, 16)) == expected


def test_a_partial_last_block_is_one_run_per_head() -> None:
    runs = lengths(planned(edge_of(major(), major()), [3, 4], [10, 11], 6))
    assert runs == [2 * 16] * (6 * 2 * 4) + [BLOCK]


def test_heads_of_another_rank_merge_over_tokens_and_neighbouring_heads() -> None:
    edge = edge_of(major(), major(tp_rank=1, tp_size=2))
    assert lengths(planned(edge, [3, 4], [10, 11], 8)) == [2 * 4 * 16] * (6 * 2 * 2)


@pytest.mark.parametrize("kv", list(KvPlace))
@pytest.mark.parametrize("order", list(AxisOrder))
def test_equal_memory_forms_merge_whole_requests(order: AxisOrder, kv: KvPlace) -> None:
    def layout() -> CacheLayout:
        builder = LayoutBuilder()
        group = builder.full(4)
        builder.attention(
            "a",
            group,
            heads=head_range(4, 0, 1),
            head_dim=8,
            element_bytes=2,
            encoding="e",
            order=order,
            kv=kv,
            num_blocks=16,
        )
        return builder.build()

    runs = lengths(planned(edge_of(layout(), layout()), [3, 4, 5], [7, 8, 9], 12))
    expected = 1 if kv in (KvPlace.PACKED, KvPlace.INTERLEAVED) else 2
    assert runs == [3 * 2 * 4 * 4 * 8 * 2 // expected] * expected


def test_unequal_blocks_of_token_major_layers_merge_over_both_block_sizes() -> None:
    def layout(block_tokens: int) -> CacheLayout:
        builder = LayoutBuilder()
        group = builder.full(block_tokens)
        builder.latent("a", group, latent_dim=8, element_bytes=2, encoding="e", num_blocks=16)
        return builder.build()

    assert lengths(planned(edge_of(layout(16), layout(24)), [3, 4, 5], [7, 8], 48)) == [48 * 16]
    assert lengths(planned(edge_of(layout(24), layout(16)), [7, 8], [3, 9, 5], 48)) == [256] * 3


def test_nothing_of_decodes_own_prefix_is_copied() -> None:  # R30
    edge = edge_of(major(), major())
    assert sum(n for n in lengths(planned(edge, [3, 4], [10, 11], 8, start=4))) == BLOCK
    assert planned(edge, [3, 4], [10, 11], 8, start=8) == []


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_pieces_are_bounded_and_complete(limit: int) -> None:
    edge = edge_of(attention(order=AxisOrder.NHD), attention(order=AxisOrder.HND))
    tables = [BlockTable(0, 0, [5, 2, 7])]
    pieces = list(plan(edge, tables, tables, TokenRange(1, 11), max_runs_per_piece=limit))
    whole = list(plan(edge, tables, tables, TokenRange(1, 11)))
    assert max(len(piece) for piece in pieces) <= limit
    assert sum(piece.num_bytes for piece in pieces) == sum(piece.num_bytes for piece in whole) == 10 * 2 * 2 * 4 * 4


def window_layout(*, window: int = 6, full: bool = False, block_tokens: int = 2) -> CacheLayout:
    builder = LayoutBuilder()
    group = builder.full(block_tokens) if full else builder.window(block_tokens, window)
    builder.latent("layers.0.attn", group, latent_dim=2, element_bytes=2, encoding="e", num_blocks=32)
    return builder.build()


def test_blocks_that_the_window_has_left_may_be_absent() -> None:  # R22 R23
    edge = edge_of(window_layout(), window_layout())
    near, far = [BlockTable(0, 14, [1, 2, 3])], [BlockTable(0, 14, [4, 5, 6])]
    moved = sum(piece.num_bytes for piece in plan(edge, near, far, TokenRange(0, 20)))
    assert moved == 6 * 4


def test_what_both_have_before_the_window_is_copied_too() -> None:
    edge = edge_of(window_layout(), window_layout())
    near, far = [BlockTable(0, 8, [0, 7, 8, 1, 2, 3])], [BlockTable(0, 12, [9, 4, 5, 6])]
    assert sum(piece.num_bytes for piece in plan(edge, near, far, TokenRange(0, 20))) == 8 * 4


@pytest.mark.parametrize(("first", "fine"), [(14, True), (15, True), (16, False)])
def test_the_window_is_counted_with_the_next_token(first: int, fine: bool) -> None:
    edge = edge_of(window_layout(block_tokens=1), window_layout(block_tokens=1))
    near = [BlockTable(0, first, list(range(20 - first)))]
    far = [BlockTable(0, 0, list(range(20)))]
    if fine:
        plan(edge, near, far, TokenRange(0, 20))
    else:
        with pytest.raises(
            MalformedMessage, match=r"tokens \[15, 20\) are needed.*holds \[16, 20\): token 15 has no block"
        ):
            plan(edge, near, far, TokenRange(0, 20))


def test_a_window_layer_kept_whole_by_prefill_serves_a_window_group() -> None:  # R22
    edge = edge_of(window_layout(full=True), window_layout())
    near, far = [BlockTable(0, 0, list(range(10)))], [BlockTable(0, 14, [4, 5, 6])]
    assert sum(piece.num_bytes for piece in plan(edge, near, far, TokenRange(0, 20))) == 6 * 4


def test_an_early_chunk_does_not_need_what_the_last_window_has_left() -> None:
    edge = edge_of(window_layout(), window_layout())
    near, far = [BlockTable(0, 14, [1, 2, 3])], [BlockTable(0, 14, [4, 5, 6])]
    assert list(plan(edge, near, far, TokenRange(0, 10), end=20)) == []
    assert sum(piece.num_bytes for piece in plan(edge, near, far, TokenRange(10, 20), end=20)) == 6 * 4


def state_layout(tp_rank: int = 0, tp_size: int = 1) -> CacheLayout:
    builder = LayoutBuilder(Rank(tp_rank, tp_rank, tp_size))
    group = builder.states()
    parts = mamba2_parts(
        heads=4, head_dim=2, groups=2, state=2, conv_width=3, tp_rank=tp_rank, tp_size=tp_size, element_bytes=2
    )
    builder.state("layers.0.mamba", group, parts, num_blocks=4)
    return builder.build()


def test_a_state_moves_with_the_last_chunk_only() -> None:
    edge = edge_of(state_layout(), state_layout())
    tables = [BlockTable(0, 9, [2])]
    assert list(plan(edge, tables, tables, TokenRange(0, 5), end=9)) == []
    (runs,) = plan(edge, tables, tables, TokenRange(5, 9), end=9)
    assert len(runs) == 1


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("planner", [plan, plan_staged])
def test_a_state_of_another_token_is_refused(side: str, planner: object) -> None:
    edge = edge_of(state_layout(), state_layout())
    good, bad = [BlockTable(0, 9, [2])], [BlockTable(0, 8, [2])]
    assert callable(planner)
    with pytest.raises(
        MalformedMessage,
        match=f"layer 'layers.0.mamba': the {side}'s state is the one after token 8; the one after token 9",
    ):
        planner(edge, *((bad, good) if side == "source" else (good, bad)), TokenRange(0, 9))


def test_a_request_has_one_state() -> None:
    edge = edge_of(state_layout(), state_layout())
    with pytest.raises(MalformedMessage, match="2 slots; a request has one state"):
        plan(edge, [BlockTable(0, 9, [1, 2])], [BlockTable(0, 9, [2])], TokenRange(0, 9))


def test_convolution_sections_are_cut_each_at_its_own_place() -> None:  # R23
    pairing = pair([state_layout(rank, 2) for rank in range(2)], state_layout())
    cut = {(edge.source_rank, p.part): p.ranges[0] for edge in pairing.edges for p in edge.slices}
    assert cut[0, "conv.x"] == (0, 4)
    assert cut[1, "conv.x"] == (4, 8)
    assert cut[1, "conv.b"] == cut[1, "conv.c"] == (2, 4)
    assert cut[1, "ssm"] == (2, 4)


def test_opaque_blocks_must_begin_at_equal_places() -> None:
    def layout() -> CacheLayout:
        builder = LayoutBuilder()
        builder.opaque("layers.0.attn", builder.full(4), block_bytes=64, encoding="tiles", num_blocks=4)
        return builder.build()

    edge = edge_of(layout(), layout())
    near, far = [BlockTable(0, 0, [0, 1])], [BlockTable(0, 2, [2, 3])]
    with pytest.raises(MalformedMessage, match="must be a multiple of 4 apart"):
        plan(edge, near, far, TokenRange(2, 8))


def test_a_staged_plan_is_as_small_for_long_requests_with_many_short_runs() -> None:
    edge = edge_of(attention(layers=8, num_blocks=3000), attention(layers=8, num_blocks=3000, order=AxisOrder.HND))
    tables = [BlockTable(0, 0, list(range(2500))[::-1])]
    direct = sum(len(piece) for piece in plan(edge, tables, tables, TokenRange(0, 9999)))
    staged = plan_staged(edge, tables, tables, TokenRange(0, 9999))
    assert direct > 500_000
    assert len(staged.source.boxes) + len(staged.destination.boxes) <= 8 * 2 * 2 * 2
    assert staged.source.payload_bytes == staged.destination.payload_bytes == 9999 * 8 * 2 * 4 * 4


def test_cells_do_not_depend_on_layout() -> None:
    forms = [
        attention(order=AxisOrder.NHD, block_tokens=4),
        attention(order=AxisOrder.HND, block_tokens=3),
    ]
    drawn = [sample_cells("t1", edge_of(a, b), TokenRange(2, 12), 20) for a in forms for b in forms]
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
    assert len(drawn[0]) > 10
    assert sample_cells("t2", edge_of(*forms), TokenRange(2, 12), 20) != drawn[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer": "layers.7.attn"}, "no such tensor"),
        ({"start": -1}, r"tokens \[-1, 3\) are not in the table"),
        ({"stop": 13}, r"tokens \[2, 13\) are not in the table"),
        ({"start": 1 << 70}, "are not in the table"),
        ({"ranges": (("head", 0, 5), ("dim", 0, 2))}, r"head \[0, 5\) is not inside \[0, 4\)"),
        ({"ranges": (("head", -1, 1), ("dim", 0, 2))}, r"head \[-1, 1\) is not inside"),
        ({"ranges": (("head", 0, 1),)}, r"axes are \['head'\]"),
    ],
)
def test_a_cell_from_a_peer_is_checked(changes: dict[str, Any], says: str) -> None:
    good = Cell("layers.0.attn", "k", 2, 3, (("head", 0, 1), ("dim", 0, 2)))
    tables = [BlockTable(0, 0, [1, 2, 3])]
    assert cell_runs(attention(), tables, good).num_bytes == 4
    with pytest.raises(MalformedMessage, match=says):
        cell_runs(attention(), tables, replace(good, **changes))
