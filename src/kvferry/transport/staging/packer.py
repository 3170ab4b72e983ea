"""Carries out pack plans: strided copies between a cache and staging memory, in DRAM and on CUDA devices.

Called on the hand-off driver's threads, never on the engine's. Each function returns when its bytes are where they
belong, on CUDA too. Both numpy and torch copy with the interpreter lock released.
"""

import ctypes
from collections.abc import Iterator, Sequence
from math import gcd
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransferError
from kvferry.layout.blocks import Runs
from kvferry.layout.description import MemoryKind, Region
from kvferry.layout.edge import merge_neighbours
from kvferry.layout.packing import PackBox, PackPlan, Side

# torch takes seconds to import, and callers that only count pieces (the cost model, `kvferry plan`) have no tensors.
if TYPE_CHECKING:
    import torch

__all__ = [
    "Memory",
    "copy_with_numpy",
    "copy_with_torch",
    "num_pieces",
    "pack",
    "region_views",
    "staging_runs",
    "unpack",
]

Memory: TypeAlias = Sequence["torch.Tensor"]
"""The regions of a layout, each as a flat uint8 tensor of its whole length. `region_views` makes them."""

Bytes = npt.NDArray[np.uint8]

_WORDS: tuple[tuple[type[np.generic], int], ...] = ((np.int64, 8), (np.int32, 4), (np.int16, 2), (np.uint8, 1))


def region_views(regions: Sequence[Region], owners: Sequence[object]) -> Memory:
    """Returns the regions as flat uint8 tensors. They do not keep the memory alive; its owners do.

    Device memory is reached through the owner, a tensor whose storage holds the region.
    """
    return tuple(_view(region, owners) for region in regions)


def _view(region: Region, owners: Sequence[object]) -> "torch.Tensor":
    import torch

    if region.kind is MemoryKind.DRAM:
        return torch.frombuffer((ctypes.c_ubyte * region.num_bytes).from_address(region.address), dtype=torch.uint8)
    for owner in owners:
        if isinstance(owner, torch.Tensor):
            storage = owner.untyped_storage()
            begin = region.address - storage.data_ptr()
            if begin >= 0 and begin + region.num_bytes <= storage.nbytes():
                flat = torch.empty(0, dtype=torch.uint8, device=owner.device)
                return flat.set_(storage, begin, (region.num_bytes,), (1,))
    raise TransferError(f"no owner holds {region!r}: give register() the tensors that own the memory")


def pack(plan: PackPlan, memory: Memory, staging: "torch.Tensor") -> None:
    """Copies this side's bytes of the plan from its cache into `staging`, flat uint8 of at least plan.num_bytes.

    Bytes of `staging` that no box covers are left as they are. Raises TransferError if the plan does not fit.
    """
    for box in plan.boxes:
        _copy(box, memory, staging, into_staging=True)
    _finish(staging, memory)


def unpack(plan: PackPlan, staging: "torch.Tensor", memory: Memory) -> None:
    """Copies from `staging` into this side's cache. Nothing outside the plan's boxes changes."""
    for box in plan.boxes:
        _copy(box, memory, staging, into_staging=False)
    _finish(staging, memory)


def _finish(staging: "torch.Tensor", memory: Memory) -> None:
    devices = {tensor.device for tensor in (staging, *memory) if tensor.is_cuda}
    if not devices:
        return
    import torch

    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _copy(box: PackBox, memory: Memory, staging: "torch.Tensor", *, into_staging: bool) -> None:
    _check(box, memory, staging)
    cache = memory[box.region]
    if cache.is_cuda or staging.is_cuda:
        copy_with_torch(box, cache, staging, into_staging=into_staging)
    else:
        copy_with_numpy(box, cache.numpy(), staging.numpy(), into_staging=into_staging)


