"""`kvferry plan A B`: shows what would be copied between two layouts, without copying anything.

A is the side that has the KV (prefill), B the side that wants it (decode). Each is the URL of a worker, a file (a saved
layout, or what `kvferry facts` saved), or a model with the shape that the flags give it. The block tables of both sides
are made up, for one request of N tokens.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvferry.cli.main import ExitCode
from kvferry.cli.support.plan_rows import Row, show_table, tidy_layers
from kvferry.cli.support.plan_svg import picture
from kvferry.cli.support.shape_flags import add_shape_flags, shapes
from kvferry.cli.support.terminal import Terminal, plural, size
from kvferry.cli.support.worker_description import load_layouts
from kvferry.errors import ConfigError, IncompatiblePeer
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.description import CacheGroup, CacheKind, CacheLayout, Rank
from kvferry.layout.edge import Edge
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan
from kvferry.settings import Role
from kvferry.transport.base import Operation
from kvferry.transport.staging.chunks import chunk_plans
from kvferry.transport.staging.cost import choose, load_cost_model

__all__ = ["Summary", "add_arguments", "capacity", "made_up_tables", "rows", "run", "times_by_rank"]

DEFAULT_TOKENS = 4096
_FLAGS_OF = {
    "encoding": "kvferry serve --kv-dtype, or --dtype; vLLM: --kv-cache-dtype, or --dtype",
    "element_bytes": "kvferry serve --kv-dtype, or --dtype; vLLM: --kv-cache-dtype, or --dtype",
    "block_tokens": "kvferry serve --block-tokens; vLLM: --block-size",
}
"""Which flags set what pairing can find to differ, by the first word of its name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the two sides and the flags."""
    source = "a worker's URL, a file (a layout, or what `kvferry facts` saved), or a model"
    parser.add_argument("a", metavar="A", help=f"the side that has the KV (prefill): {source}")
    parser.add_argument("b", metavar="B", help="the side that wants it (decode): the same")
    parser.add_argument(
        "--tokens", type=int, metavar="TOKENS", help=f"length of the request (default: {DEFAULT_TOKENS}, or what fits)"
    )
    parser.add_argument(
        "--scattered",
        action="store_true",
        help="put the blocks in random places (default: consecutive, which is the best case)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random places (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one object per line: edges, then a summary")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the plan, as an SVG picture")
    add_shape_flags(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Loads, pairs, plans and prints."""
    shape_a, shape_b = shapes(args)
    source = load_layouts(args.a, shape_a, Role.PREFILL)
    destination = load_layouts(args.b, shape_b, Role.DECODE)
    room = min(capacity(layout) for layout in (*source, *destination))
    tokens = min(DEFAULT_TOKENS, room) if args.tokens is None else args.tokens
    if not 1 <= tokens <= room:
        raise ConfigError(f"--tokens {tokens}: the two caches have room for 1 to {room} tokens of one request")
    rng = random.Random(args.seed) if args.scattered else None
    try:
        result = rows(source, destination, tokens, rng)
    except IncompatiblePeer as error:
        raise IncompatiblePeer(_as_sides(str(error))) from error
    summary = _summary(result, tokens, len(source), len(destination))
    if args.svg:
        try:
            args.svg.write_text(picture(source, destination, result, tokens))
        except OSError as error:
            raise ConfigError(f"cannot write {str(args.svg)!r}: {error.strerror}. Choose another path") from error
    if args.json:
        for row in result:
            print(json.dumps(asdict(row)))
        print(json.dumps({"summary": asdict(summary)}))
    else:
        terminal = Terminal(sys.stdout)
        show_table(terminal, result)
        terminal.line(f"\n{_sentence(summary, result)}")
    return ExitCode.OK


def _as_sides(message: str) -> str:
    """Returns the message of a refusal in the words of this command: A has the KV, B wants it; and the flag to type."""
    message = re.sub(r"\b(decode|destination)=", "B=", re.sub(r"\b(prefill|source)=", "A=", message))
    name = re.search(r": (\w+)[^:]*: B=", message)
    flags = _FLAGS_OF.get(name[1]) if name else None
    return f"{message} ({flags})" if flags else message


@dataclass(frozen=True, slots=True)
class Summary:
    """All edges together."""

    tokens: int
    source_ranks: int
    destination_ranks: int
    edges: int
    bytes: int
    runs: int
    predicted_ms: float
    """The time of the slowest destination rank."""


def _summary(result: Sequence[Row], tokens: int, sources: int, destinations: int) -> Summary:
    return Summary(
        tokens,
        sources,
        destinations,
        len(result),
        sum(row.bytes for row in result),
        sum(row.runs for row in result),
        max(times_by_rank(result).values(), default=0.0),
    )


def _sentence(summary: Summary, result: Sequence[Row]) -> str:
    times = times_by_rank(result)
    slowest = max(times, key=lambda rank: times[rank], default=0)
    who = f"The slowest is decode rank {slowest}: about"
    if len({round(ms, 2) for ms in times.values()}) == 1:
        who = "It takes about" if len(times) == 1 else "Every decode rank takes about"
    return (
        f"{plural(summary.tokens, 'token')} from {plural(summary.source_ranks, 'prefill rank')} to "
        f"{plural(summary.destination_ranks, 'decode rank')}: {plural(summary.edges, 'edge')}, {size(summary.bytes)}, "
        f"{plural(summary.runs, 'run')} if direct. {who} {summary.predicted_ms:.2f} ms."
    )


