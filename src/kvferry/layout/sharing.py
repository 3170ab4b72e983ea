"""Checks that the block tables of two cache groups that share pages do not list the same bytes.

A layout alone cannot rule this out, because tensors of different groups may overlap. So the tables of each request are
checked. One hand-off would write a block that two groups list twice, and one of the two caches would silently hold the
other's bytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import MalformedMessage
from kvferry.layout.description import CacheLayout, Tensor

__all__ = ["Lane", "check_groups_apart", "shared_lanes"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lane:
    """The gapless bytes that one group uses of each block b: `length` bytes from offset + b * stride."""

    group: int
    offset: int
    stride: int
    length: int
    num_blocks: int

    @property
    def end(self) -> int:
        """The first byte after the last block."""
        return self.offset + (self.num_blocks - 1) * self.stride + self.length


def shared_lanes(layout: CacheLayout) -> tuple[tuple[Lane, ...], ...]:
    """Returns the lanes of groups that overlap in a region, once per pattern of overlap; most layouts have none.

    A group whose bytes in a block have gaps is left out: another group may use the gaps.
    """
    by_region: dict[int, list[Tensor]] = {}
    for tensor in layout.tensors:
        by_region.setdefault(tensor.region, []).append(tensor)
    result: dict[tuple[Lane, ...], None] = {}
    for tensors in by_region.values():
        if len({tensor.group for tensor in tensors}) < 2:
            continue
        lanes = sorted(_lanes(layout, tensors), key=lambda lane: (lane.offset, lane.group))
        overlapping = tuple(lane for lane in lanes if any(_overlap(lane, other) for other in lanes))
        if overlapping:
            base = overlapping[0].offset
            result[tuple(Lane(m.group, m.offset - base, m.stride, m.length, m.num_blocks) for m in overlapping)] = None
    return tuple(result)


def _overlap(lane: Lane, other: Lane) -> bool:
    return lane.group != other.group and lane.offset < other.end and other.offset < lane.end


def _lanes(layout: CacheLayout, tensors: list[Tensor]) -> Iterator[Lane]:
    """Yields the dense stretches of a block of each group. Layers that share a cache count once."""
    forms: dict[tuple[int, int, int], set[tuple[int, int, int]]] = {}
    for tensor in tensors:
        dims = [(axis.stop - axis.start, axis.stride_bytes) for axis in tensor.axes]
        if tensor.paging.token_stride_bytes is not None:
            dims.append((layout.groups[tensor.group].block_tokens, tensor.paging.token_stride_bytes))
        size = extent = tensor.element_bytes
        for count, stride in dims:
            size *= count
            extent += (count - 1) * stride
        form = (tensor.group, tensor.paging.block_stride_bytes, tensor.paging.num_blocks)
        forms.setdefault(form, set()).add((tensor.offset_bytes, extent, size))
    for (group, stride, num_blocks), pieces in forms.items():
        begin = end = filled = 0
        for offset, extent, size in [*sorted(pieces), (1 << 62, 0, 0)]:
            if filled and offset <= end:
                end, filled = max(end, offset + extent), filled + size
                continue
            if filled and filled == end - begin and (num_blocks == 1 or filled <= stride):
                yield Lane(group, begin, stride, filled, num_blocks)
            begin, end, filled = offset, offset + extent, size


def check_groups_apart(side: str, shared: tuple[tuple[Lane, ...], ...], ids: Mapping[int, Int64s]) -> None:
    """Raises MalformedMessage if tables of two groups list the same bytes. `ids` maps a group to its checked ids."""
    for lanes in shared:
        present = [lane for lane in lanes if len(ids.get(lane.group, ()))]
        if len({lane.group for lane in present}) < 2:
            continue
        if len({(lane.offset, lane.stride, lane.length) for lane in present}) == 1:
            # The usual case is pages of one size: equal bytes mean equal ids, and ids alone sort ten times faster.
            ordered = np.sort(np.concatenate([ids[lane.group] for lane in present]))
            if not (ordered[1:] == ordered[:-1]).any():
                continue
        start = np.concatenate([lane.offset + ids[lane.group] * lane.stride for lane in present])
        lengths = [len(ids[lane.group]) for lane in present]
        group = np.repeat([lane.group for lane in present], lengths)
        end = start + np.repeat([lane.length for lane in present], lengths)
        order = np.argsort(start, kind="stable")
        start, end, group = start[order], end[order], group[order]
        # Stretches of one group never overlap, so two overlapping neighbours belong to different groups.
        twice = np.flatnonzero((start[1:] < end[:-1]) & (group[1:] != group[:-1]))
        if len(twice):
            at = int(twice[0])
            one, other = sorted((int(group[at]), int(group[at + 1])))
            raise MalformedMessage(
                f"{side} block tables of groups {one} and {other} share bytes: both list the page at byte "
                f"{int(start[at + 1])} of the pages that they share. A page belongs to one group at a time"
            )
