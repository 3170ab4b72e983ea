"""The places of the parts of this repository, for tests that read them."""

from pathlib import Path

__all__ = ["DOCS", "ROOT", "SRC"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SRC = ROOT / "src" / "kvferry"
