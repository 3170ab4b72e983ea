"""The fleet as `kvferry doctor URL...` shows it: the matrix of every prefill against every decode worker."""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvferry.cli.compare import print_rows
from kvferry.cli.main import ExitCode
from kvferry.cli.support.terminal import Line, Terminal, styled
from kvferry.cli.support.worker_description import (
    WorkerDescription,
    fetch,
    is_url,
    layout_problem,
    load_description,
    parse,
    workers_of_router,
)
from kvferry.errors import FerryError
from kvferry.handshake.fleet_verdict import Cell, fleet_matrix, shared_ids
from kvferry.handshake.verdict import VerdictKind

__all__ = ["run_fleet"]

_MARKS = {VerdictKind.COMPATIBLE: "ok", VerdictKind.NOTES: "ok*", VerdictKind.REFUSED: "NO"}
_COLOURS = {VerdictKind.COMPATIBLE: "green", VerdictKind.NOTES: "yellow", VerdictKind.REFUSED: "red"}
_CORNER = "prefill \\ decode"


def run_fleet(urls: Sequence[str], as_json: bool) -> ExitCode:
    """Asks every worker, side by side, and shows every pair. A router stands for the workers of its fleet.

    0: all fit; 1: there is no pair; 3: a pair does not fit, or two engines share an id; 4: a worker does not answer.
    """
    described, silent = _ask_all(urls)
    members = [one.member for one in described]
    by_name = {one.member.name: one for one in described}
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
    if code is ExitCode.OK and not cells:
        code = ExitCode.ERROR
    if as_json:
        _print_json(cells, problems, silent, doubles, code)
    else:
        _print_text(cells, problems, silent, doubles)
    return code


def _ask_all(urls: Sequence[str]) -> tuple[list[WorkerDescription], dict[str, str]]:
    """Returns the workers that answer, and why the others do not. A router that is met is replaced by its workers."""
    described: list[WorkerDescription] = []
    silent: dict[str, str] = {}
    waiting, asked = list(dict.fromkeys(urls)), set[str]()
    with ThreadPoolExecutor(max_workers=32) as pool:
        while waiting:
            asked.update(waiting)
            found: list[str] = []
            for url, answer in zip(waiting, pool.map(_ask, waiting), strict=True):
                if isinstance(answer, WorkerDescription):
                    described.append(answer)
                elif isinstance(answer, tuple):
                    found += answer
                else:
                    silent[url] = str(answer)
            waiting = [url for url in dict.fromkeys(found) if url not in asked]
    return described, silent


def _ask(name: str) -> WorkerDescription | tuple[str, ...] | FerryError:
    """Returns the worker at this place, the workers of a router, or why there is neither."""
    try:
        if not is_url(name):
            return load_description(name)
        body = fetch(name)
        workers = workers_of_router(body)
        return parse(name, body) if workers is None else workers
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
        verdict = cell.verdict.to_json() | {"verdict": str(_kind(cell, problems)), "layout": problems.get(pair)}
        print(json.dumps({"prefill": pair[0], "decode": pair[1], **verdict}))
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
            terminal.line("  ", ("layout", "red"), f": {problems[pair]}")
    for text in (*doubles, *silent.values()):
        terminal.line((text, "red"))


def _print_matrix(terminal: Terminal, cells: Sequence[Cell], problems: _Problems) -> None:
    """Prints prefill workers down and decode workers across; an engine paired with itself is a dash."""
    kinds = {(cell.prefill.name, cell.decode.name): _kind(cell, problems) for cell in cells}
    prefills = list(dict.fromkeys(name for name, _ in kinds))
    decodes = list(dict.fromkeys(name for _, name in kinds))
    if not kinds:
        terminal.line("there is no pair here: give the URLs of a prefill and a decode worker, or of a router")
        return
    rows: list[tuple[Line, ...]] = []
    for prefill in prefills:
        found = [kinds.get((prefill, decode)) for decode in decodes]
        rows.append((prefill, *(styled("-" if kind is None else (_MARKS[kind], _COLOURS[kind])) for kind in found)))
    terminal.table((_CORNER, *decodes), rows)
    if VerdictKind.NOTES in kinds.values():
        terminal.line(("* what differs is bridged", "dim"))
