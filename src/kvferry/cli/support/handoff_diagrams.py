"""Puts the state diagrams of hand-offs into their page, from the tables of legal moves: `make docs` writes them."""

import re
from collections.abc import Callable
from pathlib import Path

from kvferry.handoff.transitions import TABLES

__all__ = ["PAGE", "diagrams_page", "with_diagrams"]

PAGE = "explanation/life-of-a-handoff.md"
_DOCS = Path(__file__).parents[4] / "docs"
_BEGIN, _END = "<!-- Made by `make docs` from kvferry.handoff.transitions: {name}. -->", "<!-- End of {name}. -->"


def with_diagrams(text: str) -> str:
    """Returns the page with each diagram in its marked region. Raises ValueError if a region is missing."""
    for table in TABLES:
        begin, end = (mark.format(name=table.name) for mark in (_BEGIN, _END))
        region = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        made = f"{begin}\n```mermaid\n{table.diagram()}\n```\n{end}"
        text, count = region.subn(_always(made), text)
        if count != 1:
            raise ValueError(f"{PAGE} has {count} regions {begin!r} ... {end!r}; it needs one")
    return text


def _always(made: str) -> Callable[[re.Match[str]], str]:
    return lambda _: made


def diagrams_page() -> str:
    """Returns docs/explanation/life-of-a-handoff.md, as it is but for its diagrams."""
    return with_diagrams((_DOCS / PAGE).read_text())
