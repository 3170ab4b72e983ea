"""The P/D matrix: every family, every shape of prefill and decode, block sizes, prefix hits, push and pull.

    python -m tests.e2e.matrix [--pairwise] [--family F ...] [--mode M ...] [--out FILE] [--page FILE]

Real processes over real NIXL, on tiny random models in fp32. Two processes hold all engines, prefill ones and decode
ones, and start their rank processes; an engine lives as long as cells need it, and cells go through one by one.

A cell is right if decode's tokens are those of the same decode engine alone, every byte that was moved has the digest
of what prefill has (verify=all), decode found in its cache what it had to, and computed no prompt token beyond R32. The
output is JSON, one object per cell; cells that are in the file already, and were right, are not run again.
"""

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.worker import WorkerSettings
from kvferry.settings import FerrySettings, Role, TransferMode, TransferSettings, Verify
from tests.e2e.matrix_host import Answered, Ask, Close, Forget, Open, host
from tests.harness.forked import fork_context
from tests.harness.tiny_model import make_tiny_model

__all__ = ["Cell", "Matrix", "every_cell", "page", "pairwise", "run"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
        "sliding_window": 20,
        "query_pre_attn_scalar": 16,
    },
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "mamba": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "mamba", "attention"] * 2,
        "shared_intermediate_size": 160,
        "num_local_experts": 0,
        "mamba_n_heads": 6,
        "mamba_expand": 2,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    },
}
"""The changes with which `make_tiny_model` makes each family: heads that two ranks can share, layers for two stages."""
FAMILIES["llama-fp8"] = FAMILIES["llama"]
KV_DTYPES = {"llama-fp8": "fp8_e4m3_token"}
LEFT = {"mamba": 1}
"""The number of prompt tokens that decode computes itself, by R32."""
PREFILL = ("TP1", "TP2", "PP2", "TP2 PP2")
DECODE = ("TP1", "TP2", "PP2")
BLOCKS = ("16/16", "16/32", "32/16")
HITS = ("none", "partial", "full")
MODES = ("pull", "push")
PROMPT, SHARED, ANSWER = 96, 48, 8
"""Numbers of tokens: the prompt that is handed over; what decode has before a `partial` hit; the answer."""
CELL_S = 60.0
TITLES = {
    "llama": "Llama: full attention",
    "llama-fp8": "Llama with its keys and values in fp8, a scale a head and token in the block",
    "gemma3": "Gemma 3: windows and full attention, in groups that share pages",
    "mla": "DeepSeek-V2: MLA, experts",
    "mamba": "Granite 4: Mamba-2 and full attention, in groups that share pages",
}
PAGE_HEAD = """\
<!-- Made by `python -m tests.e2e.matrix --page docs/reference/pd-matrix.md`. Do not edit. -->
# The P/D matrix

Prefill and decode of the embedded engine in every shape: real processes over real NIXL, tiny random models in fp32
(tests/e2e/matrix.py). `make matrix` runs all of it, `make test` the part in which any two values of any two axes meet.
Right: {right} of {tried} cells.

A row is prefill's shape to decode's, a column the transfer mode and the tokens of a block on prefill / decode. A field
has three signs: decode has *nothing* of the prompt in its own prefix cache, *a part* ({shared} of {prompt} tokens, in
whole blocks), *all* of it.

`ok` says all of this:

* the {answer} tokens that decode answers are those that the same decode engine answers alone;
* the digest of every byte that was moved is prefill's (`--verify all`; it does not depend on layouts);
* decode took from its own cache exactly what it had, and was handed over the rest (R30);
* it computed no prompt token again (R36), but the last one where the model keeps a recurrent state (R32).

Prompts are longer than Gemma's window (20 tokens) and than a chunk of prefill (64 tokens). In push, a decode engine
that has *all* still wants the last block: it cannot know that prefill's first token will come.
"""


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    family: str
    mode: str
    prefill: str
    decode: str
    block_sizes: str
    hit: str


