"""The fixed matrix is correct everywhere; what is refused would be listed here."""

import sys

import pytest

from tests.harness.repository import DOCS
from tests.layout.matrix import BLOCKS, MODELS, PREFIX_MODELS, Matrix, all_correct, blocks, page, parallel, prefixes


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_any_tp_and_pp_to_any_other(name: str) -> None:  # R22 R23
    matrix = Matrix()
    parallel(matrix, name)
    _all_correct(matrix, 25 * 9)


@pytest.mark.parametrize("name", MODELS)
def test_any_block_size_and_order_to_any_other(name: str) -> None:  # R22 R23
    matrix = Matrix()
    blocks(matrix, name)
    _all_correct(matrix, 25 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("p_block", BLOCKS)
@pytest.mark.parametrize("name", PREFIX_MODELS)
def test_a_prefix_of_any_length_is_not_copied_again(name: str, p_block: int) -> None:  # R30
    matrix = Matrix()
    prefixes(matrix, name, (p_block,))
    _all_correct(matrix, sum(3 * size + 1 for size in BLOCKS))


def test_the_committed_page_is_up_to_date() -> None:
    committed = DOCS / "reference" / "layout-matrix.md"
    assert committed.read_text() == page(all_correct()), "out of date: make docs"


def _all_correct(matrix: Matrix, num_cases: int) -> None:
    sys.stdout.write("\n".join(matrix.lines) + "\n")
    assert (matrix.ok, dict(matrix.refused)) == (num_cases, {})
