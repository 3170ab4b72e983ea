"""Caches, staging memory and a whole engine on the device of the machine: CUDA, or else the CPU by the same code.

pytest -m device
"""

from pathlib import Path

import pytest
import torch

from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.cache_spec import make_groups
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.settings import EngineSettings
from kvferry.layout.description import MemoryKind
from kvferry.transport.staging.packer import region_views
from kvferry.transport.staging.staging_pool import StagingPool
from tests.engines.mini.conftest import ask, finish, prompt_of, tokens_of
from tests.harness.devices import DEVICE, needs_cuda

pytestmark = pytest.mark.device

KIND = MemoryKind.VRAM if DEVICE.type == "cuda" else MemoryKind.DRAM


def a_cache() -> KVCache:
    layer = KvFormat(torch.float32).attention("layers.0.attn", (2, 0, 2), 16)
    return KVCache([layer], make_groups([layer]), num_blocks=5, block_tokens=4, device=str(DEVICE))


def test_a_cache_describes_the_memory_of_its_device() -> None:
    cache = a_cache()
    cache.data[3] = 7
    cache.wait_written()
    (region,) = cache.layout().regions
    assert (region.kind, region.device, region.address) == (KIND, DEVICE.index or 0, cache.data.data_ptr())
    (view,) = region_views([region], [cache.data])
    assert view.device == cache.data.device
    assert [bool(block.any()) for block in view.reshape(5, -1)] == [False, False, False, True, False]


def test_blocks_are_copied_and_cleared_on_the_device() -> None:
    cache = a_cache()
    for block in range(5):
        cache.data[block] = block
    cache.copy([(1, 2), (2, 3), (3, 1)])
    cache.clear([4])
    cache.wait_written()
    assert cache.data[:, 0].tolist() == [0, 3, 1, 2, 0]


def test_staging_memory_is_beside_the_cache() -> None:
    pool = StagingPool(8192, device=DEVICE.index)
    assert (pool.region.kind, pool.buffer.device) == (KIND, DEVICE)
    (view,) = region_views([pool.region], [pool.buffer])
    view[4096] = 9
    assert int(pool.buffer[4096]) == 9


@pytest.mark.engine
def test_an_engine_on_the_device_says_what_one_on_the_cpu_says(tiny_directory: Path) -> None:
    answers = []
    for device in ("cpu", str(DEVICE)):
        engine = Engine.load(EngineSettings(model=str(tiny_directory), dtype="float32", num_blocks=64, device=device))
        try:
            engine.add(ask("one", prompt_of(50)))
            answers.append(tokens_of(finish(engine)["one"]))
        finally:
            engine.close()
    assert answers[0] == answers[1]


@needs_cuda
def test_written_means_that_the_stream_has_ended() -> None:
    cache, ended = a_cache(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    for _ in range(200):
        cache.data.add_(1)
    ended.record()
    cache.wait_written()
    assert ended.query()  # type: ignore[no-untyped-call]
