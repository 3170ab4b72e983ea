"""The fragments in changes/ are well-formed, and towncrier makes a section of the changelog from them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.repository import ROOT

FOLDER = ROOT / "changes"
KINDS = ("feature", "change", "fix", "removal", "wire")
NOT_FRAGMENTS = {"README.md", "template.md"}
FRAGMENTS = sorted(path for path in FOLDER.iterdir() if path.name not in NOT_FRAGMENTS)


def fault(name: str, text: str) -> str | None:
    """Returns what is wrong with a fragment, or None."""
    if not re.fullmatch(rf"(\d+|\+[a-z0-9-]+)\.({'|'.join(KINDS)})(\.\d+)?\.md", name):
        return f"its name is not ISSUE.KIND.md or +WORDS.KIND.md with one of the kinds {', '.join(KINDS)}"
    lines = text.split("\n")
    if len(lines) != 2 or lines[1]:
        return "it is not one line that ends with a newline"
    if not lines[0][:1].isupper() and not lines[0].startswith("`"):
        return "it does not begin with a capital letter or with code"
    if not lines[0].endswith((".", ")")):
        return "it does not end with a full stop"
    return None


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.name)
def test_fragments_are_sentences_under_a_known_name(path: Path) -> None:
    problem = fault(path.name, path.read_text())
    assert problem is None, f"changes/{path.name}: {problem}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("13.feat.md", "Good.\n"),
        ("notes.md", "Good.\n"),
        ("13.fix.md", "Two\nlines.\n"),
        ("13.fix.md", "no capital.\n"),
        ("13.fix.md", "No full stop\n"),
    ],
)
def test_a_bad_fragment_is_found(name: str, text: str) -> None:
    assert fault(name, text) is not None


def test_the_kinds_are_those_of_pyproject() -> None:
    assert (
        tuple(re.findall(r'\[\[tool\.towncrier\.type\]\]\ndirectory = "(\w+)"', (ROOT / "pyproject.toml").read_text()))
        == KINDS
    )


def test_towncrier_makes_a_section_of_them() -> None:
    pytest.importorskip("towncrier", reason="make setup installs it")
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9", "--date", "2100-01-01"]
    section = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert section.startswith("## 9.9.9 (2100-01-01)\n")
    for path in FRAGMENTS:
        assert path.read_text().strip() in section


def test_the_changelog_has_the_place_where_releases_go() -> None:
    assert (ROOT / "CHANGELOG.md").read_text().count("<!-- new releases go below this line -->\n") == 1
