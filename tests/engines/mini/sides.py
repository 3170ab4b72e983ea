"""One side of a hand-off as the engine sees it: an engine and a fake connector, and what tests do with both."""

from typing import Any

from kvferry.engines.mini.api import Output
from kvferry.engines.mini.engine import Engine
from kvferry.wire.params import HandoffParams
from tests.engines.mini.conftest import MakeEngine, ask, finish
from tests.harness.fake_connector import FakeConnector, copy_tokens

FOR_REMOTE = HandoffParams(do_remote_decode=True)
FROM_REMOTE = HandoffParams(do_remote_prefill=True)
Side = tuple[Engine, FakeConnector]


def new_side(make_engine: MakeEngine, **changes: Any) -> Side:
    """Returns an engine and its connector."""
    found: list[FakeConnector] = []

    def connect(cache: Any) -> tuple[FakeConnector, FakeConnector]:
        found.append(FakeConnector(cache))
        return found[0], found[0]

    return make_engine(connector=connect, **changes), found[0]


def answer_alone(make_engine: MakeEngine, prompt: list[int], **sampling: Any) -> list[Output]:
    engine = make_engine(prefix_caching=False, max_batch_tokens=256)
    engine.add(ask("r", prompt, **sampling))
    return finish(engine)["r"]


def prefilled(side: Side, prompt: list[int], **sampling: Any) -> HandoffParams:
    engine, _ = side
    engine.add(ask("p", prompt, FOR_REMOTE, **sampling))
    last = finish(engine)["p"][-1]
    assert last.handoff is not None
    return last.handoff


def until_waiting(engine: Engine) -> None:
    for _ in range(3):
        assert engine.step() == []
        engine.check()
    assert engine.stats().waiting_for_kv == 1


def bring(source: Side, target: Side, name: str, stop: int, difference: str = "") -> None:
    """Copies what decode needs from the prefill request `p`."""
    (_, p), (_, d) = source, target
    request = next(request for request in d.tables if request == name)
    copy_tokens(p.cache, p.tables[next(iter(p.tables))], d.cache, d.tables[request], d.cached[request], stop)
    d.land(name, stop, difference=difference)


def finish_one(engine: Engine, name: str) -> Output:
    """Steps until `name` has ended."""
    for _ in range(200):
        for output in engine.step():
            if output.request_id == name and output.finish_reason:
                return output
        engine.check()
    raise AssertionError(f"{name} did not end")