@dataclass(frozen=True)
class Result:
    """The result of one cell."""

    tokens_equal: bool
    digest_equal: bool | None
    """The cells that decode verified. None: decode had everything, and nothing was moved."""
    recomputed: int
    cached: int
    handed_over: int
    problem: str = ""

    @property
    def right(self) -> bool:
        """True if nothing is wrong with it."""
        return not self.problem


def every_cell() -> list[Cell]:
    """Returns the cells in an order in which engines can be reused."""
    axes = (FAMILIES, MODES, BLOCKS, PREFILL, DECODE, HITS)
    return [Cell(f, m, p, d, b, h) for f, m, b, p, d, h in itertools.product(*axes)]


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Returns few cells that cover every pair of values of any two axes, and that need few engines."""

    def pairs(cell: Cell) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(asdict(cell).items(), 2))

    def engines(cell: Cell) -> set[tuple[str, ...]]:
        blocks = cell.block_sizes.split("/")
        return {
            (cell.family, cell.mode, "p", cell.prefill, blocks[0]),
            (cell.family, cell.mode, "d", cell.decode, blocks[1]),
        }

    def processes(engine: tuple[str, ...]) -> int:
        return {"TP1": 0, "TP2": 2, "PP2": 2, "TP2 PP2": 4}[engine[3]] + 1

    missing = set().union(*(pairs(cell) for cell in cells))
    started: set[tuple[str, ...]] = set()
    chosen: list[Cell] = []
    while missing:
        best = max(
            cells,
            key=lambda cell: len(pairs(cell) & missing) / (2 + sum(map(processes, engines(cell) - started))),
        )
        chosen.append(best)
        started |= engines(best)
        missing -= pairs(best)
    return sorted(chosen, key=cells.index)


class Matrix:
    """Two processes: one for prefill engines, one for decode engines."""

    def __init__(self, directory: Path) -> None:
        """Makes models in `directory` when they are needed."""
        self._directory = directory
        context = fork_context()
        self._pipes, self._processes = {}, []
        for side in "pd":
            ours, theirs = context.Pipe()
            process = context.Process(target=host, args=(theirs,))
            process.start()
            theirs.close()
            self._pipes[side] = ours
            self._processes.append(process)
        self._addresses: dict[str, dict[str, Any]] = {}
        self._alone: dict[str, tuple[int, ...]] = {}
        self._number = 0

    def need(self, cells: Iterable[Cell]) -> None:
        """Ends the engines that none of these cells needs, and starts those that are missing, on both sides at once."""
        wanted = {key: settings for cell in cells for key, settings in self._engines(cell)}
        for key in [key for key in self._addresses if key not in wanted]:
            self._order(Close(key))
            del self._addresses[key]
            self._alone.pop(key, None)
        missing = [key for key in wanted if key not in self._addresses]
        for key in missing:
            self._pipes[key[0]].send(Open(key, wanted[key]))
        for key in missing:
            self._addresses[key] = self._receive(key[0], 300.0).address

    def run(self, cell: Cell) -> Result:
        """Runs one cell."""
        (p, _), (d, _) = self._engines(cell)
        left = LEFT.get(cell.family, 0)
        dice = random.Random(cell.family)
        prompt = tuple(dice.randint(3, 263) for _ in range(PROMPT + left))
        if d not in self._alone:
            self._order(Forget(d))
            self._alone[d] = self._ask(d, prompt, ANSWER).tokens
        self._order(Forget(p))
        self._order(Forget(d))
        if cell.hit != "none":
            self._ask(d, prompt if cell.hit == "full" else prompt[: SHARED + left], 1)
        return self._judge(cell, self._hand_over(cell, p, d, prompt), self._alone[d])

    def _judge(self, cell: Cell, found: Answered, alone: tuple[int, ...]) -> Result:
        block, left = int(cell.block_sizes.split("/")[1]), LEFT.get(cell.family, 0)
        cached = {"none": 0, "partial": SHARED // block * block, "full": PROMPT}[cell.hit]
        if cell.hit == "full" and cell.mode == "push" and not left:
            cached -= block  # it cannot know that prefill's first token will come, so it leaves one token to compute
        moved = found.handed_over > 0
        problems = [
            what
            for wrong, what in (
                (found.error is not None, f"error: {found.error}"),
                (found.tokens != alone, f"tokens {found.tokens}, alone {alone}"),
                (moved and not found.verified_cells, "nothing was held against prefill's digest"),
                (found.cached != cached, f"{found.cached} tokens were cached on decode, {cached} expected"),
                (found.recomputed != left, f"{found.recomputed} tokens were computed again: {found.why}"),
            )
            if wrong
        ]
        return Result(
            tokens_equal=found.tokens == alone,
            digest_equal=bool(found.verified_cells) if moved else None,
            recomputed=found.recomputed,
            cached=found.cached,
            handed_over=found.handed_over,
            problem="; ".join(problems),
        )

    def close(self) -> None:
        """Ends both processes and everything that they have started."""
        for pipe in self._pipes.values():
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self._processes:
            process.join(30.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _engines(self, cell: Cell) -> tuple[tuple[str, WorkerSettings], tuple[str, WorkerSettings]]:
        """Returns the names and settings of prefill's and decode's engine; a name begins with `p` or `d`."""
        model = self._directory / cell.family
        if not model.is_dir():
            make_tiny_model(model, "llama", **FAMILIES[cell.family])
        # Every byte that moves is verified; staging is off, so that runs are moved as they were planned.
        transfer = TransferSettings(mode=TransferMode(cell.mode), verify=Verify.ALL, deadline_s=30.0, staging_bytes=0)
        made = []
        for role, shape, block in zip(
            (Role.PREFILL, Role.DECODE), (cell.prefill, cell.decode), cell.block_sizes.split("/"), strict=True
        ):
            engine = EngineSettings(
                model=str(model), dtype="float32", num_blocks=96, block_tokens=int(block), max_batch_tokens=64,
                max_model_len=512, threads=1, kv_dtype=KV_DTYPES.get(cell.family, "auto"),
                tp=2 if "TP2" in shape else 1, pp=2 if "PP2" in shape else 1,
            )  # fmt: skip
            key = f"{role.value}-{cell.family}-{cell.mode}-{block}-{shape.replace(' ', '-')}"
            settings = WorkerSettings(
                engine=engine, ferry=FerrySettings(transfer=transfer), role=role, engine_id=key
            )  # fmt: skip
            made.append((key, settings))
        return made[0], made[1]

    def _hand_over(self, cell: Cell, p: str, d: str, prompt: tuple[int, ...]) -> Answered:
        self._number += 1
        transfer, name = f"t-{self._number}", f"r-{self._number}"
        self._pipes["p"].send(Ask(p, name, prompt, 1, {"do_remote_decode": True, "transfer_id": transfer}))
        if cell.mode == "push":
            handoff = {
                "do_remote_prefill": True, "transfer_mode": "push", "transfer_id": transfer, **self._addresses[p],
            }  # fmt: skip
            self._pipes["d"].send(Ask(d, name, prompt, ANSWER, handoff))
        prefilled = self._receive("p", CELL_S)
        if cell.mode == "pull":
            self._pipes["d"].send(Ask(d, name, prompt, ANSWER, prefilled.handoff))
        found: Answered = self._receive("d", CELL_S)
        return found

    def _ask(self, key: str, prompt: tuple[int, ...], max_tokens: int) -> Answered:
        self._number += 1
        found: Answered = self._order(Ask(key, f"r-{self._number}", prompt, max_tokens))
        return found

    def _order(self, order: Any) -> Any:
        self._pipes[order.key[0]].send(order)
        return self._receive(order.key[0], CELL_S)

    def _receive(self, side: str, within_s: float) -> Any:
        if not self._pipes[side].poll(within_s):
            raise TimeoutError(f"the {'prefill' if side == 'p' else 'decode'} process gave no answer in {within_s:g} s")
        return self._pipes[side].recv()


def run(cells: Sequence[Cell], directory: Path) -> Iterator[tuple[Cell, Result]]:
    """Runs cells in their order. After one that gets no answer, all processes are restarted."""
    matrix = None
    try:
        for _, same in itertools.groupby(cells, key=lambda c: (c.family, c.mode, c.block_sizes.split("/")[0])):
            todo = list(same)
            while todo:
                try:
                    if matrix is None:
                        matrix = Matrix(directory)
                    matrix.need(todo)
                    result = matrix.run(todo[0])
                except (TimeoutError, EOFError, OSError) as error:
                    if matrix is not None:
                        matrix.close()
                    matrix = None
                    result = Result(False, False, 0, 0, 0, f"no answer: {error!r}")
                yield todo.pop(0), result
    finally:
        if matrix is not None:
            matrix.close()


def page(lines: Iterable[dict[str, Any]]) -> str:
    """docs/reference/pd-matrix.md: a table per family, a row for the shapes of both sides, a column for mode and block
    sizes; in each field a sign for each prefix hit."""
    found = {tuple(line[axis] for axis in Cell.__dataclass_fields__): line for line in lines}
    right = sum(not line["problem"] for line in found.values())
    columns = list(itertools.product(MODES, BLOCKS))
    text = [
        PAGE_HEAD.format(right=right, tried=len(found), prompt=PROMPT, shared=SHARED, answer=ANSWER),
        "| | " + " | ".join(f"{mode} {blocks}" for mode, blocks in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for family in dict.fromkeys(key[0] for key in found):
        text.append(f"| **{TITLES[family]}** |" + " |" * len(columns))
        for prefill, decode in itertools.product(PREFILL, DECODE):
            row = []
            for mode, blocks in columns:
                cells = [found.get((family, mode, prefill, decode, blocks, hit)) for hit in HITS]
                row.append(" ".join("-" if cell is None else "ok" if not cell["problem"] else "NO" for cell in cells))
            text.append(f"| {prefill} to {decode} | " + " | ".join(row) + " |")
    return "\n".join(text) + "\n"


def main() -> int:
    """Runs what the module describes."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--pairwise", action="store_true", help="only cells that cover all pairs of values")
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--out", type=Path, default=Path("out/matrix.jsonl"), help="results; right ones are kept")
    parser.add_argument("--page", type=Path, help="run nothing: write what --out has to this Markdown file")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.page is not None:
        args.page.write_text(page(lines))
        return 0
    done = {tuple(line[axis] for axis in Cell.__dataclass_fields__) for line in lines if not line["problem"]}
    cells = [
        cell
        for cell in (pairwise(every_cell()) if args.pairwise else every_cell())
        if (not args.family or cell.family in args.family) and (not args.mode or cell.mode in args.mode)
    ]
    todo = [cell for cell in cells if tuple(asdict(cell).values()) not in done]
    sys.stderr.write(f"{len(todo)} cells to run, {len(cells) - len(todo)} are there\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # else it logs each engine that was ended between cells
    began_s, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as directory, args.out.open("a") as file:
        for number, (cell, result) in enumerate(run(todo, Path(directory)), 1):
            file.write(json.dumps({**asdict(cell), **asdict(result)}) + "\n")
            file.flush()
            wrong += not result.right
            spent_s = time.monotonic() - began_s
            left_s = spent_s / number * (len(todo) - number)
            note = "" if result.right else f"  WRONG: {result.problem}"
            where = " | ".join(asdict(cell).values())
            sys.stderr.write(f"{number}/{len(todo)} {spent_s:.0f} s, {left_s:.0f} s left: {where}{note}\n")
    sys.stderr.write(f"{len(todo) - wrong} right, {wrong} wrong, {time.monotonic() - began_s:.0f} s\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
