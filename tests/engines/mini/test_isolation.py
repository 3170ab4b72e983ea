"""An exception that one request causes ends that request: the engine lives, and all others get their right answers.

Each test lets one request of a batch raise in one place. With the guard of that place switched off, the exception
leaves `Engine.step`, which is the end of the engine.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engines.mini import isolation
from kvferry.engines.mini.api import Failure, FinishReason, Output
from kvferry.engines.mini.compute.sampling import SampledToken, SamplingRow, sample_tokens
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.ranks.executor import LocalExecutor
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.engines.mini.step import ChunkInput, StepInput
from kvferry.ids import RequestId
from kvferry.wire.params import HandoffParams
from tests.engines.mini.conftest import MakeEngine, ask, finish, prompt_of, tokens_of
from tests.harness.fake_connector import FakeConnector
from tests.harness.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

LENGTHS = (5, 40, 90, 33)
SAMPLING: dict[str, Any] = {"max_tokens": 10, "temperature": 0.8, "seed": 3, "repetition_penalty": 1.3}
BAD = "bad"


def add_all(engine: Engine, **bad: Any) -> None:
    """Adds four sound requests, and between them one that a test lets fail."""
    for i, length in enumerate(LENGTHS):
        engine.add(ask(str(i), prompt_of(length, i), **SAMPLING))
        if i == 1:
            engine.add(ask(BAD, prompt_of(50, 9), **{**SAMPLING, **bad}))


def sound(outputs: dict[str, list[Output]]) -> dict[str, list[int]]:
    return {name: tokens_of(found) for name, found in outputs.items() if name != BAD}


def wanted(engine: Engine) -> dict[str, list[int]]:
    """Returns the answers of the sound requests, without the other one."""
    for i, length in enumerate(LENGTHS):
        engine.add(ask(str(i), prompt_of(length, i), **SAMPLING))
    return sound(finish(engine))


def assert_it_failed(outputs: Sequence[Output], part: str) -> None:
    last = outputs[-1]
    assert (last.finish_reason, last.failure) == (FinishReason.ERROR, Failure.REQUEST_FAILED), last
    assert part in str(last.error)


def raise_in_step(engine: Engine, when: Callable[[ChunkInput], bool], after: bool = False) -> list[int]:
    """Lets computing raise for steps with such a chunk; `after` the cache was written. Returns the steps' sizes."""
    assert isinstance(engine.executor, LocalExecutor)
    rank, sizes = engine.executor._rank, []
    compute = rank.compute

    def computing(step: StepInput) -> torch.Tensor | None:
        sizes.append(len(step.chunks))
        bad = any(when(chunk) for chunk in step.chunks)
        result = compute(step) if after or not bad else None
        if bad:
            raise ArithmeticError("injected")
        return result

    rank.compute = computing  # type: ignore[method-assign]
    return sizes


def is_bad(engine: Engine, beyond: int) -> Callable[[ChunkInput], bool]:
    """Recognises chunks of the bad request that reach beyond a token, by its blocks."""

    def bad(chunk: ChunkInput) -> bool:
        request = engine._requests.get(RequestId(BAD))
        if request is None or not request.blocks:
            return False
        return chunk.tables[0].block_ids[0] == request.blocks[0].ids[0] and chunk.stop > beyond

    return bad


@pytest.mark.parametrize("beyond", [0, 49, 53], ids=["first chunk", "end of the prompt", "answer"])
@pytest.mark.parametrize("after", [False, True], ids=["before the cache", "after the cache"])
def test_an_exception_in_the_model_ends_the_request_that_causes_it(
    make_engine: MakeEngine, beyond: int, after: bool
) -> None:
    want = wanted(make_engine())
    engine = make_engine()
    raise_in_step(engine, is_bad(engine, beyond), after)
    add_all(engine)
    outputs = finish(engine)
    assert sound(outputs) == want
    assert_it_failed(outputs[BAD], "ArithmeticError: injected")
    assert len(tokens_of(outputs[BAD])) == max(0, beyond - 49)
    # Nothing wrong is in the prefix cache, and the engine serves on.
    assert wanted(engine) == want


