"""kvferry plan A B: what would be copied between two saved layouts or live workers, without copying anything.

A is the side that has the KV (prefill), B the side that wants it (decode). Each is a file (a saved layout, or what
`kvferry facts` saved) or the URL of a worker. Both sides' block tables are made up for one request of N tokens.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvferry.cli.main import ExitCode
from kvferry.cli.support.plan_svg import picture
from kvferry.cli.support.plan_text import Row, table, tidy_layers
from kvferry.cli.support.saved_layouts import load_side
from kvferry.errors import ConfigError
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.description import CacheKind, CacheLayout
from kvferry.layout.edge import Edge
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan
from kvferry.transport.base import Operation
from kvferry.transport.staging.chunks import chunk_plans
from kvferry.transport.staging.cost import choose, load_cost_model

__all__ = ["SUMMARY", "Summary", "add_arguments", "capacity", "made_up_tables", "rows", "run"]

SUMMARY = "what would be copied between two layouts"
DEFAULT_TOKENS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("a", metavar="A", help="who has the KV: a layout file, or a worker's URL")
    parser.add_argument("b", metavar="B", help="who wants it: a layout file, or a worker's URL")
    parser.add_argument("--tokens", type=int, metavar="N", help=f"length of the request ({DEFAULT_TOKENS}, if it fits)")
    parser.add_argument(
        "--scattered", action="store_true", help="blocks in random places (else they follow on, which is the best case)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random places (0)")
    parser.add_argument("--json", action="store_true", help="one object a line: edges, then a summary")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw it")


def run(args: argparse.Namespace) -> ExitCode:
    """Load, pair, plan, print."""
    source, destination = load_side(args.a), load_side(args.b)
    room = min(capacity(layout) for layout in (*source, *destination))
    tokens = min(DEFAULT_TOKENS, room) if args.tokens is None else args.tokens
    if not 1 <= tokens <= room:
        raise ConfigError(f"--tokens {tokens}: the two caches have room for 1 to {room} tokens of one request")
    rng = random.Random(args.seed) if args.scattered else None
    result = rows(source, destination, tokens, rng)
    if args.svg:
        try:
            args.svg.write_text(picture(source, destination, result, tokens))
        except OSError as error:
            raise ConfigError(f"cannot write {str(args.svg)!r}: {error.strerror}. Choose another path") from error
    if args.json:
        for row in result:
            print(json.dumps(asdict(row)))
        print(json.dumps({"summary": asdict(_summary(result, tokens, len(source), len(destination)))}))
    else:
        print(table(result))
        s = _summary(result, tokens, len(source), len(destination))
        print(
            f"\n{s.tokens} tokens from {s.source_ranks} to {s.destination_ranks} ranks: {s.edges} edges, "
            f"{s.bytes} bytes, {s.runs} runs direct; the slowest decode rank needs about {s.predicted_ms:.2f} ms"
        )
    return ExitCode.OK


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


def _summary(result: Sequence[Row], tokens: int, sources: int, destinations: int) -> Summary:
    by_rank: dict[int, float] = {}
    for row in result:
        by_rank[row.destination_rank] = by_rank.get(row.destination_rank, 0.0) + row.predicted_ms
    return Summary(
        tokens,
        sources,
        destinations,
        len(result),
        sum(row.bytes for row in result),
        sum(row.runs for row in result),
        max(by_rank.values(), default=0.0),
    )


def rows(
    source: Sequence[CacheLayout], destination: Sequence[CacheLayout], tokens: int, rng: random.Random | None
) -> list[Row]:
    """One row an edge, by destination rank: what pull would do, by this machine's calibration.

    Raises IncompatiblePeer. `rng` scatters the blocks.
    """
    wanted = TokenRange(0, tokens)
    model = load_cost_model()
    result = []
    near = made_up_tables(source, tokens, rng)
    far = made_up_tables(destination, tokens, rng)
    for layout in sorted(destination, key=lambda each: each.rank.index):
        for edge in pair(source, layout).edges:
            num_runs = num_bytes = 0
            for runs in plan(edge, near, far, wanted):
                num_runs += len(runs)
                num_bytes += runs.num_bytes
            choice = choose(model, Operation.READ, list(chunk_plans(edge, near, far, wanted)))
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
    """Tokens of one request that fit, over all groups."""
    rank = layout.rank
    room = [
        layout.groups[tensor.group].block_tokens * tensor.paging.num_blocks * rank.cp_size
        for tensor in layout.tensors
        if layout.groups[tensor.group].kind is not CacheKind.STATE
    ]
    return min(room, default=DEFAULT_TOKENS)


def made_up_tables(ranks: Sequence[CacheLayout], tokens: int, rng: random.Random | None) -> list[BlockTable]:
    """Tables of one request of [0, tokens): contiguous from block 0, or scattered.

    Window groups hold the window only. Groups are those of the first rank; all ranks of an engine have the same.
    """
    first = ranks[0]
    result = []
    for number, group in enumerate(first.groups):
        blocks = [tensor.paging.num_blocks for layout in ranks for tensor in layout.tensors if tensor.group == number]
        if not blocks:
            continue
        if group.kind is CacheKind.STATE:
            result.append(BlockTable(number, tokens, [0 if rng is None else rng.randrange(min(blocks))]))
            continue
        deal = first.rank.cp_size * (first.rank.cp_run_tokens if first.rank.cp_size > 1 else 1)
        turn = group.block_tokens * deal
        start = 0
        if group.kind is CacheKind.WINDOW and group.window_tokens is not None:
            start = max(0, tokens - group.window_tokens) // turn * turn
        local = -(-(tokens - start) // deal) * (deal // first.rank.cp_size)
        count = -(-local // group.block_tokens)
        ids = list(range(count)) if rng is None else rng.sample(range(min(blocks)), count)
        result.append(BlockTable(number, start, ids))
    return result
