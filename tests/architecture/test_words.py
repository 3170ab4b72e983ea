"""Words that a reader stumbles over do not come back: each has a greatest count per area, which only ever goes down.

Lower a number when you have removed uses; the aim is zero. CONTRIBUTING.md, "English", says what to write instead.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.harness.repository import ROOT

THIS = "test_words.py"
AREAS = {
    "src": ("src/kvferry/**/*.py", "models/src/**/*.py"),
    "tests": ("tests/**/*.py", "benchmarks/**/*.py", "examples/**/*.py", "training/**/*.py"),
    "docs": ("docs/**/*.md", "changes/*.md", "README.md"),
}
"""Files of each area. CONTRIBUTING.md is in none of them, because it quotes the words."""

WORDS = {  # word, also as a part of a name with underscores: the greatest count in src, in tests, and in docs
    "told": (0, 0, 0),
    "heard?": (0, 0, 0),
    "hears": (0, 0, 0),
    "nobody": (8, 12, 1),  # the name of an unknown peer in tests, and in an error that the docs quote; a prompt
    "somebody": (1, 2, 0),  # the name of another peer; a text that a model reads
    "anybody|everybody": (0, 0, 0),
    "so many": (0, 0, 0),
    "behind": (12, 20, 10),  # "leave nothing behind", and workers behind a router
    "afresh|anew": (0, 0, 0),
}
DOCSTRINGS = (r"\ASee ", r"\AOf ")
"""Beginnings of docstrings that say too little, or are no sentence."""


def texts(area: str) -> dict[str, str]:
    """Returns the text of each file of an area, by its path; this file is left out."""
    paths = {path for pattern in AREAS[area] for path in ROOT.glob(pattern)}
    return {
        str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted(paths) if path.name != "test_words.py"
    }


def docstrings(source: str) -> Iterator[str]:
    """Yields every string that is a statement, without leading and trailing space."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value.strip()


def lines_with(word: str, named: dict[str, str]) -> list[str]:
    """Returns a line for each use of the word, as `path:line: text`."""
    pattern = re.compile(rf"(?<![A-Za-z])(?:{word})(?![A-Za-z])", re.IGNORECASE)
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in named.items()
        for number, line in enumerate(text.splitlines(), 1)
        for _ in pattern.finditer(line)
    ]


@pytest.fixture(scope="module")
def by_area() -> dict[str, dict[str, str]]:
    return {area: texts(area) for area in AREAS}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("area", AREAS)
def test_a_hard_word_does_not_come_back(area: str, word: str, by_area: dict[str, dict[str, str]]) -> None:
    found = lines_with(word, by_area[area])
    greatest = WORDS[word][list(AREAS).index(area)]
    assert len(found) <= greatest, f"{len(found)} uses of {word!r} in {area}; at most {greatest} may be there"


@pytest.mark.parametrize("pattern", DOCSTRINGS)
def test_docstrings_are_sentences(pattern: str, by_area: dict[str, dict[str, str]]) -> None:
    sources = {**by_area["src"], **by_area["tests"]}
    found = [
        f"{name}: {text}" for name, source in sources.items() for text in docstrings(source) if re.search(pattern, text)
    ]
    assert not found


def test_uses_are_found_in_text_and_in_names() -> None:
    text = "def test_nobody_was_told(): ...\nA unfolded story, Told twice: told.\n"
    assert lines_with("told", {"x.py": text}) == [
        "x.py:1: def test_nobody_was_told(): ...",
        *["x.py:2: A unfolded story, Told twice: told."] * 2,
    ]
    assert list(docstrings('"""Of each layer: its name."""\n\nx = 1\n"""See `y`."""\n')) == [
        "Of each layer: its name.",
        "See `y`.",
    ]
