"""Verifies what landed: hashes of named pieces of KV, which both sides find in their own memory, in any layout.

Both sides derive the cells from the transfer id and the edge. What is compared is what decode would serve from.
"""

import ctypes
import logging
from collections.abc import Iterable, Sequence
from struct import pack
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvferry.errors import MalformedMessage
from kvferry.ids import TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.cells import Cell, all_cells, cell_runs, sample_cells
from kvferry.layout.description import CacheLayout, MemoryKind
from kvferry.layout.edge import Edge
from kvferry.layout.tokens import Holder
from kvferry.settings import Verify

__all__ = ["SAMPLE_CELLS", "CacheMemory", "DramMemory", "cell_digest", "compare"]

logger = logging.getLogger(__name__)

SAMPLE_CELLS = 8
"""How many cells are hashed per prefill rank and hand-off with `--verify sample`."""
_MAX_HASHES = 4096
"""More cells than this are sent as one hash of all."""


class CacheMemory(Protocol):
    """Reads this rank's registered memory, on the driver's thread. It may wait for the device."""

    def read(self, region: int, offset: int, length: int) -> memoryview | bytes:
        """Returns bytes [offset, offset + length) of region `region`; valid until the next call."""
        ...


class DramMemory:
    """Reads regions in this process's memory, by address. The caller keeps the memory alive."""

    def __init__(self, layout: CacheLayout) -> None:
        self._views: list[npt.NDArray[np.uint8] | None] = []
        for region in layout.regions:
            view = None
            if region.kind is MemoryKind.DRAM:
                view = np.ctypeslib.as_array((ctypes.c_uint8 * region.num_bytes).from_address(region.address))
            self._views.append(view)

    @property
    def covers_all(self) -> bool:
        """True if every region can be read."""
        return all(view is not None for view in self._views)

    def read(self, region: int, offset: int, length: int) -> memoryview:
        """Implements CacheMemory.read."""
        view = self._views[region]
        assert view is not None, "only DRAM regions are read through DramMemory"
        assert 0 <= offset <= offset + length <= len(view), "cell_runs stays inside its region"
        return view[offset : offset + length].data


def _cells(verify: Verify, transfer: TransferId, edge: Edge, tokens: TokenRange) -> Iterable[Cell]:
    if verify is Verify.ALL:
        return all_cells(edge, tokens)
    return sample_cells(transfer, edge, tokens, SAMPLE_CELLS)


def cell_digest(
    verify: Verify,
    transfer: TransferId,
    edge: Edge,
    tokens: TokenRange,
    memory: CacheMemory,
    layout: CacheLayout,
    tables: Sequence[BlockTable],
) -> bytes:
    """Returns one byte for how much was hashed, then a 64-bit hash per cell (or one of all). `layout` is our own.

    Raises MalformedMessage if our tables do not hold a cell.
    """
    if verify is Verify.OFF:
        return b""
    hashes = []
    checked: dict[int, Holder] = {}
    for cell in _cells(verify, transfer, edge, tokens):
        runs = cell_runs(layout, tables, cell, checked=checked)
        state = xxhash.xxh3_64()
        for offset, length in zip(runs.offset.tolist(), runs.length.tolist(), strict=True):
            state.update(memory.read(runs.region, offset, length))
        hashes.append(state.intdigest())
    digest = pack(f"<{len(hashes)}Q", *hashes)
    if len(hashes) > _MAX_HASHES:
        digest = pack("<QQ", len(hashes), xxhash.xxh3_64_intdigest(digest))
    return (b"A" if verify is Verify.ALL else b"S") + digest


def compare(
    digest: bytes,
    transfer: TransferId,
    edge: Edge,
    tokens: TokenRange,
    memory: CacheMemory,
    layout: CacheLayout,
    tables: Sequence[BlockTable],
) -> int:
    """Returns how many hashes of prefill's digest equal ours; -1 if one differs, or it is no digest."""
    kinds = {b"A": Verify.ALL, b"S": Verify.SAMPLE}
    verify = kinds.get(digest[:1])
    if verify is None:
        return -1
    try:
        ours = cell_digest(verify, transfer, edge, tokens, memory, layout, tables)
    except MalformedMessage as error:
        logger.warning("cannot compare what landed transfer=%s cause=%s", transfer, error)
        return -1
    if ours != digest:
        wrong = [i for i in range(1, len(ours), 8) if ours[i : i + 8] != digest[i : i + 8]]
        logger.warning("what landed differs transfer=%s cells=%d differ=%d", transfer, len(ours) // 8, len(wrong))
        return -1
    return (len(ours) - 1) // 8
