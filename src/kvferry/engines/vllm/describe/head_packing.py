"""Measures how vLLM's CPU backend packs keys and values in a head's block.

Its kernels store a head of a block as [K of all tokens | V of all tokens], each in an order that depends on the
instruction set, the dtype and the block size. Some orders are plain strides (K as [dim, token], V as [token, dim]):
then K and V are described as such, tokens can be cut anywhere, and other block sizes and other engines fit. The others
(AMX tiles) are opaque: moved whole, and only between equal orders, which the tag names by a digest of the order itself.

To measure, the kernel stores keys and values into a scratch block; each element encodes where it belongs, so the block
shows where the kernel put it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["HeadPacking", "Order", "Write", "classify", "measure"]

Order = npt.NDArray[np.int64]
"""For each place in a head's block, the element that is there: token * size + dim for keys, then for values."""

Write = Callable[[npt.NDArray[np.float32], npt.NDArray[np.float32]], npt.NDArray[np.float32]]
"""Stores keys and values, each [tokens, size], in an empty block of one head; returns that block, flat, as floats."""

_BASE = 8
"""Digits below this are exact in every dtype that a cache can have, fp8 included."""


@dataclass(frozen=True, slots=True)
class HeadPacking:
    """The packing of one head's block, in elements. A non-empty `tag` names an opaque order; the strides are then
    unused.
    """

    tag: str = ""
    k_offset: int = 0
    k_token: int = 0
    k_dim: int = 0
    v_offset: int = 0
    v_token: int = 0
    v_dim: int = 0


def measure(write: Write, tokens: int, size: int) -> Order:
    """Measures the order of a block of `tokens` tokens of one head of `size` elements. Raises ValueError if it is no
    order.
    """
    total = 2 * tokens * size
    numbers = np.arange(total, dtype=np.int64)
    found = np.zeros(total, np.int64)
    scale = 1
    while scale < total:
        digits = (numbers // scale % _BASE).astype(np.float32)
        block = write(digits[: total // 2].reshape(tokens, size), digits[total // 2 :].reshape(tokens, size))
        if block.shape != (total,):
            raise ValueError(f"a head's block has {block.shape!r} elements, {total} were expected")
        found += np.rint(block).astype(np.int64) * scale
        scale *= _BASE
    if not np.array_equal(np.sort(found), numbers):
        raise ValueError("the kernel does not store each element of keys and values exactly once")
    return found


def classify(order: Order, tokens: int, size: int, *, label: str) -> HeadPacking:
    """Returns strides if the order is one of strides; else a tag made of `label` and a digest of the order."""
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    keys, values = (half.reshape(tokens, size) for half in np.split(places, 2))
    k, v = _strides(keys), _strides(values)
    if k is None or v is None:
        digest = hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:12]
        return HeadPacking(tag=f"{label}-{tokens}x{size}-{digest}")
    return HeadPacking("", *k, *v)


def _strides(places: Order) -> tuple[int, int, int] | None:
    """Returns (offset, token stride, dim stride) if each element (t, d) is at offset + t * token + d * dim."""
    tokens, size = places.shape
    offset = int(places[0, 0])
    token = int(places[1, 0]) - offset if tokens > 1 else 0
    dim = int(places[0, 1]) - offset if size > 1 else 0
    plain = offset + np.arange(tokens)[:, None] * token + np.arange(size) * dim
    return (offset, token, dim) if token >= 0 and dim >= 0 and np.array_equal(places, plain) else None
