"""What the commands show to people: lines, tables and progress, by rich.

On a terminal there is colour and a line that redraws itself. When the output is piped, or NO_COLOR is set, or the
terminal is dumb, the same text comes as plain lines: no escape sequence, and no line is cut or wrapped.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

__all__ = ["Bar", "Line", "Terminal", "plural", "size", "styled"]

Line = str | Text
"""Text, or text with styles: see `styled`."""

_PLAIN_WIDTH = 100_000
"""Columns where lines are never wrapped."""
_NAMES = ("cyan", "yellow", "blue", "green")


def styled(*parts: str | tuple[str, str] | Text) -> Text:
    """Joins parts to one text. A part is plain, or a pair of the text and its style (a rich style, as "bold red")."""
    return Text.assemble(*parts)


class Terminal:
    """Writes to one stream. Safe to call from any thread."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: standard error if none is given."""
        stream = stream or sys.stderr
        self._fancy = stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._console = Console(
            file=stream,
            force_terminal=self._fancy,
            force_jupyter=False,
            no_color=not self._fancy,
            width=None if self._fancy else _PLAIN_WIDTH,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
        )
        self._names: dict[str, str] = {}

    def line(self, *parts: str | tuple[str, str] | Text) -> None:
        """Writes a line; the parts are those of `styled`."""
        self._console.print(styled(*parts))

    def write(self, text: str) -> None:
        """Writes text as it comes, without the end of a line."""
        self._console.out(text, end="", highlight=False)
        self._console.file.flush()

    def note(self, text: str) -> None:
        """Says what is going on."""
        self.line((f"kvferry: {text}", "dim"))

    def error(self, text: str) -> None:
        """Says what went wrong."""
        self.line((f"kvferry: {text}", "red"))

    def step(self, what: str, detail: str, after_s: float) -> None:
        """Says that a step is done, and after how many seconds."""
        self.line("  ", ("ok", "green"), f"  {what:<18} ", (f"{after_s:5.1f} s  {detail}", "dim"))

    def log_line(self, name: str, text: str) -> None:
        """Passes on a line of a child's log, with the child's name before it."""
        colour = self._names.setdefault(name, _NAMES[len(self._names) % len(_NAMES)])
        self.line((f"[{name}]", colour), f" {text}")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Line]], *, right: str = "", indent: int = 0) -> None:
        """Writes rows beneath their heads, in columns.

        `right` names the heads of the columns that are aligned to the right, separated by spaces. On a terminal a cell
        that does not fit is wrapped inside its column.
        """
        if self._fancy:
            self._console.print(_rich_table(head, rows, right.split(), indent), soft_wrap=False)
            return
        cells = [[str(cell) for cell in row] for row in (head, *rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
        for row in cells:
            aligned = (
                cell.rjust(width) if name in right.split() else cell.ljust(width)
                for cell, width, name in zip(row, widths, head, strict=True)
            )
            self.line((" " * indent + "  ".join(aligned)).rstrip())

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Shows a spinner and the seconds for as long as the context lasts; without a terminal, a line at its start."""
        if not self._fancy:
            self.line(f"  ..  {what}")
            yield
            return
        columns = (TextColumn(" "), SpinnerColumn("line"), TextColumn("  {task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            progress.add_task(what, total=None)
            yield

    def bar(self) -> "Bar | None":
        """Returns a bar for work whose size is known, or None without a terminal, where a log says how far it is."""
        return Bar(self._console) if self._fancy else None

    @contextlib.contextmanager
    def counting(self, unit: str) -> Iterator[Callable[[int, float], None]]:
        """Shows a count on a terminal, and nothing elsewhere; gives a function of the count and the seconds."""
        if not self._fancy:
            yield lambda count, seconds: None
            return
        columns = (SpinnerColumn("line"), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(f"0 {unit}", total=None)
            yield lambda count, seconds: progress.update(task, description=f"{count:,} {unit}")


class Bar:
    """A bar that appears with the first `update`, and goes with `end`; then it can be used again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None

    def update(self, what: str, num_bytes: int, total_bytes: int) -> None:
        """Shows that this many of the bytes are done."""
        if self._progress is None:
            columns = (TextColumn("  {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(what)
            self._progress.start()
        task = self._progress.tasks[0].id
        self._progress.update(task, description=what, completed=min(num_bytes, total_bytes), total=total_bytes)

    def end(self) -> None:
        """Takes the bar from the screen. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _rich_table(head: Sequence[str], rows: Sequence[Sequence[Line]], right: Sequence[str], indent: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    if indent:
        table.add_column("", width=indent - 2, no_wrap=True)
    for name in head:
        table.add_column(Text(name), justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*([""] if indent else []), *row)
    return table


def plural(count: int, noun: str) -> str:
    """Returns "1 edge", "2 edges", "1,200 edges"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def size(num_bytes: float) -> str:
    """Returns bytes in the unit that fits: "640 B", "12.5 KiB", "3 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
