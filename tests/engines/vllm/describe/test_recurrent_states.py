"""Recurrent states part by part, in both of vLLM's orders and under tensor parallelism."""

import pytest

from kvferry.engines.vllm.describe.recurrent_states import StateArray, StatePiece, state_pieces
from kvferry.errors import ConfigError
from kvferry.layout.description import Axis

HEADS, DIM, STATE, GROUPS, TAPS = 8, 4, 16, 2, 3


def mamba2(tp_rank: int = 0, tp_size: int = 1, groups: int = GROUPS, channels_first: bool = True) -> list[StatePiece]:
    """Shapes the states of one rank as vLLM does: groups are copied if the ranks do not divide them."""
    padded = groups if groups % tp_size == 0 else tp_size
    channels = (HEADS * DIM + 2 * padded * STATE) // tp_size
    conv = (channels, TAPS) if channels_first else (TAPS, channels)
    arrays = [StateArray(conv, 2, "bf16"), StateArray((HEADS // tp_size, DIM, STATE), 4, "fp32")]
    found = state_pieces(
        "MAMBA2", arrays, tp_rank=tp_rank, tp_size=tp_size, groups=groups, channels_first=channels_first
    )
    return list(found)


def test_a_page_is_the_convolution_by_section_then_the_state() -> None:
    x, b, c, ssm = mamba2()
    inner, section = HEADS * DIM, GROUPS * STATE
    assert [piece.part for piece in (x, b, c, ssm)] == ["conv.x", "conv.b", "conv.c", "ssm"]
    assert [piece.offset_bytes for piece in (x, b, c, ssm)] == [
        0,
        inner * TAPS * 2,
        (inner + section) * TAPS * 2,
        (inner + 2 * section) * TAPS * 2,
    ]
    assert x.axes == (Axis("channel", inner, 0, inner, TAPS * 2), Axis("tap", TAPS, 0, TAPS, 2))
    assert ssm.axes == (
        Axis("head", HEADS, 0, HEADS, DIM * STATE * 4),
        Axis("dim", DIM, 0, DIM, STATE * 4),
        Axis("state", STATE, 0, STATE, 4),
    )


def test_the_order_by_tap_is_other_strides_of_the_same_parts() -> None:  # R22
    channels = HEADS * DIM + 2 * GROUPS * STATE
    x, b, *_ = mamba2(channels_first=False)
    assert x.axes == (Axis("channel", HEADS * DIM, 0, HEADS * DIM, 2), Axis("tap", TAPS, 0, TAPS, channels * 2))
    assert b.offset_bytes == HEADS * DIM * 2


def test_each_section_is_cut_at_its_own_place() -> None:  # R23
    x, b, _, ssm = mamba2(tp_rank=1, tp_size=2)
    assert (x.axes[0].start, x.axes[0].stop, x.axes[0].extent) == (16, 32, 32)
    assert (b.axes[0].start, b.axes[0].stop, b.axes[0].extent) == (16, 32, 32)
    assert (ssm.axes[0].start, ssm.axes[0].stop) == (4, 8)


def test_ranks_that_outnumber_groups_hold_copies() -> None:
    held = [mamba2(tp_rank=rank, tp_size=4)[1].axes[0] for rank in range(4)]
    assert [(axis.start, axis.stop) for axis in held] == [(0, 16), (0, 16), (16, 32), (16, 32)]
    assert {axis.extent for axis in held} == {32}


def test_a_gated_delta_net_has_q_k_and_v() -> None:
    arrays = [StateArray((2 * 8 + 32, TAPS), 2, "bf16"), StateArray((4, 8, 6), 4, "fp32")]
    found = state_pieces("GDN_ATTN", arrays, tp_rank=0, tp_size=1, groups=None, channels_first=True)
    assert [(piece.part, piece.axes[0].stop) for piece in found] == [
        ("conv.q", 8),
        ("conv.k", 8),
        ("conv.v", 32),
        ("ssm", 4),
    ]


def test_mamba1_has_one_section() -> None:
    arrays = [StateArray((32, TAPS), 4, "fp32"), StateArray((32, STATE), 4, "fp32")]
    found = state_pieces("MAMBA1", arrays, tp_rank=1, tp_size=2, groups=None, channels_first=True)
    assert [(piece.part, piece.axes[0].start, piece.axes[0].extent) for piece in found] == [
        ("conv.x", 32, 64),
        ("ssm", 32, 64),
    ]


def test_an_unknown_kind_moves_whole_with_one_rank_and_is_refused_with_several() -> None:
    arrays = [StateArray((4, 4), 4, "fp32"), StateArray((2, 2, 2), 4, "fp32"), StateArray((5,), 2, "bf16")]
    whole = state_pieces("LINEAR", arrays, tp_rank=0, tp_size=1, groups=None, channels_first=True)
    assert [(piece.part, piece.offset_bytes) for piece in whole] == [
        ("linear.0", 0),
        ("linear.1", 64),
        ("linear.2", 96),
    ]
    with pytest.raises(ConfigError, match="use --tensor-parallel-size 1"):
        state_pieces("LINEAR", arrays, tp_rank=0, tp_size=2, groups=None, channels_first=True)


def test_a_convolution_that_does_not_hold_its_heads_is_refused() -> None:
    arrays = [StateArray((HEADS * DIM + 1, TAPS), 2, "bf16"), StateArray((HEADS, DIM, STATE), 4, "fp32")]
    with pytest.raises(ConfigError, match="cannot be described"):
        state_pieces("MAMBA2", arrays, tp_rank=0, tp_size=1, groups=GROUPS, channels_first=True)
