"""Checks that regions do not overlap, that no tensor overlaps itself, and that no two tensors share bytes.

Works on plain numbers, so that the description can use it. Only nested strides are understood, which is what caches
have: if it cannot be shown that two tensors are disjoint, the layout is refused.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvferry.errors import MalformedMessage

__all__ = ["Footprint", "check_disjoint", "check_not_self_overlapping", "check_regions_disjoint", "footprint_length"]

MAX_NESTING = 16
"""How many different outermost strides are tried to tell tensors apart: a tensor has at most MAX_AXES + 2."""

Footprint = tuple[int, tuple[tuple[int, int], ...], int]
"""The bytes of a strided tensor: its first byte, (count, stride) outermost first, and the innermost run of bytes."""


def footprint_length(footprint: Footprint) -> int:
    """The distance in bytes from the first byte of a footprint to the end of its last run."""
    return footprint[2] + sum((count - 1) * stride for count, stride in footprint[1])


def check_regions_disjoint(regions: Sequence[tuple[str, int, int, int]]) -> None:
    """Raises MalformedMessage if two regions share a byte. A region is (memory kind, device, address, num_bytes)."""
    ordered = sorted(enumerate(regions), key=lambda pair: pair[1][:3])
    for (i, a), (j, b) in pairwise(ordered):
        if a[:2] == b[:2] and a[2] + a[3] > b[2]:
            raise MalformedMessage(f"layout: regions {i} and {j} overlap; describe each allocation once (R21)")


def check_not_self_overlapping(where: str, footprint: Footprint) -> None:
    """Raises MalformedMessage if two elements of one tensor share a byte."""
    _, dims, inner = footprint
    for count, stride in reversed(dims):
        if stride < inner:
            raise MalformedMessage(
                f"layout: {where} overlaps itself: a stride of {stride} bytes repeats an element of {inner} bytes"
            )
        inner = (count - 1) * stride + inner


def check_disjoint(entries: Iterable[tuple[Footprint, str]], region: int, depth: int = 0) -> None:
    """Raises MalformedMessage unless it can be shown that no two footprints of a region share a byte.

    Footprints whose ranges [first byte, end) meet form a cluster. They must share an outermost stride S, and must be
    disjoint again when their offsets are taken modulo S.
    """
    if depth > MAX_NESTING:
        # A peer could choose a different stride for each of thousands of tensors, to exhaust the stack and our time.
        raise MalformedMessage(
            f"layout: tensors in region {region} interleave with more than {MAX_NESTING} different strides, so it "
            "cannot be shown that they do not overlap: give them common block strides, or separate regions"
        )
    cluster: list[tuple[Footprint, str]] = []
    end = -1
    for entry in sorted(entries):
        if entry[0][0] >= end and cluster:
            _check_cluster(cluster, region, depth)
            cluster = []
        cluster.append(entry)
        end = max(end, entry[0][0] + footprint_length(entry[0]))
    if cluster:
        _check_cluster(cluster, region, depth)


def _check_cluster(cluster: list[tuple[Footprint, str]], region: int, depth: int) -> None:
    if len(cluster) == 1:
        return
    outer = max((footprint[1][0][1] for footprint, _ in cluster if footprint[1]), default=0)
    base = cluster[0][0][0]
    folded: list[tuple[Footprint, str]] = []
    for (start, dims, run), where in cluster:
        kept = dims[1:] if dims and dims[0][1] == outer else dims
        phase = (start - base) % outer if outer else 0
        if not outer or phase + footprint_length((phase, kept, run)) > outer:
            others = next(other for _, other in cluster if other != where)
            raise MalformedMessage(f"layout: {where} and {others} overlap in region {region}")
        folded.append(((phase, kept, run), where))
    check_disjoint(folded, region, depth + 1)
