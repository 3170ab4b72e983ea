"""Linear: the same results for every number of rows, from a small set of kernels."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn import functional

from kvferry.engines.mini.models import linear
from kvferry.engines.mini.models.linear import MOST_REPEATED, PIECES, Linear, Sizes, pieces

INPUTS, OUTPUTS = 24, 40


@pytest.mark.parametrize("num_rows", [1, 7, 16, 17, 20, 63, 64, 65, 81, 127, 192, 449, 511, 512, 513, 1100])
@torch.inference_mode()
def test_pieces_compute_what_one_product_would(num_rows: int) -> None:
    random_numbers = torch.Generator().manual_seed(num_rows)
    weight, bias, x, other = (
        torch.randn(*shape, generator=random_numbers)
        for shape in ((OUTPUTS, INPUTS), (OUTPUTS,), (num_rows, INPUTS), (num_rows, OUTPUTS))
    )
    layer, right = Linear(weight, bias), functional.linear(x, weight, bias)
    for y, expected in (
        (layer(x), right),
        (layer.activated(x, "silu"), functional.silu(right)),
        (layer.activated(x, "gelu_tanh"), functional.gelu(right, approximate="tanh")),
        (layer.times(x, other), right * other),
        (layer.plus(x, other), right + other),
    ):
        torch.testing.assert_close(y, expected)


def test_every_number_of_rows_is_made_of_few_sizes() -> None:
    for num_rows in range(1, 5000):
        sizes = pieces(num_rows)
        assert set(sizes) <= set(PIECES)
        assert num_rows <= sum(sizes) <= num_rows + 3
    assert len(PIECES) < 40


def test_decoding_steps_of_up_to_16_requests_are_one_piece_without_padding() -> None:
    assert [pieces(num_rows) for num_rows in range(1, 17)] == [[num_rows] for num_rows in range(1, 17)]


@dataclass
class Kernels:
    """Stands for oneDNN's kernels, which it makes per number of rows and keeps."""

    sizes: set[int] = field(default_factory=set)

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: object) -> torch.Tensor:
        """Multiplies, as `mkldnn._linear_pointwise` does."""
        self.sizes.add(len(x))
        return functional.linear(x, weight, bias)


def _sizes_after(seed: int, cut: bool, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Returns the numbers of rows for which there are kernels after 3,000 steps of random lengths."""
    kernels, dice = Kernels(), random.Random(seed)
    monkeypatch.setattr(linear, "_has_onednn", lambda weight: False)
    layer = Linear(torch.randn(OUTPUTS, INPUTS))
    monkeypatch.setattr(layer, "_packed", True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", kernels.product, raising=False)
    if not cut:
        monkeypatch.setattr(linear, "pieces", lambda num_rows: [num_rows])
    with torch.inference_mode():
        for _ in range(3000):
            layer(torch.zeros(dice.randint(1, 512), INPUTS))
    return kernels.sizes


def test_memory_of_kernels_is_bounded_whatever_lengths_come(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _sizes_after(1, True, monkeypatch) <= set(PIECES)


def test_without_pieces_each_length_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_sizes_after(1, False, monkeypatch)) > 500


def test_a_number_of_rows_that_comes_often_is_not_cut() -> None:
    sizes, dice = Sizes(), random.Random(3)
    for _ in range(100):
        sizes.cut(dice.randint(65, 2000))
        last = sizes.cut(17)
    assert last == [17]
    assert sizes.repeated == {17}


def test_numbers_of_rows_that_come_rarely_stay_cut() -> None:
    sizes, dice = Sizes(), random.Random(4)
    for _ in range(20_000):
        assert set(sizes.cut(dice.randint(1, 512))) <= set(PIECES)


def test_a_bounded_number_of_sizes_is_not_cut() -> None:
    sizes = Sizes()
    for num_rows in range(1000, 1200):
        for _ in range(300):
            sizes.cut(num_rows)
    assert len(sizes.repeated) == MOST_REPEATED
