"""Pages that cache groups take turns on: no two groups' tables may list the same bytes.

A layout cannot rule it out (tensors of different groups may lie on top of each other), so the tables of each request
are looked at. A block that two groups list would be written twice by one hand-off, and one of the two caches would
hold the other's bytes, unseen.
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
    """What one group has of each block: bytes [offset + b * stride, ... + length) of block b, without a gap."""

    group: int
    offset: int
    stride: int
    length: int
    num_blocks: int

    @property
    def end(self) -> int:
        """One behind the last block's last byte."""
        return self.offset + (self.num_blocks - 1) * self.stride + self.length


def shared_lanes(layout: CacheLayout) -> tuple[tuple[Lane, ...], ...]:
    """For each way in which groups lie on each other in a region, their lanes; most layouts have none.

    A group whose bytes of a block have gaps is left out: another group may lie in the gaps.
    """
    by_region: dict[int, list[Tensor]] = {}
    for tensor in layout.tensors:
        by_region.setdefault(tensor.region, []).append(tensor)
    found: dict[tuple[Lane, ...], None] = {}
    for tensors in by_region.values():
        if len({tensor.group for tensor in tensors}) < 2:
            continue
        lanes = sorted(_lanes(layout, tensors), key=lambda lane: (lane.offset, lane.group))
        met = tuple(lane for lane in lanes if any(_meet(lane, other) for other in lanes))
        if met:
            base = met[0].offset
            found[tuple(Lane(m.group, m.offset - base, m.stride, m.length, m.num_blocks) for m in met)] = None
    return tuple(found)


def _meet(lane: Lane, other: Lane) -> bool:
    return lane.group != other.group and lane.offset < other.end and other.offset < lane.end


def _lanes(layout: CacheLayout, tensors: list[Tensor]) -> Iterator[Lane]:
    """The dense stretches of a block of each group. Layers that share a cache count once."""
    forms: dict[tuple[int, int, int], set[tuple[int, int, int]]] = {}
    for tensor in tensors:
        dims = [(axis.stop - axis.start, axis.stride_bytes) for axis in tensor.axes]
        if tensor.paging.token_stride_bytes is not None:
            dims.append((layout.groups[tensor.group].block_tokens, tensor.paging.token_stride_bytes))
        size = hull = tensor.element_bytes
        for count, stride in dims:
            size *= count
            hull += (count - 1) * stride
        form = (tensor.group, tensor.paging.block_stride_bytes, tensor.paging.num_blocks)
        forms.setdefault(form, set()).add((tensor.offset_bytes, hull, size))
    for (group, stride, num_blocks), pieces in forms.items():
        begin = end = filled = 0
        for offset, hull, size in [*sorted(pieces), (1 << 62, 0, 0)]:
            if filled and offset <= end:
                end, filled = max(end, offset + hull), filled + size
                continue
            if filled and filled == end - begin and (num_blocks == 1 or filled <= stride):
                yield Lane(group, begin, stride, filled, num_blocks)
            begin, end, filled = offset, offset + hull, size


def check_groups_apart(side: str, shared: tuple[tuple[Lane, ...], ...], ids: Mapping[int, Int64s]) -> None:
    """Raise MalformedMessage where two groups' checked tables list the same bytes. `ids`: block ids by group."""
    for lanes in shared:
        present = [lane for lane in lanes if len(ids.get(lane.group, ()))]
        if len({lane.group for lane in present}) < 2:
            continue
        if len({(lane.offset, lane.stride, lane.length) for lane in present}) == 1:
            # The usual case, pages of one size: equal bytes are equal ids, and those alone are sorted ten times faster.
            ordered = np.sort(np.concatenate([ids[lane.group] for lane in present]))
            if not (ordered[1:] == ordered[:-1]).any():
                continue
        start = np.concatenate([lane.offset + ids[lane.group] * lane.stride for lane in present])
        lengths = [len(ids[lane.group]) for lane in present]
        group = np.repeat([lane.group for lane in present], lengths)
        end = start + np.repeat([lane.length for lane in present], lengths)
        order = np.argsort(start, kind="stable")
        start, end, group = start[order], end[order], group[order]
        # Stretches of one group never meet, so of two that do and are neighbours here, one is another group's.
        twice = np.flatnonzero((start[1:] < end[:-1]) & (group[1:] != group[:-1]))
        if len(twice):
            at = int(twice[0])
            one, other = sorted((int(group[at]), int(group[at + 1])))
            raise MalformedMessage(
                f"{side} block tables of groups {one} and {other} share bytes: both list the page at byte "
                f"{int(start[at + 1])} of the pages that they take turns on. A page belongs to one group at a time"
            )
