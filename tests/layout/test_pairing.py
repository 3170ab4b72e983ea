"""Which rank gives what to which; and what is refused, and with which message."""

import re
from dataclasses import replace

import pytest

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.layout.builders import LayoutBuilder, block_major, head_range
from kvferry.layout.description import Axis, CacheLayout, Rank
from kvferry.layout.pairing import pair
from tests.layout.samples import attention, paging, with_tensor


def ranges_of_k(sources: list[CacheLayout], destination: CacheLayout) -> dict[int, tuple[int, int]]:
    return {
        edge.source_rank: next(piece.ranges[0] for piece in edge.slices if piece.part == "k")
        for edge in pair(sources, destination).edges
    }


def engine(heads: int, tp: int) -> list[CacheLayout]:
    return [attention(heads=heads, tp_rank=rank, tp_size=tp) for rank in range(tp)]


def mla(tp_rank: int, tp_size: int) -> CacheLayout:
    builder = LayoutBuilder(Rank(tp_rank, tp_rank, tp_size))
    group = builder.full(4)
    builder.latent("layers.0.attn", group, latent_dim=4, element_bytes=2, encoding="bf16", num_blocks=8)
    return builder.build()


@pytest.mark.parametrize(
    ("heads", "p_tp", "d_tp", "rank", "expected"),
    [
        (4, 2, 1, 0, {0: (0, 2), 1: (2, 4)}),
        (4, 1, 2, 1, {0: (2, 4)}),
        (3, 3, 1, 0, {0: (0, 1), 1: (1, 2), 2: (2, 3)}),
        (3, 1, 3, 2, {0: (2, 3)}),
        (6, 2, 3, 1, {0: (2, 3), 1: (3, 4)}),
        (6, 3, 2, 0, {0: (0, 2), 1: (2, 3)}),
        (3, 2, 1, 0, {0: (0, 2), 1: (2, 3)}),
    ],
)
def test_heads_are_cut_wherever_either_side_cuts(  # R23
    heads: int, p_tp: int, d_tp: int, rank: int, expected: dict[int, tuple[int, int]]
) -> None:
    assert ranges_of_k(engine(heads, p_tp), engine(heads, d_tp)[rank]) == expected


def test_readers_spread_over_copies_of_replicated_heads() -> None:  # R23
    readers = engine(2, 8)
    assert [next(iter(ranges_of_k(engine(2, 8), reader))) for reader in readers] == list(range(8))


def test_readers_spread_over_mla_copies() -> None:  # R23
    sources = [mla(rank, 4) for rank in range(4)]
    chosen = [pair(sources, mla(rank, 8)).edges[0].source_rank for rank in range(8)]
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_the_order_in_which_ranks_are_listed_does_not_matter() -> None:
    destination = attention(heads=6)
    assert pair(engine(6, 3), destination) == pair(engine(6, 3)[::-1], destination)


def test_stages_of_prefill_that_decode_does_not_need_are_ignored() -> None:  # R19
    stages = [
        attention(rank=Rank(0, 0, 1, 0, 2)),
        attention(rank=Rank(1, 0, 1, 1, 2), first_layer=2),
    ]
    assert [edge.source_rank for edge in pair(stages, attention(first_layer=2)).edges] == [1]


def test_a_layer_that_no_rank_offers_is_named() -> None:  # R19
    message = (
        "layer 'layers.2.attn' part 'k' is not offered by any rank of prefill: it offers no part of that layer. "
        "Serve the same model, with the same draft model, on both sides"
    )
    with pytest.raises(IncompatiblePeer, match=f"^{re.escape(message)}$"):
        pair([attention(layers=2)], attention(layers=3))


def test_a_missing_part_is_refused_with_the_parts_that_exist() -> None:  # R19
    source = attention(layers=1)
    source = replace(source, tensors=source.tensors[:1])
    with pytest.raises(IncompatiblePeer, match=r"part 'v' is not offered.*it offers parts \['k'\]"):
        pair([source], attention(layers=1))


def test_heads_that_no_rank_holds_are_named() -> None:  # R19 R23
    message = r"layer 'layers.0.attn' part 'k': no rank of prefill holds head \[2, 4\) of 4, dim \[0, 2\) of 2"
    with pytest.raises(IncompatiblePeer, match=message):
        pair(engine(4, 2)[:1], attention(heads=4))


