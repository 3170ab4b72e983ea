"""The order within a block of a head is measured, and becomes strides or a tag."""

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.engines.vllm.describe.head_packing import HeadPacking, classify, measure

TOKENS, SIZE = 32, 16
Floats = npt.NDArray[np.float32]


def column_major_keys(keys: Floats, values: Floats) -> Floats:
    """Stores a block as the vector kernels do: K as [dim, token], V as [token, dim]."""
    return np.concatenate([keys.T.reshape(-1), values.reshape(-1)])


def tiles(keys: Floats, values: Floats) -> Floats:
    """Stores a block as a tile kernel does: pairs of dims of 16 tokens are adjacent."""
    k = keys.reshape(TOKENS // 16, 16, SIZE // 2, 2).transpose(0, 2, 1, 3)
    return np.concatenate([k.reshape(-1), values.reshape(-1)])


def test_plain_orders_become_strides() -> None:
    found = classify(measure(column_major_keys, TOKENS, SIZE), TOKENS, SIZE, label="x")
    half = TOKENS * SIZE
    assert found == HeadPacking(k_offset=0, k_token=1, k_dim=TOKENS, v_offset=half, v_token=SIZE, v_dim=1)


def test_tiles_become_a_tag_that_names_order_and_block_size() -> None:
    found = classify(measure(tiles, TOKENS, SIZE), TOKENS, SIZE, label="cpu-amx-bfloat16")
    assert found.tag.startswith("cpu-amx-bfloat16-32x16-")
    assert found == classify(measure(tiles, TOKENS, SIZE), TOKENS, SIZE, label="cpu-amx-bfloat16")


def test_another_order_is_another_tag() -> None:
    def shifted(keys: Floats, values: Floats) -> Floats:
        return np.roll(tiles(keys, values), 2)

    one, other = (classify(measure(w, TOKENS, SIZE), TOKENS, SIZE, label="x").tag for w in (tiles, shifted))
    assert one
    assert other
    assert one != other


def test_a_kernel_that_stores_something_twice_is_refused() -> None:
    def lossy(keys: Floats, values: Floats) -> Floats:
        return np.concatenate([keys.reshape(-1), keys.reshape(-1)])

    with pytest.raises(ValueError, match="exactly once"):
        measure(lossy, TOKENS, SIZE)


def test_a_block_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="elements"):
        measure(lambda keys, values: keys.reshape(-1), TOKENS, SIZE)
