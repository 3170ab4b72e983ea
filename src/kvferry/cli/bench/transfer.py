"""`kvferry bench transfer`: direct, staged and chosen transfers, one long transfer and memcpy, over real NIXL.

There are two processes: decode reads from prefill, which does nothing but let the progress thread of NIXL run. All ways
are measured in turn, in one run, so that the ratios hold although the speed of the machine drifts; the figures are
medians. Planning is part of the time. Every way must leave the same bytes, which is checked once per case.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvferry.cli.main import ExitCode
from kvferry.errors import TransferError
from kvferry.ids import PeerName
from kvferry.layout.blocks import BlockTable, Runs, TokenRange
from kvferry.layout.builders import AxisOrder, LayoutBuilder, attention_bytes, block_major, head_range
from kvferry.layout.description import CacheLayout, Rank
from kvferry.layout.edge import Edge
from kvferry.layout.packing import StagedPlan
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan
from kvferry.settings import TransferSettings
from kvferry.testing.ends import LocalEnd, ProcessEnd
from kvferry.transport.base import Operation, Ticket
from kvferry.transport.staging.chunks import CHUNK_BYTES, chunk_plans
from kvferry.transport.staging.cost import Choice, choose, load_cost_model
from kvferry.transport.staging.packer import region_views
from kvferry.transport.staging.stager import Stager
from kvferry.transport.staging.staging_pool import StagingPool

__all__ = ["CASES", "QUICK_ARGS", "Case", "add_arguments", "layouts", "measure_case", "run", "table"]

QUICK_ARGS = ("--mib", "64", "--repeats", "3")
PREFILL, DECODE = PeerName("bench-prefill/1/0"), PeerName("bench-decode/1/0")
NUM_LAYERS, NUM_HEADS, HEAD_DIM, ELEMENT_BYTES = 8, 8, 128, 2
TOKEN_BYTES = NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM * ELEMENT_BYTES
STAGING_BYTES = TransferSettings().staging_bytes


@dataclass(frozen=True, slots=True)
class Case:
    """A pair of layouts. `tp` is that of prefill; decode has all heads. "block-major" is as in the embedded engine."""

    name: str
    source: str
    destination: str
    tp: int = 1
    block_tokens: tuple[int, int] = (16, 16)
    scattered: bool = True


CASES = {
    "a": Case("same layout, contiguous", "block-major", "block-major", scattered=False),
    "b": Case("same layout, scattered", "block-major", "block-major"),
    "c": Case("TP 2 -> TP 1, HND", "hnd", "hnd", tp=2),
    "d": Case("TP 2 -> TP 1, NHD", "nhd", "nhd", tp=2),
    "e": Case("NHD -> HND", "nhd", "hnd"),
    "f": Case("block 16 -> 64", "nhd", "nhd", block_tokens=(16, 64)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--case", choices=[*CASES], nargs="+", default=[*CASES], help="cases to measure (default: all)")
    parser.add_argument("--mib", type=int, default=256, metavar="MIB", help="how much to move (default: 256)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each way (default: 5)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of the copies (default: 1)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="give up on a case after this long (default: 600)",
    )
    parser.add_argument("--json", action="store_true", help="print one object per line")


def run(args: argparse.Namespace) -> ExitCode:
    """Starts the two processes and measures case by case."""
    environment = {"OMP_NUM_THREADS": str(args.threads)}
    names = (PREFILL, DECODE)
    ends = [ProcessEnd("nixl", name, (4096,), environment=environment, timeout_s=60, wait=False) for name in names]
    try:
        for end in ends:
            end.wait_ready()
        if not args.json:
            print(f"{'case':34}{'direct':>8}{'staged':>8}  {'chosen':8}{'GB/s':>6}{'one long':>10}{'memcpy':>8}  GB/s")
        for key in args.case:
            row = measure_case(key, args.mib << 20, args.repeats, args.threads, *ends, timeout_s=args.timeout)
            if args.json:
                print(json.dumps(row), flush=True)
            else:
                label = f"({key}) {CASES[key].name}"
                print(
                    f"{label:34}{row['direct_gbps']:8.2f}{row['staged_gbps']:8.2f}  {row['chosen']:8}"
                    f"{row['chosen_gbps']:6.2f}{row['one_long_gbps']:10.2f}{row['memcpy_gbps']:8.2f}",
                    flush=True,
                )
    finally:
        for end in ends:
            end.close()
    return ExitCode.OK


def measure_case(
    key: str, num_bytes: int, repeats: int, threads: int, prefill: ProcessEnd, decode: ProcessEnd, *, timeout_s: float
) -> dict[str, object]:
    """Measures one case and returns its row of the table."""
    case = CASES[key]
    num_tokens = max(64, num_bytes // TOKEN_BYTES // 64 * 64)
    sources, destination = layouts(case, num_tokens)
    prefill.timeout_s = decode.timeout_s = timeout_s
    prefill.renew(PREFILL, [region.num_bytes for layout in sources for region in layout.regions])
    decode.renew(DECODE, [*(region.num_bytes for region in destination.regions), STAGING_BYTES])
    prefill.transport.connect(DECODE, decode.transport.metadata(), decode.regions)
    decode.transport.connect(PREFILL, prefill.transport.metadata(), prefill.regions)
    prefill.run(_fill)
    row = decode.run(_measure, key, num_tokens, repeats, threads)
    print(f"  ({key}) done at load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return row


def layouts(case: Case, num_tokens: int) -> tuple[list[CacheLayout], CacheLayout]:
    """Returns the layouts of prefill's ranks, and that of decode's rank."""
    sources = [
        _layout(case.source, case.block_tokens[0], num_tokens, Rank(index=rank, tp_rank=rank, tp_size=case.tp))
        for rank in range(case.tp)
    ]
    return sources, _layout(case.destination, case.block_tokens[1], num_tokens, Rank())


def _layout(order: str, block_tokens: int, num_tokens: int, rank: Rank) -> CacheLayout:
    heads = head_range(NUM_HEADS, rank.tp_rank, rank.tp_size)
    names = [f"layers.{layer}.attn" for layer in range(NUM_LAYERS)]
    num_blocks = num_tokens // block_tokens
    if order == "block-major":
        return block_major(
            names,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            heads=heads,
            head_dim=HEAD_DIM,
            element_bytes=ELEMENT_BYTES,
            encoding="bf16",
            rank=rank,
        )
    builder = LayoutBuilder(rank)
    group = builder.full(block_tokens)
    block_bytes = attention_bytes(block_tokens, heads, HEAD_DIM, ELEMENT_BYTES)
    pool = builder.pool(num_blocks, block_bytes * NUM_LAYERS)
    for number, name in enumerate(names):
        builder.attention(
            name,
            group,
            heads=heads,
            head_dim=HEAD_DIM,
            element_bytes=ELEMENT_BYTES,
            encoding="bf16",
            order=AxisOrder[order.upper()],
            pool=pool.at(number * block_bytes),
        )
    return builder.build()


def table(num_tokens: int, block_tokens: int, seed: int, *, scattered: bool) -> list[BlockTable]:
    """Returns a table of all blocks, in order or shuffled."""
    ids = np.arange(num_tokens // block_tokens)
    if scattered:
        ids = np.random.default_rng(seed).permutation(ids)
    return [BlockTable(0, 0, ids.tolist())]


def _fill(end: LocalEnd) -> None:
    for seed, buffer in enumerate(end.buffers):
        buffer.view(np.uint64)[:] = np.random.default_rng(seed).integers(
            1 << 63, size=len(buffer) // 8, dtype=np.uint64
        )


class _Ways:
    """The ways to move one case, on the decode side."""

    def __init__(self, end: LocalEnd, key: str, num_tokens: int) -> None:
        case = CASES[key]
        self.end = end
        self.wanted = TokenRange(0, num_tokens)
        sources, destination = layouts(case, num_tokens)
        self.edges = pair(sources, destination).edges
        self.source = table(num_tokens, case.block_tokens[0], 1, scattered=case.scattered)
        self.destination = table(num_tokens, case.block_tokens[1], 2, scattered=case.scattered)
        self.num_bytes = sum(region.num_bytes for region in destination.regions)
        self.shares = [sum(region.num_bytes for region in source.regions) for source in sources]
        pool = StagingPool(STAGING_BYTES, buffer=torch.from_numpy(end.buffers[-1]))
        memory = region_views(end.regions[:-1], end.buffers)
        self.stager = Stager(end.transport, pool, len(end.regions) - 1, memory)
        self.local_source = np.ones(self.num_bytes, np.uint8)
        self.num_runs = {"direct": 0, "staged": 0}

    def _first_region(self, edge: Edge) -> int:
        # The prefill process holds the regions of all its ranks: one per rank.
        return edge.source_rank

    def _chunks(self, edge: Edge) -> Iterator[StagedPlan]:
        plans = chunk_plans(edge, self.source, self.destination, self.wanted, chunk_bytes=self.stager.chunk_bytes)
        for chunk in plans:
            boxes = tuple(replace(box, region=box.region + self._first_region(edge)) for box in chunk.source.boxes)
            yield replace(chunk, source=replace(chunk.source, boxes=boxes))

    def direct(self) -> None:
        """Reads every planned run, from cache to cache."""
        tickets: set[Ticket] = set()
        self.num_runs["direct"] = 0
        for edge in self.edges:
            shift = self._first_region(edge)
            runs = [
                replace(some, source_region=some.source_region + shift)
                for some in plan(edge, self.source, self.destination, self.wanted)
            ]
            self.num_runs["direct"] += sum(map(len, runs))
            tickets.add(self.end.transport.post(PREFILL, Operation.READ, runs))
        self._wait(tickets)

    def staged(self) -> None:
        """Reads through staging memory of this side, chunk by chunk."""
        self.num_runs["staged"] = 0
        for edge in self.edges:
            self.stager.start(PREFILL, Operation.READ, self._chunks(edge))
        while self.stager.num_open:
            completions = self.end.transport.poll().completions
            for done in completions:
                self.stager.completed(done)
            for ended in self.stager.poll():
                if ended.error is not None:
                    raise TransferError(ended.error)
                self.num_runs["staged"] += ended.num_runs
            if not completions:
                time.sleep(20e-6)

    def one_long(self) -> None:
        """Reads the same number of bytes as one run from each of prefill's ranks."""
        pieces = []
        at = 0
        for rank, share in enumerate(self.shares):
            pieces.append(Runs(rank, 0, *(np.array([value], np.int64) for value in (0, at, share))))
            at += share
        self._wait({self.end.transport.post(PREFILL, Operation.READ, pieces)})

    def memcpy(self) -> None:
        """Copies the same number of bytes within this process."""
        np.copyto(self.end.buffers[0], self.local_source)

    def choice(self) -> Choice:
        """Returns the choice of the cost model, from the first chunk of each edge."""
        sample = [next(chunk_plans(edge, self.source, self.destination, self.wanted)) for edge in self.edges]
        return choose(load_cost_model(), Operation.READ, sample, self.num_bytes)

    def _wait(self, tickets: set[Ticket]) -> None:
        while tickets:
            for done in self.end.transport.poll().completions:
                if done.error is not None:
                    raise TransferError(done.error)
                tickets.discard(done.ticket)
            if tickets:
                time.sleep(20e-6)


