"""The table of `kvferry plan`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Row", "table", "tidy_layers"]


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
    """direct or staged."""
    predicted_ms: float
    direct_ms: float
    staged_ms: float


def tidy_layers(names: Iterable[str]) -> list[str]:
    """Layer names with runs of numbers drawn together."""
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


def table(rows: Sequence[Row]) -> str:
    """Plain text, a line an edge."""
    head = ("from", "to", "layers", "parts", "heads", "runs", "bytes/run", "bytes", "how", "ms")
    lines = [
        (
            f"{row.source_rank}",
            f"{row.destination_rank}",
            " ".join(row.layers),
            " ".join(row.parts),
            " ".join(row.heads) or "-",
            f"{row.runs}",
            f"{row.bytes // row.runs if row.runs else 0}",
            f"{row.bytes}",
            row.how,
            f"{row.predicted_ms:.2f}",
        )
        for row in rows
    ]
    widths = [max(len(cells[i]) for cells in (head, *lines)) for i in range(len(head))]
    left = {2, 3, 4, 8}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in (head, *lines)
    )
