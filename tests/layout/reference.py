"""The slow, obvious model: one element at a time, by the formula in description.Tensor and nothing else."""

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable, Runs
from kvferry.layout.cells import all_cells, cell_runs, sample_cells
from kvferry.layout.description import CacheKind, CacheLayout, Tensor
from kvferry.layout.edge import Edge
from kvferry.layout.packing import PackPlan, Side, StagedPlan
from kvferry.layout.pairing import Pairing
from tests.layout.worlds import Case

Memory = list[bytearray]


@dataclass
class Planner:
    """The functions under test; mutants replace them."""

    pair: Callable[..., Pairing]
    plan: Callable[..., Iterator[Runs]]
    plan_staged: Callable[..., StagedPlan]


class WrongBytesError(AssertionError):
    """Raised if the planner and the model disagree."""


def memory(layout: CacheLayout, fill: int) -> Memory:
    return [bytearray(bytes([fill + i & 255]) * region.num_bytes) for i, region in enumerate(layout.regions)]


def tables_by_group(tables: list[BlockTable]) -> dict[int, BlockTable]:
    return {table.group: table for table in tables}


def owner(layout: CacheLayout, position: int) -> bool:
    rank = layout.rank
    return rank.cp_size == 1 or (position // rank.cp_run_tokens) % rank.cp_size == rank.cp_rank


def places(layout: CacheLayout, table: BlockTable, block_tokens: int, end: int) -> dict[int, tuple[int, int]]:
    """Returns the block id and the token in the block for each position of this rank in the table, up to `end`."""
    mine = [p for p in range(table.first_token, end) if owner(layout, p)]
    held = len(table.block_ids) * block_tokens
    return {p: (table.block_ids[i // block_tokens], i % block_tokens) for i, p in enumerate(mine) if i < held}


def inner(tensor: Tensor) -> list[tuple[int, int]]:
    """Returns (offset, number that identifies the element) of every inner element."""
    axes = sorted(tensor.axes, key=lambda axis: axis.name)
    result = []
    for index in itertools.product(*(range(axis.start, axis.stop) for axis in axes)):
        offset = sum((i - axis.start) * axis.stride_bytes for i, axis in zip(index, axes, strict=True))
        name = 0
        for i, axis in zip(index, axes, strict=True):
            name = name * axis.extent + i
        result.append((offset, name))
    return result


def meaning(key: int, position: int, name: int, size: int) -> bytes:
    value = (key + position * 1_000_003 + name * 7_919) * 0x9E3779B97F4A7C15 >> 11 & 0xFFFFFFFFFFFF
    return (value.to_bytes(6, "big") * (size // 6 + 1))[:size]


def write(case: Case, memory_: Memory, layout: CacheLayout, tensor: Tensor, where: dict[int, tuple[int, int]]) -> int:
    """Writes the meaning of every element of one tensor at these positions. Returns the number of bytes."""
    shares = next(layer.shares for layer in case.model.layers if layer.name == tensor.layer)
    key = zlib.crc32(f"{shares or tensor.layer}/{tensor.part}".encode())
    buffer = memory_[tensor.region]
    size, stride = tensor.element_bytes, tensor.paging.token_stride_bytes
    elements = inner(tensor)
    whole = stride is None and layout.groups[tensor.group].kind is not CacheKind.STATE
    for position, (block, token) in where.items():
        if whole:
            # The bytes of a block are identified by the first position in it.
            position = min(p for p, (other, _) in where.items() if other == block)
        base = tensor.offset_bytes + block * tensor.paging.block_stride_bytes + token * (stride or 0)
        for offset, name in elements:
            at = base + offset
            buffer[at : at + size] = meaning(key, position, name, size)
    blocks = len({block for block, _ in where.values()}) if whole else len(where)
    return blocks * len(elements) * size


def without_aliases(layout: CacheLayout) -> list[Tensor]:
    seen: dict[tuple[object, ...], Tensor] = {}
    for t in layout.tensors:
        seen.setdefault((t.region, t.offset_bytes, t.group, t.paging, frozenset(t.axes)), t)
    return list(seen.values())


def fill_sources(case: Case) -> dict[int, Memory]:
    found = tables_by_group(case.source_tables)
    result: dict[int, Memory] = {}
    for layout in case.prefill.ranks:
        result[layout.rank.index] = memory(layout, 17)
        for tensor in without_aliases(layout):
            where = all_places(case, layout, tensor, found[tensor.group], case.end)
            write(case, result[layout.rank.index], layout, tensor, where)
    return result


def all_places(
    case: Case, layout: CacheLayout, tensor: Tensor, table: BlockTable, end: int
) -> dict[int, tuple[int, int]]:
    group = layout.groups[tensor.group]
    if group.kind is CacheKind.STATE:
        return {table.first_token: (table.block_ids[0], 0)}
    return places(layout, table, group.block_tokens, end)


def expected(case: Case) -> tuple[Memory, int] | None:
    """Returns the reader's memory after the hand-off, and the bytes moved; None if it must be refused."""
    near, far = tables_by_group(case.destination_tables), tables_by_group(case.source_tables)
    result = memory(case.reader, 101)
    moved = 0
    wanted, end = case.wanted, case.end
    for tensor in without_aliases(case.reader):
        group = case.reader.groups[tensor.group]
        if group.kind is CacheKind.STATE:
            if wanted.stop == end:
                moved += write(
                    case, result, case.reader, tensor, all_places(case, case.reader, tensor, near[tensor.group], end)
                )
            continue
        here = all_places(case, case.reader, tensor, near[tensor.group], end)
        there: dict[int, tuple[int, int]] = {}
        for layout in case.prefill.ranks:
            for theirs in layout.tensors:
                if (theirs.layer, theirs.part) == (tensor.layer, tensor.part):
                    there.update(all_places(case, layout, theirs, far[theirs.group], end))
        both = {p for p in here if p in there and wanted.start <= p < wanted.stop}
        window = group.window_tokens
        for p in range(wanted.start, wanted.stop):
            needed = window is None or p >= end - window + 1
            if needed and owner(case.reader, p) and p not in both:
                return None
        if tensor.paging.token_stride_bytes is None:
            blocks = {here[p][0] for p in both}
            where = {p: place for p, place in here.items() if place[0] in blocks}
            # A whole block is one element: write it from its first token.
            where = {p: (block, 0) for p, (block, token) in where.items() if token == 0}
        else:
            where = {p: here[p] for p in both}
        moved += write(case, result, case.reader, tensor, where)
    return result, moved


def run_copies(runs: Runs, source: Memory, destination: Memory) -> int:
    far, near = source[runs.source_region], destination[runs.destination_region]
    for a, b, n in zip(runs.source.tolist(), runs.destination.tolist(), runs.length.tolist(), strict=True):
        if not (n > 0 and 0 <= a <= len(far) - n and 0 <= b <= len(near) - n):
            raise WrongBytesError(f"run ({a}, {b}, {n}) is outside of its regions")
        near[b : b + n] = far[a : a + n]
    return runs.num_bytes


def pack_or_unpack(plan: PackPlan, memory_: Memory, staging: bytearray) -> None:
    """Does what transport's packer does with a PackPlan, element by element."""
    for box in plan.boxes:
        region = memory_[box.region]
        for number, block in enumerate(box.block_ids.tolist()):
            for index in itertools.product(*(range(count) for count, _, _ in box.dims)):
                at = box.offset + block * box.block_stride
                to = box.staging_offset + number * box.staging_block_stride
                for i, (_, memory_stride, staging_stride) in zip(index, box.dims, strict=True):
                    at += i * memory_stride
                    to += i * staging_stride
                n = box.run_bytes
                if not (0 <= at <= len(region) - n and 0 <= to <= len(staging) - n):
                    raise WrongBytesError(f"box {box} leaves its memory")
                if plan.side is Side.SOURCE:
                    staging[to : to + n] = region[at : at + n]
                else:
                    region[at : at + n] = staging[to : to + n]


def check_case(case: Case, planner: Planner, *, staged: bool, limit: int, cells: bool) -> bool:
    """Raises WrongBytesError unless the planner does as the model. Returns True if it moved bytes, False if refused."""
    want = expected(case)
    pairing = planner.pair(case.prefill.ranks, case.reader)
    args = (case.source_tables, case.destination_tables, case.wanted)
    if want is None:
        try:
            for edge in pairing.edges:
                planner.plan(edge, *args, end=case.end)
        except MalformedMessage:
            return False
        raise WrongBytesError("a needed token has no block, and the planner did not refuse it")
    sources = fill_sources(case)
    near = memory(case.reader, 101)
    moved = 0
    for edge in pairing.edges:
        for runs in planner.plan(edge, *args, end=case.end, max_runs_per_piece=limit):
            if len(runs) > limit:
                raise WrongBytesError(f"a piece has {len(runs)} runs; {limit} are allowed")
            moved += run_copies(runs, sources[edge.source_rank], near)
    _compare("direct", near, want[0])
    if moved != want[1]:
        raise WrongBytesError(f"{moved} bytes were moved and {want[1]} are enough")
    if staged:
        near = memory(case.reader, 101)
        for edge in pairing.edges:
            plan = planner.plan_staged(edge, *args, end=case.end)
            if plan.source.num_bytes != plan.destination.num_bytes:
                raise WrongBytesError("the two sides' staging buffers are of different length")
            staging = bytearray(plan.num_bytes)
            pack_or_unpack(plan.source, sources[edge.source_rank], staging)
            pack_or_unpack(plan.destination, near, staging)
        _compare("staged", near, want[0])
    if cells:
        for edge in pairing.edges:
            _compare_cells(case, edge, sources[edge.source_rank], near)
    return True


def _compare(kind: str, near: Memory, want: Memory) -> None:
    for number, (have, should) in enumerate(zip(near, want, strict=True)):
        if have != should:
            at = next(i for i, (a, b) in enumerate(zip(have, should, strict=True)) if a != b)
            raise WrongBytesError(f"{kind}: byte {at} of region {number} is {have[at]:#x}; {should[at]:#x} is right")


def _compare_cells(case: Case, edge: Edge, source: Memory, near: Memory) -> None:
    for cell in [
        *all_cells(edge, case.wanted, end=case.end),
        *sample_cells(case.seed, edge, case.wanted, 3, end=case.end),
    ]:
        both = []
        for layout, tables, memory_ in (
            (edge.source, case.source_tables, source),
            (edge.destination, case.destination_tables, near),
        ):
            runs = cell_runs(layout, tables, cell)
            region = memory_[runs.region]
            both.append(
                b"".join(region[a : a + n] for a, n in zip(runs.offset.tolist(), runs.length.tolist(), strict=True))
            )
        if both[0] != both[1]:
            raise WrongBytesError(f"{cell} reads differently on the two sides")


def total_bytes(runs: list[Runs]) -> int:
    return int(np.sum([r.num_bytes for r in runs]))