def times_by_rank(result: Sequence[Row]) -> dict[int, float]:
    """Returns the predicted milliseconds of each destination rank; its edges take turns."""
    times: dict[int, float] = {}
    for row in result:
        times[row.destination_rank] = times.get(row.destination_rank, 0.0) + row.predicted_ms
    return times


def rows(
    source: Sequence[CacheLayout], destination: Sequence[CacheLayout], tokens: int, rng: random.Random | None
) -> list[Row]:
    """Returns one row per edge, by destination rank: what pull would do, by the calibration of this machine.

    Raises IncompatiblePeer. `rng` scatters the blocks.
    """
    wanted = TokenRange(0, tokens)
    model = load_cost_model()
    result = []
    source_tables = made_up_tables(source, tokens, rng)
    destination_tables = made_up_tables(destination, tokens, rng)
    for layout in sorted(destination, key=lambda each: each.rank.index):
        for edge in pair(source, layout).edges:
            num_runs = num_bytes = 0
            for runs in plan(edge, source_tables, destination_tables, wanted):
                num_runs += len(runs)
                num_bytes += runs.num_bytes
            chunks = list(chunk_plans(edge, source_tables, destination_tables, wanted))
            choice = choose(model, Operation.READ, chunks)
            result.append(
                Row(
                    source_rank=edge.source_rank,
                    destination_rank=edge.destination_rank,
                    layers=tuple(tidy_layers(dict.fromkeys(piece.layer for piece in edge.slices))),
                    parts=tuple(dict.fromkeys(piece.part for piece in edge.slices)),
                    heads=_heads(edge),
                    runs=num_runs,
                    bytes=num_bytes,
                    how=choice.route.value,
                    predicted_ms=min(choice.direct_s, choice.staged_s) * 1e3,
                    direct_ms=choice.direct_s * 1e3,
                    staged_ms=choice.staged_s * 1e3,
                )
            )
    return result


def _heads(edge: Edge) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for piece in edge.slices:
        axes = edge.destination.tensors[piece.destination_tensor].axes
        for axis, (start, stop) in zip(axes, piece.ranges, strict=True):
            if axis.name == "head":
                found[f"{start}-{stop - 1} of {axis.extent}" if stop - start > 1 else f"{start} of {axis.extent}"] = (
                    None
                )
    return tuple(found)


def capacity(layout: CacheLayout) -> int:
    """Returns how many tokens of one request fit into every group of the cache, if they share its pages evenly."""
    rank = layout.rank
    sharing = _sharing(layout)
    room = [
        layout.groups[tensor.group].block_tokens * (tensor.paging.num_blocks // sharing[tensor.group]) * rank.cp_size
        for tensor in layout.tensors
        if layout.groups[tensor.group].kind is not CacheKind.STATE
    ]
    return min(room, default=DEFAULT_TOKENS)


def _sharing(layout: CacheLayout) -> dict[int, int]:
    """Returns for each group how many groups take pages from the same pool, itself included."""
    pools: dict[tuple[int, int], set[int]] = {}
    for tensor in layout.tensors:
        pools.setdefault((tensor.region, tensor.paging.block_stride_bytes), set()).add(tensor.group)
    return {
        group: max(len(pool) for pool in pools.values() if group in pool) for pool in pools.values() for group in pool
    }


def made_up_tables(ranks: Sequence[CacheLayout], tokens: int, rng: random.Random | None) -> list[BlockTable]:
    """Returns the tables of one request of [0, tokens): consecutive blocks, or scattered ones.

    Window groups hold only the window. The groups are those of the first rank; all ranks of an engine have the same. No
    two groups get a block with the same id: they may share the pages of one pool.
    """
    first = ranks[0]
    fewest = {
        number: min(tensor.paging.num_blocks for layout in ranks for tensor in layout.tensors if tensor.group == number)
        for number in {tensor.group for layout in ranks for tensor in layout.tensors}
    }
    shared = any(count > 1 for layout in ranks for count in _sharing(layout).values())
    taken: set[int] = set()
    result = []
    for number, group in enumerate(first.groups):
        if number not in fewest:
            continue
        start, count = _held(group, first.rank, tokens)
        free = [block for block in range(fewest[number]) if block not in taken]
        ids = free[:count] if rng is None else rng.sample(free, count)
        if shared:
            taken.update(ids)
        result.append(BlockTable(number, start, ids))
    return result


def _held(group: CacheGroup, rank: Rank, tokens: int) -> tuple[int, int]:
    """Returns the first token that a group holds of a request of this many tokens, and the number of its blocks."""
    if group.kind is CacheKind.STATE:
        return tokens, 1
    # With context parallelism the ranks take turns: `cycle` tokens are one block of each of them.
    deal = rank.cp_size * (rank.cp_run_tokens if rank.cp_size > 1 else 1)
    cycle = group.block_tokens * deal
    start = 0
    if group.kind is CacheKind.WINDOW and group.window_tokens is not None:
        start = max(0, tokens - group.window_tokens) // cycle * cycle
    local = -(-(tokens - start) // deal) * (deal // rank.cp_size)
    return start, -(-local // group.block_tokens)
