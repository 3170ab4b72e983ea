"""A matrix that inputs are multiplied by, stored in the order that is fastest on its device.

On CPU, oneDNN's own order of the weights makes small batches up to twice as fast (measured on one core, 576 x 3072:
bf16, 1 token 479 -> 333 us, 64 tokens 732 -> 419 us; fp32, 8 tokens 1471 -> 750 us), and an activation, or the product
or sum with another tensor, is computed while the result is still in registers. Inductor uses the same two operators.
"""

import torch
from torch.nn import functional

__all__ = ["Linear"]

REORDER_FOR_ROWS = 64
"""The number of rows that oneDNN is asked to optimise for; its value hardly matters."""


def _has_onednn(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    # bfloat16 without hardware for it would be emulated.
    return weight.dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear:
    """y = x @ weight.T + bias, for x [rows, inputs] and weight [outputs, inputs]. Keeps its own copy of the weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._packed = _has_onednn(weight)
        if self._packed:
            with torch.no_grad():
                weight = torch.ops.mkldnn._reorder_linear_weight(weight, REORDER_FOR_ROWS)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns y [rows, outputs]."""
        return self._plain(x, "none") if self._packed else functional.linear(x, self._weight, self.bias)

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Returns silu(y), or gelu(y) by its tanh approximation; `activation` is `silu` or `gelu_tanh`."""
        if self._packed:
            return self._plain(x, "swish") if activation == "silu" else self._plain(x, "gelu", "tanh")
        y = functional.linear(x, self._weight, self.bias)
        return functional.silu(y, inplace=True) if activation == "silu" else functional.gelu(y, approximate="tanh")

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Returns y * other."""
        return self._with(x, other, "mul") if self._packed else self(x).mul_(other)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Returns y + other."""
        return self._with(x, other, "add") if self._packed else self(x).add_(other)

    def _plain(self, x: torch.Tensor, activation: str, how: str = "") -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, activation, [], how)
        return y

    def _with(self, x: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self.bias, operation)
        return y
