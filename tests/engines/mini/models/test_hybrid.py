"""Real networks on cache groups: prefix hits, chunks, preemption and blocks of any size change no token.

The tests of each family compare the tokens with those of transformers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.settings import EngineSettings
from tests.e2e.matrix import FAMILIES
from tests.engines.mini.conftest import ask, finish, prompt_of, tokens_of
from tests.harness.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

HYBRIDS = ("gemma3", "mamba")
LENGTHS = (3, 19, 40, 77, 64, 33)
SHAPES: dict[str, dict[str, Any]] = {
    "blocks of 4": {"block_tokens": 4, "num_blocks": 400, "max_batch_tokens": 24},
    "blocks of 64": {"block_tokens": 64, "num_blocks": 60},
    "a window smaller than a block, chunks of 7": {"block_tokens": 32, "num_blocks": 100, "max_batch_tokens": 7},
    "few blocks": {"block_tokens": 8, "max_batch_tokens": 32},
}
FEW = {"gemma3": 38, "mamba": 24}
"""Numbers of blocks of 8 tokens that are little more than the longest request needs."""


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(f"{request.param}-") / "model", "llama", **FAMILIES[request.param])


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[int, list[int]]:
    """The answer to each prompt alone, computed at once, in an empty cache."""
    engine = _engine(model, prefix_caching=False, num_blocks=100)
    found = {}
    for length in LENGTHS:
        engine.add(ask("r", prompt_of(length, length), max_tokens=12))
        found[length] = tokens_of(finish(engine)["r"])
    engine.close()
    return found


def _engine(model: Path, **settings: Any) -> Engine:
    return Engine.load(EngineSettings(**{"model": str(model), "dtype": "float32", "threads": 1, **settings}))


@pytest.fixture
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = _engine(model, **{"num_blocks": FEW[model.parent.name.split("-")[0]], **SHAPES[request.param]})
    yield made
    made.close()


@pytest.mark.parametrize("engine", list(SHAPES), indirect=True)
def test_hits_chunks_blocks_and_preemption_change_no_token(engine: Engine, alone: dict[int, list[int]]) -> None:
    cached = 0
    for turn in range(3):
        for length in LENGTHS:
            engine.add(ask(f"{turn}-{length}", prompt_of(length, length), max_tokens=12))
        for name, outputs in finish(engine).items():
            assert tokens_of(outputs) == alone[int(name.split("-")[1])], name
            account = outputs[-1].account
            assert account is not None
            cached += account.cached
    few = engine.settings.num_blocks in FEW.values()
    assert (engine.stats().preemptions > 0) == few
    assert few or cached > 0
    assert engine.blocks.num_free == engine.blocks.num_usable


def test_a_conversation_continues_after_its_cached_beginning(model: Path) -> None:
    """Each prompt repeats the previous one and its answer, as in chats; with and without the prefix cache."""
    with_cache = _engine(model, block_tokens=8, num_blocks=300)
    without = _engine(model, block_tokens=8, num_blocks=300, prefix_caching=False)
    tokens = prompt_of(30, 1)
    for turn in range(4):
        answers = []
        for engine in (with_cache, without):
            engine.add(ask(f"t{turn}", tokens, max_tokens=15))
            answers.append(finish(engine)[f"t{turn}"])
        assert tokens_of(answers[0]) == tokens_of(answers[1])
        account = answers[0][-1].account
        assert account is not None
        assert account.cached >= (len(tokens) - 12) // 8 * 8 - 8 or turn == 0
        tokens = [*tokens, *tokens_of(answers[0]), *prompt_of(10, turn)]
    with_cache.close()
    without.close()
