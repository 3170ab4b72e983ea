"""Prefill's first token has log probabilities like all the others, in either mode and whoever sends the token first."""

from pathlib import Path

import pytest

from kvferry.engines.mini.settings import EngineSettings
from kvferry.settings import TransferMode
from tests.engines.mini.conftest import ask, prompt_of
from tests.harness.serving import Alone, Pair, Served

pytestmark = pytest.mark.engine

LOGPROBS = 3
REQUEST = ask("r", prompt_of(40), max_tokens=6, logprobs=LOGPROBS)


def served_by(serving: Alone | Pair) -> Served:
    try:
        return serving.serve([REQUEST])[0]
    finally:
        serving.close()


@pytest.mark.parametrize("first_token", [True, False])
@pytest.mark.parametrize("mode", list(TransferMode))
def test_the_first_token_is_like_the_others(tiny_directory: Path, mode: TransferMode, first_token: bool) -> None:
    settings = EngineSettings(model=str(tiny_directory), dtype="float32", num_blocks=64)
    alone = served_by(Alone(settings))
    found = served_by(Pair(settings, settings, mode=mode, first_token=first_token))
    assert found.tokens == alone.tokens
    assert [len(one.top) for one in found.logprobs] == [LOGPROBS] * 6
    for one, other in zip(found.logprobs, alone.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
