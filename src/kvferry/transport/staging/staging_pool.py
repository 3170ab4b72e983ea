"""A bounded pool of registered staging memory.

The pool's region is registered with the transport beside the cache's regions, as the last one. The driver's thread
takes leases from it and gives them back. When nothing is free, it waits for a lease to come back, or moves directly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kvferry.errors import ConfigError
from kvferry.layout.description import MemoryKind, Region

__all__ = ["Lease", "StagingPool"]

_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class Lease:
    """A part of the pool: bytes [offset, offset + num_bytes) of its region, until `StagingPool.release`."""

    offset: int
    num_bytes: int
    _serial: int = field(default=0, repr=False)


class StagingPool:
    """`num_bytes` of memory, allotted first fit. Used by one thread. It is allocated, and zeroed, when first needed.

    `device`: None for DRAM, else the number of the CUDA device that holds the cache. `buffer`: flat uint8 memory of
    that length to use instead.
    """

    def __init__(self, num_bytes: int, *, device: int | None = None, buffer: torch.Tensor | None = None) -> None:
        if num_bytes < _ALIGN:
            raise ConfigError(f"transfer.staging_bytes={num_bytes!r} must be at least {_ALIGN}, or 0 for no staging")
        self.num_bytes = num_bytes - num_bytes % _ALIGN
        self.device = device
        self._buffer = buffer
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)]
        """Pairs (offset, length), by offset; never adjacent."""
        self._leases: dict[int, Lease] = {}
        self._serial = 0
        self.peak_bytes = 0

    @property
    def buffer(self) -> torch.Tensor:
        """All of the memory, flat uint8: the owner to give to `Transport.register`."""
        if self._buffer is None:
            where = "cpu" if self.device is None else f"cuda:{self.device}"
            self._buffer = torch.zeros(self.num_bytes, dtype=torch.uint8, device=where)
        return self._buffer

    @property
    def region(self) -> Region:
        """The region to register."""
        kind = MemoryKind.DRAM if self.device is None else MemoryKind.VRAM
        return Region(self.buffer.data_ptr(), self.num_bytes, kind, self.device or 0)

    @property
    def leased_bytes(self) -> int:
        """The number of bytes that are leased now."""
        return self.num_bytes - sum(length for _, length in self._free)

    @property
    def largest_free(self) -> int:
        """The length of the longest lease that could be had now."""
        return max((length for _, length in self._free), default=0)

    def acquire(self, num_bytes: int) -> Lease | None:
        """Returns a lease of at least `num_bytes`, or None if there is no room now. Never blocks."""
        if num_bytes <= 0:
            raise ConfigError(f"a lease of {num_bytes!r} bytes; at least 1 is needed")
        wanted = -(-num_bytes // _ALIGN) * _ALIGN
        for index, (offset, length) in enumerate(self._free):
            if length >= wanted:
                self._free[index : index + 1] = [(offset + wanted, length - wanted)] if length > wanted else []
                self._serial += 1
                lease = Lease(offset, num_bytes, self._serial)
                self._leases[self._serial] = lease
                self.peak_bytes = max(self.peak_bytes, self.leased_bytes)
                return lease
        return None

    def release(self, lease: Lease) -> None:
        """Takes a lease back; nothing may touch its memory any more. A second time does nothing."""
        if self._leases.pop(lease._serial, None) is None:
            return
        begin = lease.offset
        end = begin + -(-lease.num_bytes // _ALIGN) * _ALIGN
        kept = []
        for offset, length in self._free:
            if offset + length == begin:
                begin = offset
            elif offset == end:
                end = offset + length
            else:
                kept.append((offset, length))
        self._free = sorted([*kept, (begin, end - begin)])

    def slice(self, lease: Lease) -> torch.Tensor:
        """Returns the memory of a lease, flat uint8."""
        return self.buffer[lease.offset : lease.offset + lease.num_bytes]

    @contextmanager
    def leased(self, num_bytes: int) -> Iterator[Lease | None]:
        """Holds a lease for the length of a `with` block."""
        lease = self.acquire(num_bytes)
        try:
            yield lease
        finally:
            if lease is not None:
                self.release(lease)

    def close(self) -> None:
        """Frees the memory. Called after the transport's close."""
        self._buffer = None
        self._leases.clear()
        self._free = [(0, self.num_bytes)]
