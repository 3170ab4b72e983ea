"""Prints a table of line and branch coverage, one row per room: `make coverage`."""

import argparse
import json
from collections import defaultdict
from pathlib import Path


def room(path: str) -> str:
    """Returns the room that a file of src/kvferry belongs to, for example `engines/mini/cache`."""
    parts = Path(path).parts
    parts = parts[parts.index("kvferry") + 1 : -1]
    depth = 3 if parts[:1] == ("engines",) else 2
    return "/".join(parts[:depth]) or "(ground floor)"


def table(report: dict[str, dict[str, dict[str, dict[str, int]]]]) -> list[str]:
    """Returns the lines of the table for a report of `coverage json`."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path, entry in report["files"].items():
        found = entry["summary"]
        for name in (room(path), "all"):
            for i, key in enumerate(("num_statements", "covered_lines", "num_branches", "covered_branches")):
                sums[name][i] += found[key]
    lines = [f"{'room':<36} {'lines':>7} {'covered':>8} {'branches':>9} {'covered':>8}"]
    for name in [*sorted(sums.keys() - {"all"}), "all"]:
        num_lines, lines_hit, num_branches, branches_hit = sums[name]
        if not num_lines:
            continue
        lines.append(
            f"{name:<36} {num_lines:>7} {_percent(lines_hit, num_lines):>8} {num_branches:>9} "
            f"{_percent(branches_hit, num_branches):>8}"
        )
    return lines


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="the file that `coverage json` wrote")
    print("\n".join(table(json.loads(parser.parse_args().report.read_text()))))


if __name__ == "__main__":
    main()
