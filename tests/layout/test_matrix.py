"""The fixed matrix is correct everywhere; what is refused would be listed here."""

import sys

import pytest

from tests.layout.matrix import MODELS, PREFIX_MODELS, Matrix, blocks, parallel, prefixes


@pytest.mark.parametrize("name", MODELS)
def test_any_tp_and_pp_to_any_other(name: str) -> None:  # R22 R23
    _all_correct(name, parallel)


@pytest.mark.parametrize("name", MODELS)
def test_any_block_size_and_order_to_any_other(name: str) -> None:  # R22 R23
    _all_correct(name, blocks)


@pytest.mark.parametrize("name", PREFIX_MODELS)
def test_a_prefix_of_any_length_is_not_copied_again(name: str) -> None:  # R30
    _all_correct(name, prefixes)


def _all_correct(name: str, part: object) -> None:
    matrix = Matrix()
    assert callable(part), "a part of the matrix is a function"
    part(matrix, name)
    sys.stdout.write("\n".join(matrix.lines) + "\n")
    assert matrix.ok > 90
    assert not matrix.refused
