"""vLLM's own KVCacheManager, and what `take_prefix_hits` does to a request that waits for a hand-off (R30)."""

import pytest

from tests.harness.vllm_only import VLLM_MARKS, require_vllm

require_vllm()

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvferry.engines.vllm.scheduler_side.prefix_hits import take_prefix_hits

pytestmark = VLLM_MARKS
BLOCK, BLOCKS, WINDOW = 16, 64, 32
FULL, WINDOWED = 0, 1


@pytest.fixture
def manager() -> KVCacheManager:
    init_none_hash(sha256)
    same = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    specs = [FullAttentionSpec(**same), SlidingWindowSpec(**same, sliding_window=WINDOW)]
    page = specs[0].page_size_bytes
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[KVCacheTensor(page * BLOCKS, ["a", "b"], page * BLOCKS, page)],
        kv_cache_groups=[KVCacheGroupSpec(["a"], specs[0]), KVCacheGroupSpec(["b"], specs[1])],
    )
    return KVCacheManager(config, 1024, BLOCK, BLOCK)


def a_request(name: str, prompt: list[int]) -> Request:
    return Request(
        name, prompt, SamplingParams(max_tokens=4), None, block_hasher=get_request_block_hasher(BLOCK, sha256)
    )


def received(manager: KVCacheManager, request: Request, num_tokens: int) -> dict[int, int]:
    """Makes a request wait for `num_tokens` from outside, as vLLM does; returns where each window begins."""
    assert manager.allocate_slots(request, 0, num_external_computed_tokens=num_tokens, delay_cache_blocks=True)
    windowed = manager.get_block_ids(request.request_id)[WINDOWED]
    return {WINDOWED: sum(block == 0 for block in windowed) * BLOCK}


def landed(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    request.num_computed_tokens = num_tokens
    manager.cache_blocks(request, num_tokens)


def served(manager: KVCacheManager, prompt: list[int]) -> list[int]:
    """Runs a request that came by a hand-off to its end: its full-attention blocks stay cached."""
    first = a_request("first", prompt)
    received(manager, first, len(prompt) - 1)
    landed(manager, first, len(prompt) - 1)
    blocks = manager.get_block_ids("first")[FULL]
    manager.free(first)
    return list(blocks)


def test_blocks_below_the_window_are_taken_and_the_rest_is_handed_over(manager: KVCacheManager) -> None:
    prompt = list(range(160))
    old = served(manager, prompt)
    begun_with = manager.block_pool.get_num_free_blocks()
    again = a_request("again", prompt + list(range(500, 540)))
    assert manager.get_computed_blocks(again)[1] == 0, "vLLM itself finds nothing that every group has"
    windows = received(manager, again, 199)
    fresh = manager.get_block_ids("again")[FULL]

    begin = take_prefix_hits(manager, again, [FULL], windows, 0)

    assert begin == 144, "what was cached of it: nine whole blocks; the windows begin after them"
    held = manager.get_block_ids("again")[FULL]
    assert held == old[:9] + fresh[9:]
    landed(manager, again, 199)  # vLLM asserts if a block is entered twice
    assert manager.get_computed_blocks(a_request("third", prompt + list(range(500, 540)) + [9]))[1] == 192
    manager.free(again)
    assert manager.block_pool.get_num_free_blocks() == begun_with, "each block came back once"


def test_nothing_inside_the_window_is_taken(manager: KVCacheManager) -> None:  # R28: other requests read it
    prompt = list(range(160))
    old = served(manager, prompt)
    again = a_request("again", prompt)
    windows = received(manager, again, 159)
    assert windows == {WINDOWED: 128}
    assert take_prefix_hits(manager, again, [FULL], windows, 0) == 128
    held = manager.get_block_ids("again")[FULL]
    assert held[:8] == old[:8]
    assert held[8] != old[8], "token 128 of the window comes, and into a block of this request's own"


def test_a_prompt_with_another_beginning_takes_nothing(manager: KVCacheManager) -> None:
    served(manager, list(range(160)))
    other = a_request("other", list(range(1000, 1160)))
    windows = received(manager, other, 159)
    before = manager.get_block_ids("other")
    assert take_prefix_hits(manager, other, [FULL], windows, 0) == 0
    assert manager.get_block_ids("other") == before


def test_a_request_that_must_not_read_the_cache_does_not(manager: KVCacheManager) -> None:
    prompt = list(range(160))
    served(manager, prompt)
    again = a_request("again", prompt)
    again.skip_reading_prefix_cache = True
    windows = received(manager, again, 159)
    assert take_prefix_hits(manager, again, [FULL], windows, 0) == 0