def _measure(end: LocalEnd, key: str, num_tokens: int, repeats: int, threads: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    ways = _Ways(end, key, num_tokens)
    timed: dict[str, Callable[[], None]] = {
        "direct": ways.direct,
        "staged": ways.staged,
        "one_long": ways.one_long,
        "memcpy": ways.memcpy,
    }
    digests = set()
    for name in ("direct", "staged"):  # also the warm-up
        end.buffers[0].fill(0)
        timed[name]()
        digests.add(hashlib.blake2b(end.buffers[0].data).hexdigest())
    if len(digests) != 1:
        raise TransferError(
            f"case {key}: direct and staged transfers leave different bytes. A fault of kvferry: please report it"
        )
    timed["one_long"]()
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(repeats):
        for name, move in timed.items():
            started_s = time.perf_counter()
            move()
            seconds[name].append(time.perf_counter() - started_s)
    choice = ways.choice()
    ways.stager.close()
    gbps = {name: ways.num_bytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    chosen = gbps[choice.route.value]
    return {
        "case": key,
        "name": CASES[key].name,
        "bytes": ways.num_bytes,
        "direct_gbps": round(gbps["direct"], 3),
        "staged_gbps": round(gbps["staged"], 3),
        "chosen": choice.route.value,
        "chosen_gbps": round(chosen, 3),
        "one_long_gbps": round(gbps["one_long"], 3),
        "memcpy_gbps": round(gbps["memcpy"], 3),
        "chosen_of_better": round(chosen / max(gbps["direct"], gbps["staged"]), 3),
        "chosen_of_one_long": round(chosen / gbps["one_long"], 3),
        "direct_runs": ways.num_runs["direct"],
        "staged_runs": ways.num_runs["staged"],
        "predicted_direct_s": round(choice.direct_s, 4),
        "predicted_staged_s": round(choice.staged_s, 4),
        "repeats": repeats,
        "threads": threads,
        "chunk_bytes": CHUNK_BYTES,
        "cost_model": load_cost_model().origin,
    }
