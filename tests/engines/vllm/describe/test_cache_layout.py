"""vLLM's cache as a layout: the bytes that it names are the bytes that vLLM would read."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.engines.vllm.describe.cache_layout import describe_cache
from kvferry.engines.vllm.describe.head_packing import HeadPacking
from kvferry.engines.vllm.describe.introspect import RankView, group_forms, layer_kinds, layer_specs, layer_views
from kvferry.engines.vllm.describe.layer_names import canonical_names
from kvferry.errors import ConfigError
from kvferry.layout.blocks import BlockTable
from kvferry.layout.cells import Cell, cell_runs
from kvferry.layout.description import CacheGroup, CacheKind, CacheLayout, Rank


class Quant(Enum):
    NONE = 0
    NVFP4 = 5


@dataclass
class AttentionSpec:
    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 8
    dtype: torch.dtype = torch.float32
    kv_quant_mode: Quant = Quant.NONE
    tokens_per_state: int = 1
    state_content_bytes: int | None = None


class FullAttentionSpec(AttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class RSWASpec(FullAttentionSpec):
    pass


class ChunkedLocalAttentionSpec(AttentionSpec):
    pass


@dataclass
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = 40


@dataclass
class MambaSpec:
    shapes: tuple[tuple[int, ...], ...] = ((16, 3), (4, 4))
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float32)
    mamba_type: str = "LINEAR"
    num_speculative_blocks: int = 0


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    host_resident: bool = False


@dataclass
class Placed:
    layers: list[str]
    block_stride: int


@dataclass
class Config:
    transfer_groups: list[Group]
    num_blocks: int = 6
    kv_cache_tensors: list[Placed] = field(default_factory=list)


def names_of(config: Config) -> dict[str, str]:
    return canonical_names(layer_kinds(config), 99)


def described(
    config: Config, caches: dict[str, Any], rank: Rank | None = None, packing: HeadPacking | None = None, heads: int = 2
) -> CacheLayout:
    kernel: list[int | None] = [None] * len(config.transfer_groups)
    for name, (group, _) in layer_specs(config).items():
        if name in caches and caches[name].ndim == 4:
            kernel[group] = caches[name].shape[2]
    view = RankView(rank or Rank(), kv_dtype="auto", total_kv_heads=heads)
    views = layer_views(config, caches, names_of(config), view, lambda *_: packing)
    return describe_cache(view.rank, group_forms(config, kernel), views)


def read(layout: CacheLayout, storage: torch.Tensor, cell: Cell, table: BlockTable) -> list[float]:
    """Returns the elements of a cell, where the layout says they are."""
    raw = storage.untyped_storage()
    flat = np.frombuffer((torch.tensor([], dtype=torch.uint8).set_(raw)).numpy(), np.uint8)
    runs = cell_runs(layout, [table], cell)
    parts = [flat[at : at + size] for at, size in zip(runs.offset, runs.length, strict=True)]
    return np.concatenate(parts).view(np.float32).tolist()  # type: ignore[no-any-return]


NAME = "model.layers.0.self_attn.attn"


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
def test_key_and_value_of_a_token_in_each_of_vllms_layouts(order: str) -> None:  # R22
    blocks, heads, tokens, size = 6, 2, 32, 8
    if order == "BLHNC":  # two layers in a block, of which this is the second
        storage = torch.arange(blocks * 2 * heads * tokens * 2 * size, dtype=torch.float32)
        cache = storage.view(blocks, 2, heads, tokens, 2 * size)[:, 1]
    elif order == "LBNHC":
        storage = torch.arange(blocks * heads * tokens * 2 * size, dtype=torch.float32)
        cache = storage.view(blocks, tokens, heads, 2 * size).transpose(1, 2)
    else:
        storage = torch.arange(blocks * heads * tokens * 2 * size, dtype=torch.float32)
        cache = storage.view(blocks, heads, tokens, 2 * size)
    config = Config([Group([NAME], FullAttentionSpec())])
    layout = described(config, {NAME: cache})
    table = BlockTable(0, 0, (4, 2))
    for part, at in (("k", 0), ("v", size)):
        cell = Cell("layers.0.attn", part, 37, 38, (("head", 1, 2), ("dim", 2, 6)))
        assert read(layout, storage, cell, table) == cache[2, 1, 5, at + 2 : at + 6].tolist()


def test_a_block_in_the_cpu_backends_plain_order() -> None:
    blocks, heads, tokens, size = 6, 2, 32, 8
    cache = torch.zeros(blocks, heads, tokens, 2 * size)
    keys, values = torch.rand(heads, tokens, size), torch.rand(heads, tokens, size)
    for head in range(heads):  # K as [dim, token], V as [token, dim], as the vector kernels store them
        cache[3, head] = torch.cat([keys[head].T.reshape(-1), values[head].reshape(-1)]).view(tokens, -1)
    packing = HeadPacking(k_token=1, k_dim=tokens, v_offset=tokens * size, v_token=size, v_dim=1)
    layout = described(Config([Group([NAME], FullAttentionSpec())]), {NAME: cache}, packing=packing)
    table = BlockTable(0, 0, (3,))
    for part, wanted in (("k", keys), ("v", values)):
        cell = Cell("layers.0.attn", part, 9, 11, (("head", 1, 2), ("dim", 0, size)))
        assert read(layout, cache, cell, table) == wanted[1, 9:11].reshape(-1).tolist()


def test_an_opaque_order_is_cut_only_by_head() -> None:
    cache = torch.zeros(6, 2, 32, 16)
    layout = described(
        Config([Group([NAME], FullAttentionSpec())]), {NAME: cache}, packing=HeadPacking(tag="cpu-amx-x")
    )
    (tensor,) = layout.tensors
    assert (tensor.part, tensor.encoding, tensor.element_bytes) == ("kv", "cpu-amx-x", 32 * 16 * 4)
    assert tensor.paging.token_stride_bytes is None
    assert [axis.name for axis in tensor.axes] == ["head"]


def test_kernel_blocks_are_the_blocks_of_the_layout() -> None:
    cache = torch.zeros(6 * 4, 2, 8, 16)  # four kernel blocks of 8 tokens in a manager block of 32
    layout = described(Config([Group([NAME], FullAttentionSpec())]), {NAME: cache})
    assert layout.groups[0].block_tokens == 8
    assert layout.tensors[0].paging.num_blocks == 24


def test_groups_share_one_region() -> None:  # R21
    storage = torch.zeros(6 * 2 * 32 * 16)
    other = "model.layers.1.self_attn.attn"
    caches = {NAME: storage.view(6, 2, 32, 16), other: storage.view(6, 2, 32, 16)}
    layout = described(Config([Group([NAME], FullAttentionSpec()), Group([other], SlidingWindowSpec())]), caches)
    assert len(layout.regions) == 1
    assert layout.groups == (CacheGroup(CacheKind.FULL, 32), CacheGroup(CacheKind.WINDOW, 32, 40))


def test_a_layer_that_shares_the_cache_of_another_is_left_out() -> None:
    cache = torch.zeros(6, 2, 32, 16)
    layout = described(Config([Group([NAME], FullAttentionSpec())]), {NAME: cache, "model.layers.9.attn": cache})
    assert {tensor.layer for tensor in layout.tensors} == {"layers.0.attn"}


def test_mla_is_one_latent_that_every_rank_has() -> None:
    cache = torch.zeros(6, 1, 16, 40)
    spec = MLAAttentionSpec(num_kv_heads=1, head_size=40, block_size=16)
    layout = described(Config([Group([NAME], spec)]), {NAME: cache}, Rank(index=1, tp_rank=1, tp_size=2))
    (tensor,) = layout.tensors
    assert (tensor.part, tensor.axes[0].extent, tensor.paging.token_stride_bytes) == ("latent", 40, 160)


def test_a_quantised_cache_is_named_and_moved_as_it_is() -> None:
    spec = FullAttentionSpec(kv_quant_mode=Quant.NVFP4, state_content_bytes=64)
    layout = described(Config([Group([NAME], spec)]), {NAME: torch.zeros(6, 2, 32, 16)})
    (tensor,) = layout.tensors
    assert tensor.encoding == "vllm-nvfp4-fp32-64"
    assert tensor.element_bytes == tensor.paging.token_stride_bytes == 64


def test_states_are_in_a_page_of_the_storage() -> None:
    raw = torch.zeros(6 * 2048, dtype=torch.int8)
    name = "model.layers.0.mixer"
    config = Config([Group([name], MambaSpec())], kv_cache_tensors=[Placed([name], 2048)])
    layout = described(config, {name: raw})
    assert {tensor.layer for tensor in layout.tensors} == {"layers.0.mamba"}
    assert [tensor.offset_bytes for tensor in layout.tensors] == [0, 16 * 3 * 4]
    assert layout.tensors[0].paging.block_stride_bytes == 2048
    assert layout.groups == (CacheGroup(CacheKind.STATE, 0),)


@pytest.mark.parametrize(("tp", "held", "total", "wanted"), [(2, 2, 4, (2, 4)), (4, 1, 2, (1, 2)), (2, 1, 2, (1, 2))])
def test_heads_are_split_or_copied(tp: int, held: int, total: int, wanted: tuple[int, int]) -> None:
    spec = FullAttentionSpec(num_kv_heads=held)
    rank = Rank(index=tp - 1, tp_rank=tp - 1, tp_size=tp)
    layout = described(Config([Group([NAME], spec)]), {NAME: torch.zeros(6, held, 32, 16)}, rank, heads=total)
    axis = layout.tensors[0].axes[0]
    assert (axis.start, axis.stop, axis.extent) == (*wanted, total)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (RSWASpec(), "drops tokens in the middle"),
        (ChunkedLocalAttentionSpec(), "--disable-hybrid-kv-cache-manager"),
        (FullAttentionSpec(tokens_per_state=4), "one state for several tokens"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_at_the_start(spec: Any, text: str) -> None:  # R23
    with pytest.raises(ConfigError, match=text):
        group_forms(Config([Group([NAME], spec)]), [32])


def test_host_memory_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="HiSparse"):
        group_forms(Config([Group([NAME], FullAttentionSpec(), host_resident=True)]), [32])
