"""Fixtures: a tiny model, and engines that run it and are checked for lost blocks after each test."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engines.mini.api import GenerateRequest, Output, SamplingParams
from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.loading import LoadedModel, load_model
from kvferry.engines.mini.ranks.executor import LocalExecutor
from kvferry.engines.mini.settings import EngineSettings
from kvferry.ids import RequestId
from kvferry.wire.params import HandoffParams
from tests.harness.tiny_model import make_tiny_model, whole_cache

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Limits torch to one thread, because test processes share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a Llama with three layers."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_model(tiny_directory: Path) -> LoadedModel:
    """The same model, loaded once."""
    return load_model(EngineSettings(model=str(tiny_directory), dtype="float32"))


@pytest.fixture
def make_engine(tiny_model: LoadedModel) -> Iterator[MakeEngine]:
    """Makes engines that run the tiny model. After the test, no block of any engine may be lost or in use."""
    engines: list[Engine] = []

    def make(connector: Any = None, clock: Any = None, **changes: Any) -> Engine:
        settings = EngineSettings(**{"num_blocks": 64, "max_batch_tokens": 64, **changes})
        cache = whole_cache(tiny_model, settings)
        scheduler, worker = connector(cache) if connector else (None, None)
        executor = LocalExecutor(tiny_model.network, cache, worker)
        engines.append(Engine(tiny_model, executor, settings, connector=scheduler, clock=clock))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check()
        for request in [
            *engine.scheduler.running,
            *engine.scheduler.waiting,
            *engine.scheduler.waiting_for_kv.values(),
        ]:
            engine.abort(request.request_id)
        engine.check()
        used = engine.blocks.num_usable - engine.blocks.num_free - engine.blocks.num_held
        assert used == 0, f"{used} blocks are still in use"
        assert not torch.count_nonzero(cache_of(engine).data[0]), "block 0 was written to"


def cache_of(engine: Engine) -> KVCache:
    """Returns the cache of an engine with one rank in this process."""
    assert isinstance(engine.executor, LocalExecutor)
    return engine.executor.cache


def ask(name: str, prompt: Sequence[int], handoff: HandoffParams | None = None, **sampling: Any) -> GenerateRequest:
    """Returns a greedy request for 8 tokens that never ends early; `sampling` changes it."""
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id=RequestId(name), prompt_token_ids=tuple(prompt), sampling=SamplingParams(**params), handoff=handoff
    )


def finish(engine: Engine, *, max_steps: int = 2000) -> dict[str, list[Output]]:
    """Steps until nothing is left to do, with a check after every step. Returns all outputs by request."""
    outputs: dict[str, list[Output]] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()
    raise AssertionError(f"not done after {max_steps} steps: {engine.stats()}")


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    """Returns all tokens of one request's outputs."""
    return [token for output in outputs for token in output.token_ids]


def text_of(outputs: Sequence[Output]) -> str:
    """Returns all text of one request's outputs."""
    return "".join(output.text for output in outputs)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Returns random tokens that are not special ones."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, 264, (length,), generator=random).tolist()
