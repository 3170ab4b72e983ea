"""`kvferry compare A B`: says whether two workers can share a cache, or which fact differs and what to type."""

import argparse
import json
import sys

from kvferry.cli.main import ExitCode
from kvferry.cli.support.shape_flags import add_shape_flags, shapes
from kvferry.cli.support.terminal import Terminal, styled
from kvferry.cli.support.worker_description import WorkerDescription, layout_problem, load_description
from kvferry.handshake.fact import FactKind
from kvferry.handshake.values import FactValue
from kvferry.handshake.verdict import Row, Verdict, VerdictKind, show, verdict
from kvferry.settings import Role
from kvferry.web.records import Limits

__all__ = ["add_arguments", "print_rows", "run"]

_COLOURS = {FactKind.MUST_MATCH: "red", FactKind.BRIDGED: "yellow", FactKind.INFORMATIVE: "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the two sides, in any order, and the flags."""
    parser.add_argument(
        "a", metavar="A", help="a worker's URL, a file that `kvferry facts` saved, or a model (as the prefill worker)"
    )
    parser.add_argument("b", metavar="B", help="the other side; a model is the decode worker")
    parser.add_argument("--strict", action="store_true", help="compare as if one of them ran with --strict")
    parser.add_argument("--json", action="store_true", help="print one object: the verdict, and each fact that differs")
    add_shape_flags(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Compares and prints. 0: compatible, with or without notes. 3: refused."""
    shape_a, shape_b = shapes(args)
    a, b = load_description(args.a, shape_a, Role.PREFILL), load_description(args.b, shape_b, Role.DECODE)
    answer = verdict(a.facts, b.facts, strict=args.strict)
    problem = None if answer.refused else layout_problem(a, b)
    kind = VerdictKind.REFUSED if problem else answer.kind
    if args.json:
        print(json.dumps(_as_json(answer, kind, problem) | {"longest_request": _longest(a, b)}))
    else:
        _print(Terminal(sys.stdout), a, b, answer, problem)
    return ExitCode.INCOMPATIBLE if kind is VerdictKind.REFUSED else ExitCode.OK


def _as_json(answer: Verdict, kind: VerdictKind, problem: str | None) -> dict[str, object]:
    rows = answer.to_json()["rows"]
    assert isinstance(rows, list), "to_json gives a list of rows"
    if problem:
        layout = {"fact": "layout", "class": str(FactKind.MUST_MATCH), "a": None, "b": None, "remedy": problem}
        rows = [*rows, layout]
    return {"verdict": str(kind), "rows": rows}


def _print(
    terminal: Terminal, a: WorkerDescription, b: WorkerDescription, answer: Verdict, problem: str | None
) -> None:
    terminal.line(f"a: {a.member.name} ({a.member.role})")
    terminal.line(f"b: {b.member.name} ({b.member.role})")
    print_rows(terminal, answer.rows)
    if problem:
        terminal.line("  ", ("layout", "red"), f": {problem}")
    if (limit := _limit(a, b)) is not None:
        terminal.line(limit)
    if problem or answer.refused:
        terminal.line(("refused: they cannot share a cache", "red"))
    elif answer.kind is VerdictKind.NOTES:
        terminal.line(("compatible; what differs is bridged", "yellow"))
    else:
        terminal.line(("compatible", "green"))


def _longest(a: WorkerDescription, b: WorkerDescription) -> dict[str, int | None]:
    """Returns the most tokens of a prompt and its answer that each side takes, and that both take. None: not known."""
    sides = {"a": a.limits.longest_request or None, "b": b.limits.longest_request or None}
    known = [tokens for tokens in sides.values() if tokens is not None]
    return sides | {"pair": min(known) if len(known) == len(sides) else None}


def _limit(a: WorkerDescription, b: WorkerDescription) -> str | None:
    """Describes the longest request of the pair, and what limits each side; None if one side does not report it."""
    pair = _longest(a, b)["pair"]
    if pair is None:
        return None
    sides = ", ".join(
        f"{name} {limits.longest_request:,} ({_limited_by(limits)})"
        for name, limits in (("a", a.limits), ("b", b.limits))
    )
    return f"longest prompt with its answer: {pair:,} tokens; {sides}"


def _limited_by(limits: Limits) -> str:
    if limits.longest_request < limits.max_model_len:
        return f"its cache: --num-blocks or --cache-gb; --max-model-len is {limits.max_model_len:,}"
    return "--max-model-len"


def print_rows(terminal: Terminal, rows: tuple[Row, ...], a: str = "a", b: str = "b") -> None:
    """Prints a table of facts: those that must match first, then those that are bridged or only shown."""
    if not rows:
        return
    ordered = sorted(rows, key=lambda row: list(FactKind).index(row.kind))
    cells = [
        (row.fact, styled((str(row.kind), _COLOURS[row.kind])), _short(row.a), _short(row.b), row.remedy(a, b))
        for row in ordered
    ]
    terminal.table(("fact", "class", a, b, "what to do"), cells, indent=2)


def _short(value: FactValue) -> str:
    text = show(value)
    return text if len(text) <= 32 else f"{text[:29]}..."
