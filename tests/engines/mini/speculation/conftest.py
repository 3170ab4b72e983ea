"""Fixtures: engines that draft, alone and in pairs, with the trained byte-level model; answers without drafts."""

import json
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engines.mini.api import GenerateRequest, SamplingParams
from kvferry.engines.mini.models.catalog import model_directory
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation.acceptance import Acceptance
from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.ids import RequestId
from tests.harness.serving import Alone, Served, Serving

SOURCE = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
MakeServing = Callable[..., Serving]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def byte_mtp() -> str:
    return str(model_directory("byte-mtp"))


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same weights, with a window of 6 tokens in every other layer and module: smaller than blocks and prompts."""
    directory = tmp_path_factory.mktemp("windowed")
    for file in model_directory("byte-mtp").iterdir():
        shutil.copy(file, directory)
    config = json.loads((directory / "config.json").read_text())
    config["layer_types"] = ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]
    config["sliding_window"] = 6
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture
def serving() -> Iterator[MakeServing]:
    """Makes Alone(...) or Pair(...), and closes it at the end."""
    made: list[Serving] = []

    def make(kind: type[Serving], *args: Any, **kwargs: Any) -> Serving:
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def engine(model: str, method: str | None = None, count: int = 0, **changes: Any) -> EngineSettings:
    """Returns settings in float32: the same tokens in every batch. Keys of speculation begin with `spec_`."""
    spec = {name.removeprefix("spec_"): changes.pop(name) for name in list(changes) if name.startswith("spec_")}
    if method is not None:
        changes["speculation"] = SpeculationSettings(method=method, num_speculative_tokens=count, **spec)
    return EngineSettings(**{"model": model, "dtype": "float32", "num_blocks": 600, "block_tokens": 4, **changes})


def text(length: int, place: int = 0) -> tuple[int, ...]:
    """Returns a prompt from a source file."""
    return tuple(SOURCE[place : place + length])


def texts(lengths: Sequence[int], stride: int) -> list[tuple[int, ...]]:
    """Returns a prompt of each length, no two of which begin with the same four tokens: none hits another's prefix."""
    prompts: dict[tuple[int, ...], tuple[int, ...]] = {}
    for length in lengths:
        place = stride * length
        while text(min(length, 4), place) in prompts:
            place += 1
        prompts[text(min(length, 4), place)] = text(length, place)
    return list(prompts.values())


_count = 0


def ask(prompts: Sequence[Sequence[int]], max_tokens: int = 12, **sampling: Any) -> list[GenerateRequest]:
    """Returns requests, greedy unless `sampling` says otherwise."""
    global _count
    _count += 1
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **sampling})
    return [
        GenerateRequest(request_id=RequestId(f"{_count}.{i}"), prompt_token_ids=tuple(prompt), sampling=params)
        for i, prompt in enumerate(prompts)
    ]


def tokens(served: Sequence[Served]) -> list[list[int]]:
    return [one.tokens for one in served]


def accepted(one: Serving) -> Acceptance:
    return one.engine.stats().acceptance


@pytest.fixture(scope="session")
def plain() -> Iterator[Callable[..., list[list[int]]]]:
    """The answers without speculation, each model loaded once."""
    engines: dict[str, Alone] = {}

    def answers(model: str, prompts: Sequence[Sequence[int]], max_tokens: int = 12, **sampling: Any) -> list[list[int]]:
        if model not in engines:
            torch.set_num_threads(1)
            engines[model] = Alone(engine(model))
        return tokens(engines[model].serve(ask(prompts, max_tokens, **sampling)))

    yield answers
    for one in engines.values():
        one.close()
