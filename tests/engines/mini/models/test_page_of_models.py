"""The table of models in docs/how-to/serve.md lists what the engine runs, family by family."""

import re

from kvferry.engines.mini.models.families import FAMILIES
from tests.harness.repository import ROOT


def test_the_page_lists_every_family_with_its_architectures() -> None:
    page = (ROOT / "docs" / "how-to" / "serve.md").read_text()
    table = page.partition("## Models\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    listed = {row[0]: set(re.findall(r"`(\w+)`", row[1])) for row in rows[2:]}
    families: dict[str, set[str]] = {}
    for architecture, family in FAMILIES.items():
        families.setdefault(family, set()).add(architecture)
    assert listed == families
