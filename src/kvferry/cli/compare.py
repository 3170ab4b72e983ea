"""`kvferry compare A B`: may these two workers share a cache, and if not: which fact, which side, what to type."""

import argparse
import json
import sys

from kvferry.cli.main import ExitCode
from kvferry.cli.support.terminal import Terminal
from kvferry.cli.support.worker_description import Told, layout_problem, load_told
from kvferry.handshake.fact import FactKind
from kvferry.handshake.values import FactValue
from kvferry.handshake.verdict import Row, Verdict, VerdictKind, show, verdict

__all__ = ["add_arguments", "print_rows", "run"]

_COLOURS = {FactKind.MUST_MATCH: "red", FactKind.BRIDGED: "yellow", FactKind.INFORMATIVE: "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two sides, in any order."""
    parser.add_argument("a", metavar="A", help="a worker's URL, or a file that `kvferry facts` saved")
    parser.add_argument("b", metavar="B", help="the other side")
    parser.add_argument("--strict", action="store_true", help="as if one of them ran with --strict")
    parser.add_argument("--json", action="store_true", help="one object: verdict, and a row for each fact that differs")


def run(args: argparse.Namespace) -> ExitCode:
    """0: compatible, with or without notes. 3: refused."""
    a, b = load_told(args.a), load_told(args.b)
    answer = verdict(a.facts, b.facts, strict=args.strict)
    problem = None if answer.refused else layout_problem(a, b)
    kind = VerdictKind.REFUSED if problem else answer.kind
    if args.json:
        print(json.dumps(_as_json(answer, kind, problem)))
    else:
        _print(Terminal(sys.stdout), a, b, answer, problem)
    return ExitCode.INCOMPATIBLE if kind is VerdictKind.REFUSED else ExitCode.OK


def _as_json(answer: Verdict, kind: VerdictKind, problem: str | None) -> dict[str, object]:
    told = answer.to_json()
    rows = told["rows"]
    assert isinstance(rows, list), "to_json gives a list of rows"
    if problem:
        layout = {"fact": "layout", "class": str(FactKind.MUST_MATCH), "a": None, "b": None, "remedy": problem}
        rows = [*rows, layout]
    return {"verdict": str(kind), "rows": rows}


def _print(terminal: Terminal, a: Told, b: Told, answer: Verdict, problem: str | None) -> None:
    terminal.line(f"a: {a.member.name} ({a.member.role})")
    terminal.line(f"b: {b.member.name} ({b.member.role})")
    print_rows(terminal, answer.rows)
    if problem:
        terminal.line(f"  {terminal.paint('layout', 'red')}: {problem}")
    if problem or answer.refused:
        terminal.line(terminal.paint("refused: they cannot share a cache", "red"))
    elif answer.kind is VerdictKind.NOTES:
        terminal.line(terminal.paint("compatible; what differs is bridged", "yellow"))
    else:
        terminal.line(terminal.paint("compatible", "green"))


def print_rows(terminal: Terminal, rows: tuple[Row, ...], a: str = "a", b: str = "b") -> None:
    """A table: what must match first, then what is bridged, then what is only shown."""
    if not rows:
        return
    ordered = sorted(rows, key=lambda row: list(FactKind).index(row.kind))
    cells = [(row.fact, str(row.kind), _short(row.a), _short(row.b)) for row in ordered]
    head = ("fact", "class", a, b)
    widths = [max(len(line[column]) for line in (head, *cells)) for column in range(len(head))]

    def aligned(line: tuple[str, ...]) -> str:
        return "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))

    terminal.line("  " + terminal.paint(f"{aligned(head)}  what to do", "bold"))
    for row, line in zip(ordered, cells, strict=True):
        terminal.line("  " + terminal.paint(aligned(line), _COLOURS[row.kind]) + f"  {row.remedy(a, b)}")


def _short(value: FactValue) -> str:
    text = show(value)
    return text if len(text) <= 32 else f"{text[:29]}..."
