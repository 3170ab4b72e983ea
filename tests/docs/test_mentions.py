"""What code and pages mention exists: rules by number, and files of the repository."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.harness.repository import ROOT

RULES = ROOT / "docs" / "reference" / "rules.md"
ROOMS = ("src", "models", "tests", "benchmarks", "examples", "training", "docs")
NEVER = re.compile(r"(?<![\w-])(?:spec|design|mobility|house|peers|faults|vllm_contract|docs_walk)\.md\b|\bshared/\w")
ELSEWHERE = {"argparse.py", "api_server.py", "_api.py", "_bindings.py", "contributing.md", "changelog.md"}
"""Files of other projects, and pages that exist only on the site."""


def texts() -> dict[str, str]:
    """Returns every Python file and page of the repository, by its path."""
    found = [path for room in ROOMS for suffix in ("*.py", "*.md") for path in (ROOT / room).rglob(suffix)]
    found += ROOT.glob("*.md")
    return {str(path.relative_to(ROOT)): path.read_text() for path in found if path != Path(__file__)}


TEXTS = texts()


def test_every_rule_that_is_named_is_on_the_rules_page() -> None:
    known = set(re.findall(r"(?m)^### ([RI]\d+)$", RULES.read_text()))
    assert len(known) >= 37 + 6
    missing = {
        f"{path}: {rule}" for path, text in TEXTS.items() for rule in re.findall(r"\b(?:R\d+|I[1-9])\b", text)
        if rule not in known
    }  # fmt: skip
    assert not missing


def test_no_file_is_named_that_is_not_in_the_repository() -> None:
    named = {f"{path}: {match[0]}" for path, text in TEXTS.items() for match in NEVER.finditer(text)}
    assert not named


@pytest.mark.parametrize(
    "room", ["src", "docs", "models", "benchmarks", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
)
def test_pages_and_modules_that_are_named_exist(room: str) -> None:
    """A name in text, such as `handoff/leases.py` or `metrics.md`, is the end of the path of some file here."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    files = {f"/{path}" for path in listed} | {f"/{path}" for path in TEXTS}
    ends = {path[i:] for path in files for i in range(len(path)) if path[i] == "/"}
    named = re.compile(r"(?<![\w./:-])((?:[\w-]+/)*[\w-]+\.(?:md|py))\b(?!\.)")
    missing = {
        f"{path}: {name}"
        for path, text in TEXTS.items()
        if path == room or path.startswith(f"{room}/")
        for name in named.findall(text)
        if f"/{name}" not in ends and name not in ELSEWHERE and "NAME" not in name
    }
    assert not missing