def test_a_real_error_of_the_network_is_isolated(make_engine: MakeEngine) -> None:
    want = wanted(make_engine())
    engine = make_engine()
    add_all(engine)
    engine._requests[RequestId(BAD)].tokens[7] = 1 << 20  # as if no check had seen it
    outputs = finish(engine)
    assert sound(outputs) == want
    assert_it_failed(outputs[BAD], "IndexError")


@pytest.mark.parametrize("family", ["gemma3", "granite"])
def test_windows_and_states_are_right_after_a_step_that_failed(family: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m", family)
    settings = EngineSettings(model=str(directory), dtype="float32", num_blocks=200, max_batch_tokens=64)
    want = wanted(Engine.load(settings))
    for beyond in (0, 49, 53):
        engine = Engine.load(settings)
        raise_in_step(engine, is_bad(engine, beyond), after=True)
        add_all(engine)
        outputs = finish(engine)
        assert sound(outputs) == want
        assert_it_failed(outputs[BAD], "ArithmeticError: injected")
        assert wanted(engine) == want
        assert engine.blocks.num_free == engine.blocks.num_usable


def test_an_exception_in_sampling_ends_the_request_that_causes_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' tokens come from the same logits: nothing is computed again."""
    want = wanted(make_engine())
    steps = make_engine()
    add_all(steps)
    finish(steps)

    def sampling(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        chosen = sample_tokens(logits, rows)  # first, so that a method that changed the logits would be seen
        if any(row.seed == 666 and len(row.answer) == 3 for row in rows):
            raise OverflowError("injected")
        return chosen

    monkeypatch.setattr(isolation, "sample_tokens", sampling)
    engine = make_engine()
    add_all(engine, seed=666)
    outputs = finish(engine)
    assert sound(outputs) == want
    assert_it_failed(outputs[BAD], "OverflowError: injected")
    assert len(tokens_of(outputs[BAD])) == 3
    assert engine.stats().steps <= steps.stats().steps


@pytest.mark.parametrize("place", ["answer", "take"])
def test_an_exception_for_an_answers_text_ends_its_request(make_engine: MakeEngine, place: str) -> None:
    want = wanted(make_engine())
    engine = make_engine()
    add_all(engine)
    answer = engine._requests[RequestId(BAD)].answer

    def fail(*_: Any) -> None:
        raise UnicodeError("injected")

    if place == "answer":
        answer.push = fail  # type: ignore[method-assign, assignment]
    else:
        answer._detokenizer.push = fail  # type: ignore[union-attr, method-assign]
    outputs = finish(engine)
    assert sound(outputs) == want
    assert_it_failed(outputs[BAD], "UnicodeError: injected")


def test_an_exception_in_planning_ends_its_request(make_engine: MakeEngine) -> None:
    want = wanted(make_engine())
    engine = make_engine()
    look_up = engine.scheduler._look_up

    def looking(request: Any) -> Any:
        if request.request_id == BAD:
            raise ValueError("injected")
        return look_up(request)

    engine.scheduler._look_up = looking  # type: ignore[method-assign]
    add_all(engine)
    outputs = finish(engine)
    assert sound(outputs) == want
    assert_it_failed(outputs[BAD], "ValueError: injected")


def test_a_request_that_cannot_be_added_leaves_nothing(make_engine: MakeEngine) -> None:
    found: list[FakeConnector] = []

    def connect(cache: Any) -> tuple[FakeConnector, FakeConnector]:
        found.append(FakeConnector(cache))
        return found[0], found[0]

    engine = make_engine(connector=connect)

    def fail(_: Any) -> None:
        raise TypeError("injected")

    found[0].on_new_request = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError, match="injected"):
        engine.add(ask("r", prompt_of(20)))
    assert not engine.has_work()
    assert found[0].seen == ["finished r aborted"]


def test_a_prefill_whose_step_failed_for_another_is_offered_again(make_engine: MakeEngine) -> None:
    """Its blocks stay as they are until the peer that may read them is done (R28)."""
    found: list[FakeConnector] = []

    def connect(cache: Any) -> tuple[FakeConnector, FakeConnector]:
        found.append(FakeConnector(cache, may_start_again=True))
        return found[0], found[0]

    engine = make_engine(connector=connect, max_batch_tokens=64)
    raise_in_step(engine, is_bad(engine, 0), after=True)
    engine.add(ask("p", prompt_of(100), HandoffParams(do_remote_decode=True)))
    engine.step()
    engine.add(ask(BAD, prompt_of(50, 9)))
    outputs: dict[str, list[Output]] = {}
    for _ in range(10):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()
    assert_it_failed(outputs[BAD], "injected")
    assert "preempted p" in found[0].seen
    last = outputs["p"][-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.handoff is not None
    assert last.handoff.remote_num_tokens == 100
    assert engine.blocks.num_held
    found[0].release("p")
    finish(engine)
    assert engine.blocks.num_held == 0


def test_suspects_run_alone_and_others_go_on_after_them(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sizes = raise_in_step(engine, is_bad(engine, 53))
    add_all(engine)
    finish(engine)
    at = next(i for i, size in enumerate(sizes) if size == 1 and i > 3)
    assert sizes[at - 1] == 5, "the step that failed had all requests"
    assert max(sizes[at:]) == 4, "the sound ones are in one batch again"


def test_what_fails_whatever_is_computed_is_the_end_of_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    add_all(engine)
    engine.step()
    raise_in_step(engine, lambda _: True)
    with pytest.raises(ArithmeticError):
        finish(engine)
    assert len(engine.suspects) == 1, "the one that was being computed when the engine was found broken"


@pytest.fixture(scope="module")
def plain_bytes() -> list[list[int]]:
    engine = Engine.load(EngineSettings(model="byte-mtp", dtype="float32", num_blocks=200))
    return _byte_answers(engine)


def _byte_answers(engine: Engine) -> list[list[int]]:
    for i, text in enumerate((b"def add(a, b):\n    return", b"import os\nimport sys\nimport os\nimport", b"class A:")):
        engine.add(ask(str(i), list(text), max_tokens=24))
    found = finish(engine)
    return [tokens_of(found[str(i)]) for i in range(3)]


def test_a_drafter_with_kv_that_raises_ends_the_request_that_causes_it(plain_bytes: list[list[int]]) -> None:
    speculation = SpeculationSettings(method="mtp", num_speculative_tokens=3)
    engine = Engine.load(EngineSettings(model="byte-mtp", dtype="float32", num_blocks=200, speculation=speculation))
    assert isinstance(engine.executor, LocalExecutor)
    drafter = engine.executor._rank._drafter
    assert drafter is not None
    draft = drafter.draft

    def drafting(order: Any) -> Any:
        result = draft(order)
        if any(chunk.key.startswith(BAD) and chunk.num_computed > 12 for chunk in order.chunks):
            raise ZeroDivisionError("injected")
        return result

    drafter.draft = drafting  # type: ignore[method-assign]
    engine.add(ask(BAD, list(b"x = [1, 2, "), max_tokens=24))
    for i, text in enumerate((b"def add(a, b):\n    return", b"import os\nimport sys\nimport os\nimport", b"class A:")):
        engine.add(ask(str(i), list(text), max_tokens=24))
    found = finish(engine)
    assert [tokens_of(found[str(i)]) for i in range(3)] == plain_bytes
    assert_it_failed(found[BAD], "ZeroDivisionError: injected")
    assert _byte_answers(engine) == plain_bytes
    assert sum(engine.stats().acceptance.accepted) > 0


def test_a_request_whose_text_drafter_raises_goes_on_without_drafts(plain_bytes: list[list[int]]) -> None:
    speculation = SpeculationSettings(method="ngram", num_speculative_tokens=3)
    engine = Engine.load(EngineSettings(model="byte-mtp", dtype="float32", num_blocks=200, speculation=speculation))
    assert engine._speculation is not None
    drafter: Any = engine._speculation._text
    propose = drafter.propose

    def proposing(request: RequestId, *args: Any) -> Any:
        if request == "1":
            raise ZeroDivisionError("injected")
        return propose(request, *args)

    drafter.propose = proposing
    assert _byte_answers(engine) == plain_bytes
