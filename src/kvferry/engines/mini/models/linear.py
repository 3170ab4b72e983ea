"""A matrix that inputs are multiplied by, stored in the order that is fastest on its device.

On CPU, oneDNN's own order of the weights makes small batches up to twice as fast (measured on one core, 576 x 3072:
bf16, 1 token 479 -> 333 us, 64 tokens 732 -> 419 us; fp32, 8 tokens 1471 -> 750 us), and an activation, or the product
or sum with another tensor, is computed while the result is still in registers. Inductor uses the same two operators.

oneDNN compiles a kernel for each number of rows that it meets, and keeps about half a MiB for each of them: some of it
until 1,024 others have come, the rest for as long as the process lives. The steps of a server have any number of rows,
so its memory would grow for many thousands of requests. That is why inputs are cut into pieces of few different sizes.
A piece more, or a row of padding, costs time: 5 to 20 % of a product of 17 to 300 rows. So a number of rows that comes
again and again, as decode batches do, gets kernels of its own; a bounded number of them.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch.nn import functional

__all__ = ["MOST_REPEATED", "PIECES", "Linear", "Sizes", "pieces"]

REORDER_FOR_ROWS = 64
"""The number of rows that oneDNN is asked to optimise for; its value hardly matters."""

_EXACT, _SMALL, _LARGE = 16, 64, 512
PIECES = (*range(1, _EXACT + 1), *range(_EXACT + 4, _SMALL, 4), *range(_SMALL, _LARGE + 1, _SMALL))
"""Every number of rows for which oneDNN makes a kernel, per matrix and fused operation."""
_WINDOW, _OFTEN = 256, 32
MOST_REPEATED = 16
"""How many other numbers of rows get kernels of their own because they come often: _OFTEN times in _WINDOW inputs."""


def pieces(num_rows: int) -> list[int]:
    """Returns the sizes of the pieces for an input of `num_rows` rows, each one of PIECES.

    Their sum may be up to 3 more than `num_rows`: the last piece is then padded. A kernel takes as long per row from
    about 8 rows on, so that several pieces cost hardly more than one.
    """
    sizes = [_LARGE] * (num_rows // _LARGE)
    num_rows %= _LARGE
    if num_rows >= _SMALL:
        sizes.append(num_rows // _SMALL * _SMALL)
        num_rows %= _SMALL
    if num_rows:
        sizes.append(num_rows if num_rows <= _EXACT else -(-num_rows // 4) * 4)
    return sizes


class Sizes:
    """Cuts the inputs of one matrix. All layers see the same inputs' sizes, and so have kernels in common."""

    def __init__(self) -> None:
        self.repeated: set[int] = set()
        """The numbers of rows that are not cut although they are not in PIECES."""
        self._seen: Counter[int] = Counter()
        self._num_seen = 0

    def cut(self, num_rows: int) -> list[int]:
        """Returns the sizes of the pieces of an input."""
        if num_rows in self.repeated:
            return [num_rows]
        sizes = pieces(num_rows)
        if len(self.repeated) < MOST_REPEATED:
            self._note(num_rows, is_whole=sizes == [num_rows])
        return sizes

    def _note(self, num_rows: int, *, is_whole: bool) -> None:
        if self._num_seen == _WINDOW:
            self._seen.clear()
            self._num_seen = 0
        self._num_seen += 1
        if not is_whole:
            self._seen[num_rows] += 1
            if self._seen[num_rows] == _OFTEN:
                self.repeated.add(num_rows)


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
        self._sizes = Sizes()

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
        return _in_pieces(
            self._sizes.cut(len(x)),
            lambda x: torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, activation, [], how),
            x,
        )

    def _with(self, x: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        return _in_pieces(
            self._sizes.cut(len(x)),
            lambda x, other: torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self.bias, operation),
            x,
            other,
        )


def _in_pieces(sizes: list[int], compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Calls `compute` with the same rows of every input, in pieces of these sizes, and joins the results."""
    num_rows = len(inputs[0])
    if sizes == [num_rows]:
        return compute(*inputs)
    results, first = [], 0
    for size in sizes:
        missing = first + size - num_rows
        parts = [x[first : first + size] for x in inputs]
        if missing > 0:
            parts = [functional.pad(x, (0, 0, 0, missing)) for x in parts]
        results.append(compute(*parts))
        first += size
    return (results[0] if len(results) == 1 else torch.cat(results))[:num_rows]
