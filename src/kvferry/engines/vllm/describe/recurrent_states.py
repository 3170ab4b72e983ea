"""Describes the recurrent states of Mamba layers, part by part, as vLLM stores them in a page.

A page holds the convolution's last inputs, then the recurrent state. The convolution's channels are sections (Mamba-2:
x, B, C; gated delta net: q, k, v), each cut by tensor parallelism in its own place: they are parts of their own, so
that ranks of another count find theirs. vLLM stores them channel by channel (DS) or tap by tap (SD); both are strides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from kvferry.errors import ConfigError
from kvferry.layout.builders import Heads
from kvferry.layout.description import Axis

__all__ = ["StateArray", "StatePiece", "state_pieces"]


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a page, from MambaSpec: this rank's shape, and its elements."""

    shape: tuple[int, ...]
    element_bytes: int
    encoding: str

    @property
    def num_bytes(self) -> int:
        """The bytes of this rank's array."""
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True)
class StatePiece:
    """One part of a state: a tensor of the layout that begins `offset_bytes` into the page."""

    part: str
    encoding: str
    element_bytes: int
    offset_bytes: int
    axes: tuple[Axis, ...]


def state_pieces(
    kind: str, arrays: Sequence[StateArray], *, tp_rank: int, tp_size: int, groups: int | None, channels_first: bool
) -> tuple[StatePiece, ...]:
    """Returns the parts of a state. `kind` is vLLM's name of the Mamba backend, `groups` the whole model's (Mamba-2).

    Raises ConfigError for an unknown kind on several ranks; on one rank it is moved whole, as opaque arrays.
    """
    plain = kind.rsplit(".", 1)[-1].lower()
    if plain in ("mamba1", "mamba2", "gdn", "gdn_attn") and len(arrays) == 2 and len(arrays[0].shape) == 2:
        return _known(plain, arrays, tp_rank, tp_size, groups, channels_first)
    if tp_size > 1:
        raise ConfigError(
            f"states of kind {kind!r} cannot be cut between {tp_size} tensor-parallel ranks: "
            "use --tensor-parallel-size 1 on both sides"
        )
    return _whole(plain, arrays)


def _whole(kind: str, arrays: Sequence[StateArray]) -> tuple[StatePiece, ...]:
    pieces, offset = [], 0
    for index, array in enumerate(arrays):
        axes = _dense([(f"axis{i}", extent, 0, extent) for i, extent in enumerate(array.shape)], array.element_bytes)
        pieces.append(StatePiece(f"{kind}.{index}", array.encoding, array.element_bytes, offset, axes))
        offset += array.num_bytes
    return tuple(pieces)


def _known(
    kind: str, arrays: Sequence[StateArray], tp_rank: int, tp_size: int, groups: int | None, channels_first: bool
) -> tuple[StatePiece, ...]:
    conv, ssm = arrays
    channels, taps = conv.shape if channels_first else conv.shape[::-1]
    channel_stride, tap_stride = (taps, 1) if channels_first else (1, channels)
    size = conv.element_bytes
    pieces, first = [], 0
    for part, width, extent, start in _sections(kind, channels, ssm.shape, tp_rank, tp_size, groups):
        axes = (
            Axis("channel", extent, start, start + width, channel_stride * size),
            Axis("tap", taps, 0, taps, tap_stride * size),
        )
        pieces.append(StatePiece(part, conv.encoding, size, first * channel_stride * size, axes))
        first += width
    held = Heads(ssm.shape[0] * tp_size, ssm.shape[0] * tp_rank, ssm.shape[0] * (tp_rank + 1))
    names = ("channel",) if kind == "mamba1" else ("head",)
    shape = [(names[0], held.extent, held.start, held.stop)]
    shape += [(name, extent, 0, extent) for name, extent in zip(("dim", "state"), ssm.shape[1:], strict=False)]
    pieces.append(StatePiece("ssm", ssm.encoding, ssm.element_bytes, conv.num_bytes, _dense(shape, ssm.element_bytes)))
    return tuple(pieces)


def _sections(
    kind: str, channels: int, ssm: tuple[int, ...], tp_rank: int, tp_size: int, groups: int | None
) -> list[tuple[str, int, int, int]]:
    """Returns (part, this rank's channels, the whole model's channels, this rank's first channel) of each section."""
    if kind == "mamba1":
        return [("conv.x", channels, channels * tp_size, channels * tp_rank)]
    inner = ssm[0] * ssm[1]
    rest, odd = divmod(channels - inner, 2)
    if rest <= 0 or odd:
        raise ConfigError(
            f"a {kind} convolution of {channels} channels does not hold {inner} of its heads and two equal sections: "
            "this model's states cannot be described"
        )
    if kind != "mamba2":
        even = [(part, rest, rest * tp_size, rest * tp_rank) for part in ("conv.q", "conv.k")]
        return [*even, ("conv.v", inner, inner * tp_size, inner * tp_rank)]
    extent, start = rest * tp_size, rest * tp_rank
    if groups is not None and groups % tp_size:
        # Ranks outnumber groups, or do not divide them: vLLM gives each rank copies of the groups that its heads need.
        each = max(1, -(-groups // tp_size))
        width = rest // each
        extent, start = groups * width, tp_rank * groups // tp_size * width
    x = ("conv.x", inner, inner * tp_size, inner * tp_rank)
    return [x, ("conv.b", rest, extent, start), ("conv.c", rest, extent, start)]


def _dense(shape: Sequence[tuple[str, int, int, int]], element_bytes: int) -> tuple[Axis, ...]:
    axes: list[Axis] = []
    stride = element_bytes
    for name, extent, start, stop in reversed(shape):
        axes.insert(0, Axis(name, extent, start, stop, stride))
        stride *= stop - start
    return tuple(axes)
