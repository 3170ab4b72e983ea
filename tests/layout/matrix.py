"""The fixed matrix: every combination that the project promises, planned and checked byte by byte, as a table.

`python -m tests.layout.matrix` prints it, and with `--page FILE` writes the summary that is in the docs;
tests/layout/test_matrix.py runs it. The check is the slow model's formula, evaluated with numpy for all elements at
once: of a direct plan, and of a staged one with the packer of real transfers.
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.layout.blocks import BlockTable, Runs, TokenRange
from kvferry.layout.builders import AxisOrder
from kvferry.layout.description import CacheKind, CacheLayout, Tensor
from kvferry.layout.edge import Edge
from kvferry.layout.packing import plan_staged
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan
from kvferry.transport.staging.packer import copy_with_numpy
from tests.layout.worlds import Config, Engine, Layer, Model, build

TPS, PPS, BLOCKS = (1, 2, 3, 4, 8), (1, 2, 4), (8, 16, 24, 64, 128)
ORDERS = tuple(AxisOrder)
PARALLEL, SIZES, PREFIXES = "TP x TP, PP x PP", "block sizes x NHD/HND", "own prefixes"
TABLES = {
    PARALLEL: len(TPS) ** 2 * len(PPS) ** 2,
    SIZES: len(BLOCKS) ** 2 * len(ORDERS) ** 2,
    PREFIXES: len(BLOCKS) * sum(3 * size + 1 for size in BLOCKS),
}
"""The tables of one model, and how many cases each has."""
Bytes = npt.NDArray[np.uint8]


def _model(*layers: Layer) -> Model:
    return Model(layers, head_dim=1, element_bytes=2, opaque_block=16)


def _attention(count: int, heads: int, window: int | None = None, first: int = 0) -> tuple[Layer, ...]:
    return tuple(Layer(f"layers.{first + i}.attn", "attention", heads, window) for i in range(count))


MODELS = {
    "GQA, 8 heads": _model(*_attention(4, 8)),
    "GQA, 6 heads": _model(*_attention(4, 6)),
    "GQA, 3 heads": _model(*_attention(4, 3)),
    "replicated, 2 heads": _model(*_attention(4, 2)),
    "MLA": _model(*(Layer(f"layers.{i}.attn", "mla") for i in range(4))),
    "full + sliding": _model(
        *(Layer(f"layers.{i}.attn", "attention", 4, 20 if i % 2 else None) for i in range(4)),
    ),
    "Mamba hybrid": _model(
        Layer("layers.0.attn", "attention", 4),
        Layer("layers.1.mamba", "mamba2", 8),
        Layer("layers.2.attn", "attention", 4),
        Layer("layers.3.mamba", "mamba2", 8),
    ),
}


@lru_cache(maxsize=100_000)
def _elements(tensor: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the offset and the number of every inner element."""
    offset, name = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for axis in sorted(tensor.axes, key=lambda each: each.name):
        index = np.arange(axis.start, axis.stop)
        offset = (offset[:, None] + (index - axis.start) * axis.stride_bytes).reshape(-1)
        name = (name[:, None] * axis.extent + index).reshape(-1)
    return offset, name


