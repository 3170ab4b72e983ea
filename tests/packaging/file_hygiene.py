"""A hook before commits: checks the ends of files, trailing space, conflict markers and sizes. It changes nothing.

`python -m tests.packaging.file_hygiene FILE...` prints one line per fault, and exits with 1 if there is one.
"""

import sys
from pathlib import Path

MAX_BYTES = 500_000
MARKERS = ("<" * 7 + " ", ">" * 7 + " ")


def faults(path: Path) -> list[str]:
    """Returns what is wrong with one file."""
    content = path.read_bytes()
    if len(content) > MAX_BYTES:
        return [f"{path}: {len(content):,} bytes, and at most {MAX_BYTES:,} are committed"]
    if b"\0" in content or not content:
        return []
    text = content.decode(errors="replace")
    found = []
    if not text.endswith("\n") or text.endswith("\n\n"):
        found.append(f"{path}: does not end with exactly one newline")
    for number, line in enumerate(text.split("\n"), 1):
        if line != line.rstrip():
            found.append(f"{path}:{number}: trailing space")
        if line.startswith(MARKERS):
            found.append(f"{path}:{number}: a conflict marker")
    return found


def main(names: list[str]) -> int:
    """Prints the faults of all files."""
    found = [fault for name in names for fault in faults(Path(name))]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
