"""The rows of `kvferry plan`, and their table."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.cli.support.terminal import Terminal, size

__all__ = ["Row", "show_table", "tidy_layers"]


@dataclass(frozen=True, slots=True)
class Row:
    """One edge: what one source rank gives to one destination rank."""

    source_rank: int
    destination_rank: int
    layers: tuple[str, ...]
    """Names, with ranges: layers.0-79.attn."""
    parts: tuple[str, ...]
    heads: tuple[str, ...]
    runs: int
    bytes: int
    how: str
    """`direct` or `staged`."""
    predicted_ms: float
    direct_ms: float
    staged_ms: float


def tidy_layers(names: Iterable[str]) -> list[str]:
    """Returns the names of layers, with consecutive numbers drawn together to ranges."""
    found: dict[tuple[str, str], list[int]] = {}
    plain: list[str] = []
    for name in names:
        match = re.fullmatch(r"(\D*)(\d+)(\D.*|)", name)
        if match:
            found.setdefault((match[1], match[3]), []).append(int(match[2]))
        else:
            plain.append(name)
    for (before, after), numbers in found.items():
        numbers.sort()
        first = last = numbers[0]
        for number in [*numbers[1:], -1]:
            if number == last + 1:
                last = number
                continue
            plain.append(f"{before}{first}{after}" if first == last else f"{before}{first}-{last}{after}")
            first = last = number
    return plain


def show_table(terminal: Terminal, rows: Sequence[Row]) -> None:
    """Prints one line per edge."""
    head = ("from", "to", "layers", "parts", "heads", "runs", "bytes/run", "size", "how", "ms")
    cells = [
        (
            f"{row.source_rank}",
            f"{row.destination_rank}",
            " ".join(row.layers),
            " ".join(row.parts),
            " ".join(row.heads) or "-",
            f"{row.runs}",
            f"{row.bytes // row.runs if row.runs else 0}",
            size(row.bytes),
            row.how,
            f"{row.predicted_ms:.2f}",
        )
        for row in rows
    ]
    terminal.table(head, cells, right="from to runs bytes/run size ms")
