"""Refuses what every transport must refuse before it touches memory. Vectorised: a few nanoseconds per run."""

import itertools
from collections.abc import Sequence

import numpy as np

from kvferry.errors import TransferError
from kvferry.layout.blocks import Offsets, Runs
from kvferry.layout.description import Region
from kvferry.transport.base import MAX_MESSAGE_BYTES, Operation

__all__ = ["check_message", "check_regions", "check_runs"]


def check_message(message: bytes) -> None:
    """Raises TransferError for a message that is longer than every transport carries."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise TransferError(f"a message of {len(message)} bytes; at most {MAX_MESSAGE_BYTES} are carried: split it")


def check_regions(regions: Sequence[Region]) -> None:
    """Raises TransferError for regions that cannot be registered together: overlapping, but not equal.

    Equal regions are one allocation that several layers share; it is registered once (R21).
    """
    ordered = sorted(set(regions), key=lambda region: (region.kind, region.device, region.address))
    for left, right in itertools.pairwise(ordered):
        same_space = (left.kind, left.device) == (right.kind, right.device)
        if same_space and left.address + left.num_bytes > right.address:
            raise TransferError(
                f"regions overlap: {left!r} and {right!r}; name each physical allocation once, by its whole extent"
            )


def check_runs(
    operation: Operation, runs: Sequence[Runs], local: Sequence[Region], remote: Sequence[Region], peer: str
) -> None:
    """Raises TransferError unless every run lies inside the regions that it names, on both sides."""
    for piece in runs:
        if not len(piece.source) == len(piece.destination) == len(piece.length):
            raise TransferError(
                f"runs of unequal length: {len(piece.source)} sources, {len(piece.destination)} destinations,"
                f" {len(piece.length)} lengths"
            )
        if len(piece) == 0:
            continue
        if int(piece.length.min()) <= 0:
            raise TransferError(f"a run of {int(piece.length.min())} bytes; each must have at least 1")
        reads = operation is Operation.READ
        _check_side("source", piece.source, piece.length, piece.source_region, remote if reads else local, peer)
        _check_side(
            "destination", piece.destination, piece.length, piece.destination_region, local if reads else remote, peer
        )


def _check_side(side: str, offset: Offsets, length: Offsets, index: int, regions: Sequence[Region], peer: str) -> None:
    if not 0 <= index < len(regions):
        raise TransferError(f"{side} region {index} does not exist; {len(regions)} are known, peer {peer!r}")
    size = regions[index].num_bytes
    # Not offset + length > size: that could overflow.
    wrong = np.flatnonzero((offset < 0) | (length > size) | (offset > size - length))
    if wrong.size:
        at = int(wrong[0])
        raise TransferError(
            f"{side} run {at} [{int(offset[at])}, +{int(length[at])}) leaves region {index} of {size} bytes,"
            f" peer {peer!r}"
        )
