"""The memory of a cache: its size, its errors, and the layout that describes every byte."""

import pytest
import torch

from kvferry.engines.mini.cache.plan import cache_flag
from kvferry.engines.mini.models.loading import LoadedModel
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError
from kvferry.layout.description import MemoryKind
from tests.harness.tiny_model import whole_cache


def test_a_cache_that_is_too_small_names_the_size_that_is_enough(tiny_model: LoadedModel) -> None:
    settings = EngineSettings(cache_bytes=20_000)
    one = 3 * 2 * 2 * 16 * 16 * 4
    with pytest.raises(
        ConfigError, match=rf"cache_bytes=20000 holds 1 blocks of {one} bytes.*{2 * one} or more"
    ) as raised:
        whole_cache(tiny_model, settings)
    flag = float(str(raised.value).split("--cache-gb ")[1].rstrip(")."))
    assert 2 * one <= flag * (1 << 30) <= 2 * one + 1100, "the flag that is named counts GiB, and is enough"


def test_the_largest_cache_is_given_in_the_unit_of_its_flag() -> None:
    assert cache_flag(14_973_050_880, at_least=False) == "--cache-gb 13.94474"
    assert cache_flag(14_973_050_880, at_least=True) == "--cache-gb 13.944741"
    assert cache_flag(10 << 30, at_least=True) == "--cache-gb 10"


def test_the_layout_names_every_byte(tiny_model: LoadedModel) -> None:
    cache = whole_cache(tiny_model, EngineSettings(num_blocks=5))
    layout = cache.layout()
    region = layout.regions[0]
    assert (region.address, region.num_bytes, region.kind) == (
        cache.data.data_ptr(),
        cache.data.nbytes,
        MemoryKind.DRAM,
    )
    flat = cache.data.view(torch.uint8).flatten()
    for tensor in layout.tensors:
        head, dim = tensor.axes
        assert (head.name, head.extent, dim.name, dim.extent) == ("head", 2, "dim", 16)
        layer, part = int(tensor.layer.split(".")[1]), "kv".index(tensor.part)
        assert tensor.paging.token_stride_bytes is not None
        at = (
            tensor.offset_bytes
            + 3 * tensor.paging.block_stride_bytes
            + 7 * tensor.paging.token_stride_bytes
            + head.stride_bytes
            + 5 * dim.stride_bytes
        )
        cache.view(f"layers.{layer}.attn", "kv"[part])[3, 1, 7, 5] = 42.0
        assert flat[at : at + 4].view(torch.float32).item() == 42.0
        cache.data.zero_()
