"""The fleet as `kvferry doctor URL...` shows it: the matrix of every prefill against every decode worker."""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvferry.cli.compare import print_rows
from kvferry.cli.main import ExitCode
from kvferry.cli.support.terminal import Terminal
from kvferry.cli.support.worker_description import Told, layout_problem, load_told
from kvferry.errors import FerryError
from kvferry.handshake.fleet_verdict import Cell, fleet_matrix, shared_ids
from kvferry.handshake.verdict import VerdictKind

__all__ = ["run_fleet"]

_MARKS = {VerdictKind.COMPATIBLE: "ok", VerdictKind.NOTES: "ok*", VerdictKind.REFUSED: "NO"}
_COLOURS = {VerdictKind.COMPATIBLE: "green", VerdictKind.NOTES: "yellow", VerdictKind.REFUSED: "red"}
_CORNER = "prefill \\ decode"


def run_fleet(urls: Sequence[str], as_json: bool) -> ExitCode:
    """Ask every worker (side by side), and show every pair. 0: all fit; 3: a pair does not; 4: a worker is silent."""
    told: list[Told] = []
    silent: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=min(32, len(urls))) as pool:
        for url, answer in zip(urls, pool.map(_ask, urls), strict=True):
            if isinstance(answer, Told):
                told.append(answer)
            else:
                silent[url] = str(answer)
    members = [one.member for one in told]
    by_name = {one.member.name: one for one in told}
    cells = fleet_matrix(members)
    problems = {
        (cell.prefill.name, cell.decode.name): problem
        for cell in cells
        if not cell.verdict.refused
        and (problem := layout_problem(by_name[cell.prefill.name], by_name[cell.decode.name])) is not None
    }
    doubles = shared_ids(members)
    refused = any(_kind(cell, problems) is VerdictKind.REFUSED for cell in cells)
    code = ExitCode.UNREACHABLE if silent else ExitCode.INCOMPATIBLE if refused or doubles else ExitCode.OK
    if as_json:
        _print_json(cells, problems, silent, doubles, code)
    else:
        _print_text(cells, problems, silent, doubles)
    return code


def _ask(url: str) -> Told | FerryError:
    try:
        return load_told(url)
    except FerryError as error:
        return error


_Problems = dict[tuple[str, str], str]


def _kind(cell: Cell, problems: _Problems) -> VerdictKind:
    return VerdictKind.REFUSED if (cell.prefill.name, cell.decode.name) in problems else cell.verdict.kind


def _print_json(
    cells: Sequence[Cell], problems: _Problems, silent: dict[str, str], doubles: Sequence[str], code: ExitCode
) -> None:
    for cell in cells:
        pair = (cell.prefill.name, cell.decode.name)
        told = cell.verdict.to_json() | {"verdict": str(_kind(cell, problems)), "layout": problems.get(pair)}
        print(json.dumps({"prefill": pair[0], "decode": pair[1], **told}))
    for url, error in silent.items():
        print(json.dumps({"url": url, "error": error}))
    kinds = [_kind(cell, problems) for cell in cells]
    summary = {
        "pairs": len(cells),
        "refused": kinds.count(VerdictKind.REFUSED),
        "unreachable": len(silent),
        "shared_ids": list(doubles),
        "exit": int(code),
    }
    print(json.dumps(summary))


def _print_text(cells: Sequence[Cell], problems: _Problems, silent: dict[str, str], doubles: Sequence[str]) -> None:
    terminal = Terminal(sys.stdout)
    _print_matrix(terminal, cells, problems)
    for cell in cells:
        pair = (cell.prefill.name, cell.decode.name)
        if cell.verdict.kind is VerdictKind.COMPATIBLE and pair not in problems:
            continue
        terminal.line()
        terminal.line(f"prefill {pair[0]}, decode {pair[1]}: {_kind(cell, problems)}")
        rows = cell.verdict.blocking() if cell.verdict.refused else cell.verdict.rows
        print_rows(terminal, rows, "prefill", "decode")
        if pair in problems:
            terminal.line(f"  {terminal.paint('layout', 'red')}: {problems[pair]}")
    for text in doubles:
        terminal.line(terminal.paint(text, "red"))
    for error in silent.values():
        terminal.line(terminal.paint(error, "red"))


def _print_matrix(terminal: Terminal, cells: Sequence[Cell], problems: _Problems) -> None:
    """Prefill workers down, decode workers across; an engine with itself is a dash."""
    marks = {(cell.prefill.name, cell.decode.name): _kind(cell, problems) for cell in cells}
    prefills = list(dict.fromkeys(name for name, _ in marks))
    decodes = list(dict.fromkeys(name for _, name in marks))
    if not marks:
        terminal.line("no pair of a prefill and a decode worker is here")
        return
    width = max(len(name) for name in (*prefills, _CORNER))
    columns = [max(len(name), 3) for name in decodes]
    head = "  ".join(name.ljust(column) for name, column in zip(decodes, columns, strict=True))
    terminal.line(terminal.paint(f"{_CORNER.ljust(width)}  {head}", "bold"))
    for prefill in prefills:
        line = []
        for decode, column in zip(decodes, columns, strict=True):
            kind = marks.get((prefill, decode))
            text = ("-" if kind is None else _MARKS[kind]).ljust(column)
            line.append(text if kind is None else terminal.paint(text, _COLOURS[kind]))
        terminal.line(f"{prefill.ljust(width)}  {'  '.join(line)}")
    if VerdictKind.NOTES in marks.values():
        terminal.line(terminal.paint("* what differs is bridged", "dim"))
