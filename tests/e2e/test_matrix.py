"""The part of the P/D matrix in which any two values of any two axes meet. All of it: `make matrix`."""

from pathlib import Path

import pytest

from tests.e2e.matrix import every_cell, page, pairwise, run

pytestmark = [pytest.mark.process, pytest.mark.engine]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_two_values_of_any_two_axes(tmp_path: Path) -> None:  # R22, R23, R30, R32, R36
    cells = pairwise(every_cell())
    results = list(run(cells, tmp_path))
    assert [cell for cell, _ in results] == cells
    assert {cell: result.problem for cell, result in results if not result.right} == {}


def test_the_page_says_what_is_missing_and_what_is_wrong() -> None:
    cell = {"family": "llama", "mode": "pull", "prefill": "TP1", "decode": "TP2", "block_sizes": "16/16", "problem": ""}
    text = page([{**cell, "hit": "none"}, {**cell, "hit": "full", "problem": "tokens differ"}])
    assert "| TP1 to TP2 | ok - NO | - - - |" in text
    assert "Right: 1 of 2 cells." in text
