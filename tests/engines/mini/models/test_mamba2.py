"""The convolution of state space models: right for every length, from few kernels."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from kvferry.engines.mini.models.families import mamba2
from kvferry.engines.mini.models.families.mamba2 import convolve

CHANNELS, TAPS = 12, 4


def _inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(num_tokens)
    shapes = ((num_tokens, CHANNELS), (CHANNELS, TAPS - 1), (CHANNELS, TAPS), (CHANNELS,))
    x, state, weight, bias = (torch.randn(*shape, generator=numbers) for shape in shapes)
    return x, state, weight, bias


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 200])
def test_a_padded_convolution_is_the_plain_one(num_tokens: int) -> None:
    x, state, weight, bias = _inputs(num_tokens)
    line = torch.cat([state, x.t()], dim=1)
    right = functional.silu(functional.conv1d(line[None], weight[:, None], bias, groups=CHANNELS)[0]).t()
    y, after = convolve(x, state, weight, bias)
    torch.testing.assert_close(y, right)
    torch.testing.assert_close(after, line[:, num_tokens:])


@pytest.mark.parametrize(("pad", "most"), [(mamba2.PAD_TOKENS, 4), (1, 256)], ids=["padded", "guard off"])
def test_256_lengths_need_four_kernels(pad: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = set()
    conv1d = functional.conv1d

    def counted(line: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        lengths.add(line.shape[-1])
        return conv1d(line, *args, **named)

    monkeypatch.setattr(functional, "conv1d", counted)
    monkeypatch.setattr(mamba2, "PAD_TOKENS", pad)
    for num_tokens in range(1, 257):
        convolve(*_inputs(num_tokens))
    assert len(lengths) == most