def test_a_layer_on_two_stages_is_refused() -> None:  # R19
    stages = [attention(rank=Rank(0, 0, 1, 0, 2)), attention(rank=Rank(1, 0, 1, 1, 2))]
    with pytest.raises(MalformedMessage, match=r"advertised twice, by pipeline stages \[0, 1\]"):
        pair(stages, attention())


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ([], "describes no ranks"),
        ([attention(), attention()], "two ranks of one engine have the index 0"),
        ([attention(), attention(rank=Rank(1))], r"ranks 0 and 1 are both at \(pp, tp, cp\) = \(0, 0, 0\)"),
        (
            [attention(rank=Rank(0, cp_size=2)), attention(rank=Rank(1, cp_rank=1, cp_size=3))],
            "deal out tokens differently",
        ),
    ],
)
def test_ranks_that_contradict_each_other(sources: list[CacheLayout], says: str) -> None:
    with pytest.raises(MalformedMessage, match=says):
        pair(sources, attention())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            attention(encoding="fp8_e4m3"),
            r"encoding: decode='bf16' prefill='fp8_e4m3' \(rank 0\); set the same KV cache dtype",
        ),
        (attention(heads=5), r"extent of axis 'head': decode=4 prefill=5"),
        (
            with_tensor(attention(), 0, **paging(attention().tensors[0], token_stride_bytes=None)),
            "moved in whole blocks",
        ),
        (
            with_tensor(attention(), 0, axes=(Axis("head", 4, 0, 4, 4, True), Axis("dim", 2, 0, 2, 2))),
            "axis 'head' is atomic: decode=False prefill=True",
        ),
        (with_tensor(attention(), 0, axes=(Axis("head", 4, 0, 4, 4),)), r"axes: decode=\['dim', 'head'\]"),
    ],
)
def test_different_meanings_are_refused_with_both_values(source: CacheLayout, says: str) -> None:  # R18
    with pytest.raises(IncompatiblePeer, match=rf"layer 'layers\.0\.attn' part 'k': {says}"):
        pair([source], attention())


def test_opaque_blocks_of_two_sizes_are_refused() -> None:  # R23
    def opaque(block_tokens: int) -> CacheLayout:
        builder = LayoutBuilder()
        builder.opaque("layers.0.attn", builder.full(block_tokens), block_bytes=64, encoding="tiles", num_blocks=4)
        return builder.build()

    with pytest.raises(IncompatiblePeer, match=r"block_tokens of whole blocks: decode=4 prefill=8.*--block-size"):
        pair([opaque(8)], opaque(4))


def test_layers_that_share_a_cache_on_one_side_must_share_it_on_the_other() -> None:
    def shared(layout: CacheLayout) -> CacheLayout:
        extra = tuple(replace(tensor, layer="layers.1.attn") for tensor in layout.tensors)
        return replace(layout, tensors=layout.tensors + extra)

    destination = shared(attention(layers=1))
    assert len(pair([shared(attention(layers=1))], destination).edges[0].slices) == 2
    with pytest.raises(
        IncompatiblePeer, match=r"layers \['layers.0.attn', 'layers.1.attn'\] share one cache on decode"
    ):
        pair([attention(layers=2)], destination)


def test_context_parallel_tokens_that_no_rank_holds() -> None:
    sources = [attention(rank=Rank(0, cp_rank=0, cp_size=2))]
    with pytest.raises(IncompatiblePeer, match="for the tokens of context-parallel rank 1"):
        pair(sources, attention())


def test_ranks_with_equal_splits_pair_one_to_one() -> None:
    def rank(index: int) -> CacheLayout:
        return attention(rank=Rank(index, cp_rank=index, cp_size=4, cp_run_tokens=16))

    chosen = [[edge.source_rank for edge in pair([rank(i) for i in range(4)], rank(j)).edges] for j in range(4)]
    assert chosen == [[0], [1], [2], [3]]


def test_eight_ranks_of_eighty_layers_take_milliseconds_not_minutes() -> None:
    names = [f"layers.{i}.attn" for i in range(80)]

    def rank(index: int, size: int) -> CacheLayout:
        return block_major(
            names,
            num_blocks=64,
            block_tokens=16,
            heads=head_range(8, index, size),
            head_dim=128,
            element_bytes=2,
            encoding="bf16",
            rank=Rank(index, index, size),
        )

    pairing = pair([rank(i, 8) for i in range(8)], rank(1, 4))
    assert [edge.source_rank for edge in pairing.edges] == [2, 3]
    assert pairing.edge_from(2) is pairing.edges[0]
    assert pairing.edge_from(0) is None
