"""Words that a reader stumbles over do not come back: each pattern has a greatest count, which only ever goes down.

Lower a number when you have removed uses; the aim is zero. CONTRIBUTING.md, "English", says what to write instead.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "kvferry"

DOCSTRINGS = {  # pattern, searched in each docstring (and each text beneath a field or constant): greatest count
    r"\ASee ": 0,
    r"\AOf ": 0,
    r"\bbehind\b": 12,  # "leaves nothing behind", and memory behind an id
    r"\b(no|some)body\b": 1,
    r"\bso many\b": 0,
    r"\b(told|heard)\b": 1,  # "cannot be told apart"
}
FILES = {  # pattern, searched in the whole source: greatest count
    r"\btold\b": 1,
    r"\bheard\b": 0,
    r"\b(no|some)body\b": 9,  # names of strangers in conformance suites, and a sentence of the demo's prompt
    r"\bso many\b": 0,
}


def docstrings(source: str) -> Iterator[str]:
    """Yields every string that stands as a statement of its own, without leading and trailing space."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value.strip()


def count(pattern: str, texts: list[str]) -> int:
    """How often the pattern matches in the texts."""
    return sum(len(re.findall(pattern, text)) for text in texts)


@pytest.fixture(scope="module")
def sources() -> list[str]:
    return [path.read_text() for path in sorted(SRC.rglob("*.py"))]


@pytest.mark.parametrize("pattern", DOCSTRINGS)
def test_docstrings_use_the_fields_words(pattern: str, sources: list[str]) -> None:
    found = count(pattern, [text for source in sources for text in docstrings(source)])
    assert found <= DOCSTRINGS[pattern], f"{found} docstrings match {pattern!r}; at most {DOCSTRINGS[pattern]} may"


@pytest.mark.parametrize("pattern", FILES)
def test_sources_use_the_fields_words(pattern: str, sources: list[str]) -> None:
    found = count(pattern, sources)
    assert found <= FILES[pattern], f"{found} matches of {pattern!r} in src; at most {FILES[pattern]} may be there"


def test_a_bad_docstring_is_found() -> None:
    source = '"""Of each layer: its name."""\n\nx = 1\n"""See `y`."""\n'
    assert count(r"\AOf ", list(docstrings(source))) == 1
    assert count(r"\ASee ", list(docstrings(source))) == 1
