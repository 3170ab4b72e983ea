"""What the connector raises about one request, or the end of one hand-off raises, ends that request only.

With the guard of a place switched off, the exception leaves `Engine.step`, which is the end of the engine.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.connector.base import Match
from kvferry.engines.mini.api import Output
from kvferry.engines.mini.engine import Engine
from kvferry.ids import RequestId
from tests.engines.mini.conftest import MakeEngine, ask, finish, prompt_of, tokens_of
from tests.engines.mini.sides import FOR_REMOTE, FROM_REMOTE, Side, answer_alone, new_side, until_waiting
from tests.engines.mini.test_isolation import BAD, assert_it_failed

pytestmark = pytest.mark.engine


def raise_for_bad(owner: Any, name: str, of: Callable[..., str] = lambda request, *_, **__: request.request_id) -> None:
    """Lets a method raise for the bad request, before it does anything."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if of(*args, **kwargs) == BAD:
            raise LookupError("injected")
        return original(*args, **kwargs)

    setattr(owner, name, call)


def add_sound(engine: Engine) -> None:
    """Adds a request without a hand-off."""
    engine.add(ask("sound", prompt_of(50, 1), max_tokens=6))


def assert_sound(make_engine: MakeEngine, engine: Engine, outputs: dict[str, list[Output]]) -> None:
    """The other request has its right answer, and no block is lost."""
    assert tokens_of(outputs["sound"]) == tokens_of(answer_alone(make_engine, prompt_of(50, 1)))[:6]
    engine.check()
    assert not engine.has_work()
    assert engine.blocks.num_free == engine.blocks.num_usable


@pytest.fixture
def side(make_engine: MakeEngine) -> Side:
    return new_side(make_engine)


def test_an_exception_at_the_start_of_a_handoff_ends_its_request(make_engine: MakeEngine, side: Side) -> None:
    engine, connector = side
    raise_for_bad(connector, "after_alloc")
    add_sound(engine)
    engine.add(ask(BAD, prompt_of(40), FROM_REMOTE))
    outputs = finish(engine)
    assert_it_failed(outputs[BAD], "LookupError: injected")
    assert_sound(make_engine, engine, outputs)


@pytest.mark.parametrize("call", ["computed", "request_finished"])
def test_an_exception_while_a_prompt_is_offered_ends_its_request(
    make_engine: MakeEngine, side: Side, call: str
) -> None:
    """Its blocks stay as they are while a peer may read them, and come back with the release (R28)."""
    engine, connector = side
    connector.may_start_again = True
    add_sound(engine)
    engine.add(ask(BAD, prompt_of(40), FOR_REMOTE))
    raise_for_bad(connector, call)
    outputs: dict[str, list[Output]] = {}
    while BAD not in outputs or "sound" not in outputs or outputs["sound"][-1].finish_reason is None:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert_it_failed(outputs[BAD], "LookupError: injected")
    assert outputs[BAD][-1].handoff is None
    assert (engine.blocks.num_held > 0) == (call == "request_finished")
    connector.release(BAD)
    finish(engine)
    assert_sound(make_engine, engine, outputs)


def test_an_exception_when_an_offer_is_taken_back_ends_its_request(make_engine: MakeEngine, side: Side) -> None:
    engine, connector = side
    engine.add(ask(BAD, prompt_of(40), FROM_REMOTE))
    until_waiting(engine)
    connector.land(BAD, 40)
    engine.step()
    raise_for_bad(connector, "preempted")
    add_sound(engine)
    engine.scheduler.suspect(engine._requests[RequestId(BAD)], 41)
    outputs = finish(engine)
    assert_it_failed(outputs[BAD], "LookupError: injected")
    assert_sound(make_engine, engine, outputs)


@pytest.mark.parametrize("method", ["run", "landed"])
def test_an_exception_after_a_handoff_has_landed_ends_its_request(
    make_engine: MakeEngine, side: Side, method: str
) -> None:
    engine, connector = side
    engine.add(ask(BAD, prompt_of(40), FROM_REMOTE))
    until_waiting(engine)
    raise_for_bad(engine.scheduler, method)
    add_sound(engine)
    connector.land(BAD, 40)
    outputs = finish(engine)
    assert_it_failed(outputs[BAD], "LookupError: injected")
    assert_sound(make_engine, engine, outputs)


@pytest.mark.parametrize("tables", ["tables_at", "run"])
def test_an_exception_when_a_request_gets_its_blocks_ends_it(make_engine: MakeEngine, side: Side, tables: str) -> None:
    engine, connector = side
    connector.answers = [Match(reason="nothing there")] if tables == "run" else []
    engine.add(ask(BAD, prompt_of(40), FROM_REMOTE))
    bad = engine._requests[RequestId(BAD)]

    def fail(*_: Any) -> None:
        del bad.tables_at  # once
        raise LookupError("injected")

    if tables == "run":
        raise_for_bad(engine.scheduler, "run")
    else:
        bad.tables_at = fail  # type: ignore[method-assign, assignment]
    add_sound(engine)
    outputs = finish(engine)
    assert_it_failed(outputs[BAD], "LookupError: injected")
    assert_sound(make_engine, engine, outputs)


@pytest.mark.parametrize(
    ("method", "released"),
    [
        ("remove", False),
        ("give_up_blocks", False),
        ("enqueue", False),
        ("remove", True),
        ("run", True),
        ("landed", True),
    ],
)
def test_an_exception_after_a_handoff_has_failed_ends_its_request(
    make_engine: MakeEngine, side: Side, method: str, released: bool
) -> None:
    """Its blocks are not given to others before no peer can write to them (R28)."""
    engine, connector = side
    engine.add(ask(BAD, prompt_of(40), FROM_REMOTE))
    until_waiting(engine)
    original = getattr(engine.scheduler, method)

    def once(*args: Any) -> None:
        setattr(engine.scheduler, method, original)
        raise LookupError("injected")

    setattr(engine.scheduler, method, once)
    connector.fail(BAD, released=released)
    (output,) = engine.step()
    assert_it_failed([output], "LookupError: injected")
    assert (engine.blocks.num_held > 0) is not released
    add_sound(engine)
    if not released:
        connector.release(BAD)
    assert_sound(make_engine, engine, finish(engine))