def copy_with_numpy(box: PackBox, cache: Bytes, staging: Bytes, *, into_staging: bool) -> None:
    """Copies within DRAM. Measured on one core: 1.3 times as fast as torch for short pieces, 1.9 for long ones."""
    dtype, width = _widest(box, cache.ctypes.data, staging.ctypes.data)
    shape = tuple(count for count, _, _ in box.dims)
    cache_strides = (*(stride for _, stride, _ in box.dims), width)
    stage_strides = (*(stride for _, _, stride in box.dims), width)
    for first, count, step in _progressions(box.block_ids):
        whole = (count, *shape, box.run_bytes // width)
        cached = np.ndarray(
            whole,
            dtype,
            buffer=cache.data,
            offset=box.offset + int(box.block_ids[first]) * box.block_stride,
            strides=(step * box.block_stride, *cache_strides),
        )
        staged = np.ndarray(
            whole,
            dtype,
            buffer=staging.data,
            offset=box.staging_offset + first * box.staging_block_stride,
            strides=(box.staging_block_stride, *stage_strides),
        )
        if into_staging:
            np.copyto(staged, cached)
        else:
            np.copyto(cached, staged)


def copy_with_torch(box: PackBox, cache: "torch.Tensor", staging: "torch.Tensor", *, into_staging: bool) -> None:
    """Copies to and from device memory: one or two kernels per box, whatever its blocks. Works on any device."""
    if not len(box.block_ids):
        return
    import torch

    name, width = _widest(box, cache.data_ptr(), staging.data_ptr())
    dtype: torch.dtype = getattr(torch, name.__name__)
    cache, stage = _words(cache, dtype, width), _words(staging, dtype, width)
    shape = [*(count for count, _, _ in box.dims), box.run_bytes // width]
    cache_strides = [*(stride // width for _, stride, _ in box.dims), 1]
    stage_strides = [*(stride // width for _, _, stride in box.dims), 1]
    ids = torch.from_numpy(np.ascontiguousarray(box.block_ids)).to(cache.device)
    every_block = cache.as_strided(
        (int(box.block_ids.max()) + 1, *shape),
        (box.block_stride // width, *cache_strides),
        int(cache.storage_offset()) + box.offset // width,
    )
    staged = stage.as_strided(
        (len(ids), *shape),
        (box.staging_block_stride // width, *stage_strides),
        int(stage.storage_offset()) + box.staging_offset // width,
    )
    if into_staging:
        staged.copy_(every_block.index_select(0, ids))
    else:
        every_block.index_copy_(0, ids, staged.to(cache.device))


def _words(flat: "torch.Tensor", dtype: "torch.dtype", width: int) -> "torch.Tensor":
    return flat[: flat.numel() - flat.numel() % width].view(dtype)


def _widest(box: PackBox, cache_address: int, staging_address: int) -> tuple[type[np.generic], int]:
    """Returns the longest word that divides every address and every stride, and its number of bytes."""
    steps = [box.offset, box.block_stride, box.run_bytes, box.staging_offset, box.staging_block_stride]
    steps += [stride for _, *strides in box.dims for stride in strides]
    combined = gcd(cache_address, staging_address, *steps)
    return next((word, width) for word, width in _WORDS if combined % width == 0)


def _progressions(ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yields stretches of ids with a constant, positive step: (index of the first, how many, step)."""
    first, total = 0, len(ids)
    steps = np.diff(ids)
    changes = np.flatnonzero(np.diff(steps)) + 1
    at = 0
    while first < total:
        if first + 1 == total:
            yield first, 1, 0
            return
        step = int(steps[first])
        at = int(np.searchsorted(changes, first, side="right"))
        last = int(changes[at]) + 1 if at < len(changes) else total
        if step <= 0:
            yield first, 1, 0
            first += 1
        else:
            yield first, last - first, step
            first = last


def _check(box: PackBox, memory: Memory, staging: "torch.Tensor") -> None:
    """Checks what the plan itself promises, before memory is touched. Cheap: once per box."""
    spans = [(count - 1) * stride for count, stride, _ in box.dims]
    low, high = int(box.block_ids.min()), int(box.block_ids.max())
    end = box.offset + high * box.block_stride + sum(spans) + box.run_bytes
    staged = box.staging_offset + (len(box.block_ids) - 1) * box.staging_block_stride + box.run_bytes
    staged += sum((count - 1) * stride for count, _, stride in box.dims)
    size = memory[box.region].numel() if box.region < len(memory) else 0
    if low < 0 or box.offset < 0 or end > size or staged > staging.numel():
        raise TransferError(
            f"a pack plan leaves its memory: region {box.region} of {size} bytes up to {end}, staging of"
            f" {staging.numel()} bytes up to {staged}"
        )


def num_pieces(plan: PackPlan) -> int:
    """Returns the number of contiguous pieces that the plan copies on its cache's side."""
    return sum(box.num_bytes // box.run_bytes for box in plan.boxes)


def staging_runs(plan: PackPlan, *, staging_region: int, staging_offset: int) -> list[Runs]:
    """Returns the plan as runs between its cache and staging: what a transfer does in place of `pack` or `unpack`.

    A source's plan gives runs from its cache into the reader's staging; a destination's from the writer's staging into
    its cache. There is one Runs per region.
    """
    found: dict[int, list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]]] = {}
    for box in plan.boxes:
        blocks = np.arange(len(box.block_ids), dtype=np.int64)
        cache = box.offset + box.block_ids * box.block_stride
        stage = box.staging_offset + blocks * box.staging_block_stride
        for count, cache_stride, stage_stride in box.dims:
            index = np.arange(count, dtype=np.int64)
            cache = (cache[:, None] + index * cache_stride).ravel()
            stage = (stage[:, None] + index * stage_stride).ravel()
        found.setdefault(box.region, []).append((cache, stage, np.full(len(cache), box.run_bytes, np.int64)))
    runs = []
    for region, parts in found.items():
        cache, stage, length = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        order = np.argsort(stage, kind="stable")
        cache, stage, length = merge_neighbours(cache[order], stage[order], length[order])
        stage = stage + staging_offset
        if plan.side is Side.SOURCE:
            runs.append(Runs(region, staging_region, cache, stage, length))
        else:
            runs.append(Runs(staging_region, region, stage, cache, length))
    return runs
