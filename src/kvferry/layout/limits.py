"""What makes a layout well-formed. A layout may come from a peer: every value here is hostile until it has passed.

All sizes are capped, so that sums of them stay far below 2**63 and numpy's int64 never wraps. Raises MalformedMessage
with the place, the value and the range; the description classes call these functions when they are made.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from kvferry.errors import MalformedMessage

if TYPE_CHECKING:
    from kvferry.layout.description import Axis, CacheGroup, CacheLayout, Paging, Rank, Region, Tensor

__all__ = [
    "MAX_AXES",
    "MAX_BLOCK_TOKENS",
    "MAX_BYTES",
    "MAX_GROUPS",
    "MAX_NAME",
    "MAX_RANKS",
    "MAX_REGIONS",
    "MAX_TENSORS",
    "check_axis",
    "check_group",
    "check_layout",
    "check_paging",
    "check_rank",
    "check_region",
    "check_tensor",
]

MAX_BYTES = 1 << 48
"""No region, offset, stride or count is larger."""
MAX_ADDRESS = (1 << 63) - 1
MAX_BLOCK_TOKENS = 1 << 20
MAX_AXES = 8
MAX_REGIONS = 4096
MAX_GROUPS = 256
MAX_TENSORS = 16384
MAX_NAME = 256
MAX_RANKS = 4096
MAX_NESTING = 16
"""Different outermost strides that tensors may be told apart by: a tensor has at most MAX_AXES + 2."""

Span = tuple[int, tuple[tuple[int, int], ...], int]
"""Where a strided tensor lies: its first byte, (count, stride) outermost first, and its innermost run of bytes."""


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise MalformedMessage(f"layout: {name} is {value!r}; between {low} and {high} are allowed")


def _named(name: str, value: str) -> None:
    if not 1 <= len(value) <= MAX_NAME or not value.isprintable():
        raise MalformedMessage(
            f"layout: {name} is {value[:MAX_NAME]!r}; 1 to {MAX_NAME} printable characters are allowed"
        )


def check_region(region: "Region") -> None:
    """Addresses and sizes that fit a signed 64-bit number."""
    _within("region address", region.address, 0, MAX_ADDRESS - MAX_BYTES)
    _within("region num_bytes", region.num_bytes, 1, MAX_BYTES)
    _within("region device", region.device, 0, 1 << 16)


def check_axis(axis: "Axis") -> None:
    """0 <= start < stop <= extent; elements that differ have different places."""
    _named("axis name", axis.name)
    _within(f"axis {axis.name!r} extent", axis.extent, 1, MAX_BYTES)
    if not 0 <= axis.start < axis.stop <= axis.extent:
        raise MalformedMessage(
            f"layout: axis {axis.name!r} holds [{axis.start!r}, {axis.stop!r}); "
            f"a range inside [0, {axis.extent}) is allowed"
        )
    _within(f"axis {axis.name!r} stride_bytes", axis.stride_bytes, 0 if axis.stop - axis.start == 1 else 1, MAX_BYTES)


def check_paging(paging: "Paging") -> None:
    """At least one block; positive strides."""
    _within("paging num_blocks", paging.num_blocks, 1, MAX_BYTES)
    _within("paging block_stride_bytes", paging.block_stride_bytes, 0 if paging.num_blocks == 1 else 1, MAX_BYTES)
    if paging.token_stride_bytes is not None:
        _within("paging token_stride_bytes", paging.token_stride_bytes, 0, MAX_BYTES)


def check_tensor(tensor: "Tensor") -> None:
    """Names, sizes, and axes with names of their own."""
    _named("tensor layer", tensor.layer)
    _named(f"layer {tensor.layer!r} part", tensor.part)
    where = f"layer {tensor.layer!r} part {tensor.part!r}"
    _named(f"{where} encoding", tensor.encoding)
    _within(f"{where} element_bytes", tensor.element_bytes, 1, MAX_BYTES)
    _within(f"{where} region", tensor.region, 0, MAX_REGIONS - 1)
    _within(f"{where} group", tensor.group, 0, MAX_GROUPS - 1)
    _within(f"{where} offset_bytes", tensor.offset_bytes, 0, MAX_BYTES)
    _within(f"{where} number of axes", len(tensor.axes), 0, MAX_AXES)
    if len({axis.name for axis in tensor.axes}) != len(tensor.axes):
        raise MalformedMessage(f"layout: {where} names an axis twice: {[axis.name for axis in tensor.axes]!r}")


def check_group(group: "CacheGroup") -> None:
    """A state has no block tokens; everything else has; a window has a size."""
    if group.kind == "state":
        _within("state group block_tokens", group.block_tokens, 0, 0)
    else:
        _within("group block_tokens", group.block_tokens, 1, MAX_BLOCK_TOKENS)
    if group.window_tokens is None:
        if group.kind == "window":
            raise MalformedMessage("layout: a window group has window_tokens None; say how many tokens it keeps")
    else:
        _within("group window_tokens", group.window_tokens, 1, MAX_BYTES)


def check_rank(rank: "Rank") -> None:
    """Each coordinate below its size."""
    _within("rank index", rank.index, 0, MAX_RANKS - 1)
    for name, value, size in (
        ("tp", rank.tp_rank, rank.tp_size),
        ("pp", rank.pp_rank, rank.pp_size),
        ("cp", rank.cp_rank, rank.cp_size),
    ):
        _within(f"rank {name}_size", size, 1, MAX_RANKS)
        _within(f"rank {name}_rank", value, 0, size - 1)
    _within("rank cp_run_tokens", rank.cp_run_tokens, 1, MAX_BLOCK_TOKENS)


def check_layout(layout: "CacheLayout") -> None:
    """Everything that takes more than one record to see: indices, bounds, duplicates, overlaps."""
    _within("number of regions", len(layout.regions), 1, MAX_REGIONS)
    _within("number of groups", len(layout.groups), 1, MAX_GROUPS)
    _within("number of tensors", len(layout.tensors), 1, MAX_TENSORS)
    _check_regions_apart(layout.regions)
    seen: set[tuple[str, str]] = set()
    spans: dict[tuple[int, int], dict[tuple[Span, str, str], str]] = {}
    for tensor in layout.tensors:
        where = f"layer {tensor.layer!r} part {tensor.part!r}"
        if (tensor.layer, tensor.part) in seen:
            raise MalformedMessage(f"layout: {where} is advertised twice by rank {layout.rank.index}")
        seen.add((tensor.layer, tensor.part))
        _within(f"{where} region", tensor.region, 0, len(layout.regions) - 1)
        _within(f"{where} group", tensor.group, 0, len(layout.groups) - 1)
        group = layout.groups[tensor.group]
        if group.kind == "state" and tensor.paging.token_stride_bytes is not None:
            raise MalformedMessage(f"layout: {where} is in a state group and has a token stride; a state has no tokens")
        start, dims, run = span = _span(tensor, group.block_tokens)
        end = start + run + sum((count - 1) * stride for count, stride in dims)
        if end > (size := layout.regions[tensor.region].num_bytes):
            raise MalformedMessage(
                f"layout: {where} ends at byte {end} of region {tensor.region}, which has {size} bytes"
            )
        inner = run
        for count, stride in reversed(dims):
            if stride < inner:
                raise MalformedMessage(
                    f"layout: {where} overlaps itself: a stride of {stride} bytes over {inner} bytes that belong "
                    "together"
                )
            inner = (count - 1) * stride + inner
        # Layers that share another layer's cache lie exactly on top of it: one entry for all of them.
        spans.setdefault((tensor.region, tensor.group), {}).setdefault((span, tensor.encoding, tensor.part), where)
    for (region, _), entries in spans.items():
        _check_apart([(span, where) for (span, _, _), where in entries.items()], region)


def _span(tensor: "Tensor", block_tokens: int) -> Span:
    dims = [(tensor.paging.num_blocks, tensor.paging.block_stride_bytes)]
    if tensor.paging.token_stride_bytes is not None:
        dims.append((block_tokens, tensor.paging.token_stride_bytes))
    dims += [(axis.stop - axis.start, axis.stride_bytes) for axis in tensor.axes]
    kept = sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: (-dim[1], dim[0]))
    return tensor.offset_bytes, tuple(kept), tensor.element_bytes


def _check_regions_apart(regions: Sequence["Region"]) -> None:
    ordered = sorted(enumerate(regions), key=lambda pair: (pair[1].kind, pair[1].device, pair[1].address))
    for (i, a), (j, b) in pairwise(ordered):
        if (a.kind, a.device) == (b.kind, b.device) and a.address + a.num_bytes > b.address:
            raise MalformedMessage(f"layout: regions {i} and {j} overlap; an allocation is described once (R21)")


def _length(span: Span) -> int:
    return span[2] + sum((count - 1) * stride for count, stride in span[1])


def _check_apart(entries: Iterable[tuple[Span, str]], region: int, depth: int = 0) -> None:
    """Raise unless no two spans share a byte. Nested strides only, which is what caches have; in doubt, refuse.

    Spans whose hulls meet must share an outermost stride S; folded modulo S they must be apart again.
    """
    if depth > MAX_NESTING:
        # A peer could choose a stride of its own for each of thousands of tensors, to exhaust the stack and our time.
        raise MalformedMessage(
            f"layout: tensors in region {region} interleave by more than {MAX_NESTING} different strides, so that it "
            "cannot be told whether they overlap: describe them with common block strides, or in regions of their own"
        )
    ordered = sorted(entries)
    cluster: list[tuple[Span, str]] = []
    end = -1
    for entry in ordered:
        if entry[0][0] >= end and cluster:
            _check_cluster(cluster, region, depth)
            cluster = []
        cluster.append(entry)
        end = max(end, entry[0][0] + _length(entry[0]))
    if cluster:
        _check_cluster(cluster, region, depth)


def _check_cluster(cluster: list[tuple[Span, str]], region: int, depth: int) -> None:
    if len(cluster) == 1:
        return
    outer = max((span[1][0][1] for span, _ in cluster if span[1]), default=0)
    base = cluster[0][0][0]
    folded: list[tuple[Span, str]] = []
    for (start, dims, run), where in cluster:
        kept = dims[1:] if dims and dims[0][1] == outer else dims
        phase = (start - base) % outer if outer else 0
        if not outer or phase + _length((phase, kept, run)) > outer:
            others = next(other for _, other in cluster if other != where)
            raise MalformedMessage(f"layout: {where} and {others} overlap in region {region}")
        folded.append(((phase, kept, run), where))
    _check_apart(folded, region, depth + 1)