def _write(memory: list[Bytes], layout: CacheLayout, tensor: Tensor, table: BlockTable, tokens: TokenRange) -> int:
    """Writes what the elements of these tokens mean. Returns the number of bytes."""
    if layout.groups[tensor.group].kind is CacheKind.STATE:
        positions = np.array([table.first_token])
        starts = np.array([table.block_ids[0] * tensor.paging.block_stride_bytes])
    else:
        size = layout.groups[tensor.group].block_tokens
        positions = np.arange(max(tokens.start, table.first_token), tokens.stop)
        index, token = np.divmod(positions - table.first_token, size)
        assert tensor.paging.token_stride_bytes is not None, "the matrix has no opaque packings"
        starts = np.asarray(table.block_ids, np.int64)[index] * tensor.paging.block_stride_bytes
        starts = starts + token * tensor.paging.token_stride_bytes
    offsets, names = _elements(tensor)
    key = sum(ord(letter) * 31**i for i, letter in enumerate(f"{tensor.layer}{tensor.part}")) % 65521
    value = (key * 7 + positions[:, None] * 40503 + names * 9973) % 65521
    at = (tensor.offset_bytes + starts[:, None] + offsets).reshape(-1)
    memory[tensor.region][at] = (value % 256).reshape(-1)
    memory[tensor.region][at + 1] = (value // 256).reshape(-1)
    return 2 * len(at)


def _memory(layout: CacheLayout, fill: int) -> list[Bytes]:
    return [np.full(region.num_bytes, fill, np.uint8) for region in layout.regions]


def _tables(engine: Engine, tokens: int, first_block: int, window: int | None) -> list[BlockTable]:
    """Returns blocks in a fixed disorder, each used once; window groups lack the blocks that the window has left."""
    result = []
    free = iter([(first_block + 7 * i) % engine.config.num_blocks for i in range(engine.config.num_blocks)])
    for number, tag in enumerate(engine.groups):
        if tag == "state":
            result.append(BlockTable(number, tokens, [next(free)]))
            continue
        size = engine.config.block_tokens
        first = max(0, tokens - window) // size if tag == "window" and window else 0
        count = -(-tokens // size)
        ids = [next(free) for _ in range(first, count)]
        result.append(BlockTable(number, first * size, ids))
    return result


def _copy(runs: Runs, far: Bytes, near: Bytes) -> None:
    for size in np.unique(runs.length):
        same = runs.length == size
        step = np.arange(size)
        near[runs.destination[same][:, None] + step] = far[runs.source[same][:, None] + step]


@dataclass
class Producer:
    """Returns a filled prefill engine, which is kept between cases."""

    engine: Engine
    tables: list[BlockTable]
    memory: dict[int, list[Bytes]]


@lru_cache(maxsize=256)
def _producer(name: str, config: Config, tokens: int) -> Producer:
    model = MODELS[name]
    engine = build(model, config)
    tables = _tables(engine, tokens, 3, _window(model))
    memory = {}
    for layout in engine.ranks:
        mine = _memory(layout, 17)
        for tensor in layout.tensors:
            table = next(t for t in tables if t.group == tensor.group)
            _write(mine, layout, tensor, table, TokenRange(0, tokens))
        memory[layout.rank.index] = mine
    return Producer(engine, tables, memory)


@lru_cache(maxsize=256)
def _consumer(name: str, config: Config) -> Engine:
    return build(MODELS[name], config)


@lru_cache(maxsize=64)
def _edges(name: str, prefill: Config, decode: Config, tokens: int, rank: int) -> tuple[Edge, ...]:
    return pair(_producer(name, prefill, tokens).engine.ranks, _consumer(name, decode).ranks[rank]).edges


def _window(model: Model) -> int | None:
    return next((layer.window for layer in model.layers if layer.window), None)


def check(name: str, prefill: Config, decode: Config, tokens: int, hits: int = 0) -> str:
    """Plans and copies for every decode rank. Returns "ok" or the refusal; raises AssertionError for a wrong byte."""
    producer = _producer(name, prefill, tokens)
    consumer = _consumer(name, decode)
    tables = _tables(consumer, tokens, 1, _window(MODELS[name]))
    wanted = TokenRange(hits, tokens)
    try:
        for layout in consumer.ranks:
            near, staged, want = _memory(layout, 101), _memory(layout, 101), _memory(layout, 101)
            moved = enough = 0
            for edge in _edges(name, prefill, decode, tokens, layout.rank.index):
                far = producer.memory[edge.source_rank]
                for runs in plan(edge, producer.tables, tables, wanted):
                    _copy(runs, far[runs.source_region], near[runs.destination_region])
                    moved += runs.num_bytes
                both = plan_staged(edge, producer.tables, tables, wanted)
                staging = np.zeros(both.num_bytes, np.uint8)
                for box in both.source.boxes:
                    copy_with_numpy(box, far[box.region], staging, into_staging=True)
                for box in both.destination.boxes:
                    copy_with_numpy(box, staged[box.region], staging, into_staging=False)
            for tensor in layout.tensors:
                here = next(t for t in tables if t.group == tensor.group)
                # A window group also holds what prefill's table of the same layer holds, from the later start on.
                theirs = next(t for t in producer.tables if t.group == producer.engine.group_of[tensor.layer])
                start = max(hits, theirs.first_token) if layout.groups[tensor.group].kind != "state" else hits
                enough += _write(want, layout, tensor, here, TokenRange(start, tokens))
            for how, result in (("direct", near), ("staged", staged)):
                for have, should in zip(result, want, strict=True):
                    assert (have == should).all(), f"{name} {prefill} {decode} {tokens} {hits}: {how}: wrong bytes"
            assert moved == enough, (
                f"{name} {prefill} {decode} {tokens} {hits}: {moved} bytes moved; {enough} are enough"
            )
    except (IncompatiblePeer, MalformedMessage) as error:
        return f"refused: {error}"
    return "ok"


@dataclass
class Matrix:
    """What was run, table by table."""

    ok: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    correct: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Counts by model and table."""

    def add(self, name: str, table: str, answer: str) -> bool:
        self.correct[name, table] += answer == "ok"
        if answer == "ok":
            self.ok += 1
            return True
        self.refused[answer] += 1
        return False

    def grid(self, title: str, rows: list[str], columns: list[str], cells: Iterator[list[str]]) -> None:
        width = max(len(column) for column in columns) + 2
        width = max(width, 8)
        self.lines += ["", title, " " * 12 + "".join(f"{column:>{width}}" for column in columns)]
        for row, values in zip(rows, cells, strict=True):
            self.lines.append(f"{row:12}" + "".join(f"{value:>{width}}" for value in values))


BASE = Config(block_tokens=8, num_blocks=80)


def _sized(config: Config, block_tokens: int, tokens: int) -> Config:
    """Just enough blocks for two groups; not a multiple of 7, which is the step in which _tables takes them."""
    count = 2 * -(-tokens // block_tokens) + 2
    return replace(config, block_tokens=block_tokens, num_blocks=count + (count % 7 == 0))


def parallel(matrix: Matrix, name: str) -> None:
    """TP x TP and PP x PP; alternately HND to NHD with different memory forms, so that nothing lines up by chance."""

    def cells() -> Iterator[list[str]]:
        for p_tp in TPS:
            row = []
            for d_tp in TPS:
                good = [
                    matrix.add(
                        name,
                        PARALLEL,
                        check(
                            name,
                            replace(BASE, tp=p_tp, pp=p_pp, memory="pages"),
                            replace(BASE, tp=d_tp, pp=d_pp, order=AxisOrder.HND, memory="cross", shuffle=7),
                            37,
                            hits=5,
                        ),
                    )
                    for p_pp, d_pp in itertools.product(PPS, PPS)
                ]
                row.append(f"{sum(good)}/{len(good)}")
            yield row

    matrix.grid(
        f"{name}: TP of prefill (down) x TP of decode (across); in each field PP x PP in {PPS}",
        [f"P TP {tp}" for tp in TPS],
        [f"D TP {tp}" for tp in TPS],
        cells(),
    )


def blocks(matrix: Matrix, name: str) -> None:
    """Block sizes squared, NHD/HND squared."""

    def cells() -> Iterator[list[str]]:
        for p_block in BLOCKS:
            row = []
            for d_block in BLOCKS:
                good = [
                    matrix.add(
                        name,
                        SIZES,
                        check(
                            name,
                            _sized(replace(BASE, tp=2, order=p_order), p_block, 150),
                            _sized(replace(BASE, order=d_order, memory="cross"), d_block, 150),
                            150,
                            hits=0,
                        ),
                    )
                    for p_order, d_order in itertools.product(ORDERS, ORDERS)
                ]
                row.append(f"{sum(good)}/{len(good)}")
            yield row

    matrix.grid(
        f"{name}: block size of prefill (down) x of decode (across); in each field NHD/HND squared",
        [f"P {size}" for size in BLOCKS],
        [f"D {size}" for size in BLOCKS],
        cells(),
    )


def prefixes(matrix: Matrix, name: str, p_blocks: tuple[int, ...] = BLOCKS) -> None:
    """D has a prefix of its own: every token of three of its blocks."""

    def cells() -> Iterator[list[str]]:
        for p_block in p_blocks:
            row = []
            for d_block in BLOCKS:
                good = [
                    matrix.add(
                        name,
                        PREFIXES,
                        check(
                            name,
                            _sized(replace(BASE, order=ORDERS[hits % 2]), p_block, 3 * d_block + 3),
                            _sized(
                                replace(BASE, order=ORDERS[hits // 2 % 2], memory="cross"), d_block, 3 * d_block + 3
                            ),
                            3 * d_block + 3,
                            hits=hits,
                        ),
                    )
                    for hits in range(3 * d_block + 1)
                ]
                row.append(f"{sum(good)}/{len(good)}")
            yield row

    matrix.grid(
        f"{name}: decode has its own prefix of 0, 1, ... tokens, up to three blocks; block sizes as above",
        [f"P {size}" for size in p_blocks],
        [f"D {size}" for size in BLOCKS],
        cells(),
    )


PREFIX_MODELS = ("GQA, 3 heads", "MLA", "full + sliding", "Mamba hybrid")


def run() -> Matrix:
    """Yields all of it."""
    matrix = Matrix()
    for name in MODELS:
        parallel(matrix, name)
    for name in MODELS:
        blocks(matrix, name)
    for name in PREFIX_MODELS:
        prefixes(matrix, name)
    matrix.lines += ["", f"correct: {matrix.ok}   refused: {sum(matrix.refused.values())}"]
    matrix.lines += [f"{count:6} x {reason}" for reason, count in matrix.refused.most_common()]
    return matrix


def all_correct() -> Matrix:
    """Returns what run() gives if nothing is refused."""
    matrix = Matrix()
    for name, table in itertools.product(MODELS, TABLES):
        if table is not PREFIXES or name in PREFIX_MODELS:
            matrix.correct[name, table] = TABLES[table]
            matrix.ok += TABLES[table]
    return matrix


def page(matrix: Matrix) -> str:
    """Returns the summary in the docs."""
    sizes = {"TP": TPS, "PP": PPS, "block": BLOCKS}
    shown = {name: ", ".join(map(str, values)) for name, values in sizes.items()}
    rows = [f"| | {' | '.join(TABLES)} |", "|---" * (len(TABLES) + 1) + "|"]
    for name in MODELS:
        cells = [
            f"{matrix.correct[name, table]}/{TABLES[table]}" if (name, table) in matrix.correct else "-"
            for table in TABLES
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    refusals = [f"* {count} times: {reason}" for reason, count in matrix.refused.most_common()]
    return _PAGE.format(
        **shown,
        table="\n".join(rows),
        ok=matrix.ok,
        refused=sum(matrix.refused.values()),
        refusals="\n".join(refusals) or "None.",
    )


_PAGE = """<!-- Made by `make docs` from tests/layout/matrix.py. Do not edit. -->
# The matrix of tested layouts

Every combination below is planned, copied and compared byte by byte, once with direct runs and once staged (packed,
moved as one run, unpacked): every byte that decode needs arrives, and no other byte of its cache changes. The format is
[layout](layout.md). Random pairs of everything else that the format allows are tested in
tests/layout/test_property.py.

* **TP x TP, PP x PP**: tensor parallel sizes {TP} and pipeline sizes {PP} on both sides; prefill uses NHD on
  pages that groups share, decode uses HND in blocks over all layers, with its regions and tensors in another order; 37
  tokens, of which decode already has 5.
* **block sizes x NHD/HND**: blocks of {block} tokens, and NHD and HND, on both sides; TP 2 to TP 1; 150 tokens.
* **own prefixes**: the same block sizes; decode already has 0, 1, 2, ... tokens, up to three of its blocks.

Correct of all tried:

{table}

Correct: {ok}. Refused: {refused}.

## Refusals

{refusals}

`python -m tests.layout.matrix` prints the tables field by field.
"""


def main() -> None:
    """Runs the matrix and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the summary there")
    parser.add_argument("--no-run", action="store_true", help="write the summary that the tests prove, without a run")
    args = parser.parse_args()
    matrix = all_correct() if args.no_run else run()
    sys.stdout.write("".join(line + "\n" for line in matrix.lines))
    if args.page:
        args.page.write_text(page(matrix))


if __name__ == "__main__":
    main()
