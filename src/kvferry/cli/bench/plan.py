"""`kvferry bench plan`: what planning costs, without a transport or a GPU, on one core.

Direct cases count the byte runs that a transport would get; staged cases count the short runs that staging replaces, so
that the two can be compared. The result is the best of a few repetitions: other load on the machine can only add time.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.cli.main import ExitCode
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.builders import AxisOrder, LayoutBuilder, block_major, head_range
from kvferry.layout.description import CacheLayout, Rank
from kvferry.layout.edge import Edge
from kvferry.layout.packing import plan_staged
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan

__all__ = [
    "QUICK_ARGS",
    "SUMMARY",
    "Case",
    "Result",
    "Shape",
    "add_arguments",
    "cases",
    "layouts",
    "measure",
    "run",
    "table",
]

SUMMARY = "what planning costs"
QUICK_ARGS = ("--quick",)
HEAD_DIM = 128
ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """The cache of one side."""

    order: AxisOrder
    block_tokens: int
    tp: int
    major: bool = False
    """Block-major over all layers, as in the embedded engine; otherwise each layer has memory of its own."""


@dataclass(frozen=True, slots=True)
class Case:
    """One hand-off to one decode rank."""

    name: str
    tokens: int
    layers: int
    heads: int
    source: Shape
    destination: Shape
    contiguous: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the benchmark."""

    case: str
    runs: int
    """The runs that were made (direct), or the short runs that were replaced (staged)."""
    seconds: float
    ns_per_run: float
    bytes_per_run: float
    """Memory of the plan per run: of its three arrays (direct), or of the arrays of its boxes (staged)."""
    pieces: int


def cases(quick: bool) -> list[Case]:
    """Returns direct plans of 10^5 to 10^7 runs, and the case of the target."""
    nhd, hnd = AxisOrder.NHD, AxisOrder.HND
    major = Shape(hnd, 16, 4, True)
    result = [
        Case("block-major, equal, contiguous", 131072, 80, 8, major, major, contiguous=True),
        Case("block-major, equal, scattered", 131072, 80, 8, major, major),
        Case("10^5 runs: HND TP 8 -> TP 4", 5008, 80, 8, Shape(hnd, 16, 8), Shape(hnd, 16, 4)),
        Case("10^6 runs: HND TP 8 -> TP 4", 50000, 80, 8, Shape(hnd, 16, 8), Shape(hnd, 16, 4)),
        Case("NHD -> HND, TP 1", 4096, 32, 8, Shape(nhd, 16, 1), Shape(hnd, 16, 1)),
        Case("NHD block 16 -> 24, TP 2 -> TP 1", 8192, 32, 8, Shape(nhd, 16, 2), Shape(nhd, 24, 1)),
        Case("131072 tokens, 80 layers, 8 heads, TP 8 -> TP 4", 131072, 80, 8, Shape(hnd, 16, 8), Shape(hnd, 16, 4)),
    ]
    if not quick:
        result.append(Case("10^7 runs: NHD TP 8 -> TP 4", 32768, 80, 8, Shape(nhd, 16, 8), Shape(nhd, 16, 4)))
    return result


def layouts(case: Case, shape: Shape) -> list[CacheLayout]:
    """Returns the layouts of all ranks of one side."""
    blocks = 2 * -(-case.tokens // shape.block_tokens)
    names = [f"layers.{i}.attn" for i in range(case.layers)]
    result = []
    for tp_rank in range(shape.tp):
        rank = Rank(tp_rank, tp_rank, shape.tp)
        heads = head_range(case.heads, tp_rank, shape.tp)
        if shape.major:
            result.append(
                block_major(
                    names,
                    num_blocks=blocks,
                    block_tokens=shape.block_tokens,
                    heads=heads,
                    head_dim=HEAD_DIM,
                    element_bytes=ELEMENT_BYTES,
                    encoding="bf16",
                    rank=rank,
                )
            )
            continue
        builder = LayoutBuilder(rank)
        group = builder.full(shape.block_tokens)
        pool = builder.pool(blocks, case.layers * 2 * shape.block_tokens * len(heads) * HEAD_DIM * ELEMENT_BYTES)
        each = 2 * shape.block_tokens * len(heads) * HEAD_DIM * ELEMENT_BYTES
        for number, name in enumerate(names):
            builder.attention(
                name,
                group,
                heads=heads,
                head_dim=HEAD_DIM,
                element_bytes=ELEMENT_BYTES,
                encoding="bf16",
                order=shape.order,
                pool=pool.at(number * each),
            )
        result.append(builder.build())
    return result


def table(case: Case, shape: Shape, seed: int) -> list[BlockTable]:
    """Returns the block table of one request."""
    count = -(-case.tokens // shape.block_tokens)
    ids = np.arange(count) if case.contiguous else np.random.default_rng(seed).permutation(2 * count)[:count]
    return [BlockTable(0, 0, ids.tolist())]


def measure(case: Case, repeat: int) -> Iterator[Result]:
    """Measures direct, then staged, for one decode rank."""
    edges = pair(layouts(case, case.source), layouts(case, case.destination)[0]).edges
    source, destination = table(case, case.source, 1), table(case, case.destination, 2)
    wanted = TokenRange(0, case.tokens)

    def direct() -> tuple[int, int, int]:
        runs = pieces = size = 0
        for edge in edges:
            for piece in plan(edge, source, destination, wanted):
                runs += len(piece)
                pieces += 1
                size += piece.source.nbytes + piece.destination.nbytes + piece.length.nbytes
        return runs, size, pieces

    runs, size, pieces, seconds = _best(direct, repeat)
    yield Result(f"direct: {case.name}", runs, seconds, seconds / runs * 1e9, size / runs, pieces)

    def staged() -> tuple[int, int, int]:
        return _staged(edges, source, destination, wanted)

    _, size, pieces, seconds = _best(staged, repeat)
    yield Result(f"staged: {case.name}", runs, seconds, seconds / runs * 1e9, size / runs, pieces)


def _staged(
    edges: tuple[Edge, ...], source: list[BlockTable], destination: list[BlockTable], wanted: TokenRange
) -> tuple[int, int, int]:
    size = pieces = 0
    for edge in edges:
        both = plan_staged(edge, source, destination, wanted)
        for side in (both.source, both.destination):
            size += sum(box.block_ids.nbytes for box in side.boxes)
        pieces += 1
    return 0, size, pieces


def _best(work: Callable[[], tuple[int, int, int]], repeat: int) -> tuple[int, int, int, float]:
    best = float("inf")
    result = (0, 0, 0)
    for _ in range(repeat):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return (*result, best)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--json", action="store_true", help="print one object per line")
    parser.add_argument("--quick", action="store_true", help="leave out the case of 10^7 runs")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="repetitions; the best counts (default: 5)")


def run(args: argparse.Namespace) -> ExitCode:
    """Prints one row per case."""
    if not args.json:
        print(f"{'case':62} {'runs':>10} {'ms':>9} {'ns/run':>8} {'B/run':>6} {'pieces':>6}")
    for case in cases(args.quick):
        for result in measure(case, max(1, args.repeat)):
            if args.json:
                row = {name: getattr(result, name) for name in Result.__slots__}
                print(json.dumps(row | {"ns_per_run": round(result.ns_per_run, 3)}), flush=True)
            else:
                print(
                    f"{result.case:62} {result.runs:10} {result.seconds * 1e3:9.2f} {result.ns_per_run:8.2f} "
                    f"{result.bytes_per_run:6.1f} {result.pieces:6}",
                    flush=True,
                )
    return ExitCode.OK
