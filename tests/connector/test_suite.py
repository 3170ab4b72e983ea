"""The suite that every engine must pass: the embedded engine, and the one of examples/own_engine.py."""

import importlib.util
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvferry.connector.engine import EngineConnector
from kvferry.engines.mini.api import FinishReason, GenerateRequest, SamplingParams
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.worker import Worker, WorkerSettings, build_worker
from kvferry.ids import RequestId
from kvferry.settings import FailurePolicy, FerrySettings, Role, TransferSettings
from kvferry.testing.connector_suite import ConnectorSuite, Contract, ContractBroken, Ended, EngineUnderTest, prompt_of
from kvferry.wire.params import HandoffParams
from tests.harness.repository import ROOT
from tests.harness.tiny_model import make_tiny_model

_NUMBERS = itertools.count()


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


own: Any = load_example("own_engine")


class OwnAdapter:
    """The engine of examples/own_engine.py."""

    def __init__(self, role: Role, settings: FerrySettings) -> None:
        block_tokens = 16 if role is Role.PREFILL else 8
        self.engine = own.OwnEngine(f"{role}-{next(_NUMBERS)}", role, settings, block_tokens)
        self.requests: dict[str, Any] = {}

    @property
    def connector(self) -> EngineConnector:
        connector: EngineConnector = self.engine.connector
        return connector

    @property
    def num_blocks_in_use(self) -> int:
        return int(own.NUM_BLOCKS - len(self.engine.free))

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        handoff: HandoffParams | None = None,
        on_failure: FailurePolicy | None = None,
    ) -> None:
        request = own.request_of(request_id, list(prompt), max_tokens, handoff)
        request.on_failure = on_failure
        self.requests[request_id] = request
        self.engine.add(request)

    def abort(self, request_id: str) -> None:
        if request_id in self.requests:
            self.engine.abort(self.requests[request_id])

    def step(self) -> Sequence[Ended]:
        ended = []
        for one in self.engine.step():
            del self.requests[one.request_id]
            answer = tuple(one.tokens[one.num_prompt_tokens :])
            ended.append(Ended(one.request_id, answer, one.params, one.error))
        return ended

    def has_work(self) -> bool:
        return bool(self.engine.has_work())

    def close(self) -> None:
        self.engine.close()


class TestOwnEngine(ConnectorSuite):
    def make_engine(self, role: Role, settings: FerrySettings) -> EngineUnderTest:
        return OwnAdapter(role, settings)


class MiniAdapter:
    """The embedded engine, with one rank in this process."""

    def __init__(self, model: Path, role: Role, settings: FerrySettings) -> None:
        block_tokens = 16 if role is Role.PREFILL else 8
        engine = EngineSettings(
            model=str(model), dtype="float32", block_tokens=block_tokens, num_blocks=129, max_batch_tokens=32, threads=1
        )
        self.worker: Worker = build_worker(WorkerSettings(engine=engine, ferry=settings, role=role))
        self.tokens: dict[str, list[int]] = {}

    @property
    def connector(self) -> EngineConnector:
        return self.worker.connector

    @property
    def num_blocks_in_use(self) -> int:
        blocks = self.worker.engine.blocks
        return blocks.num_usable - blocks.num_free

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        handoff: HandoffParams | None = None,
        on_failure: FailurePolicy | None = None,
    ) -> None:
        self.tokens[request_id] = []
        self.worker.engine.add(
            GenerateRequest(
                request_id=RequestId(request_id),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                handoff=handoff,
                on_failure=on_failure,
            )
        )

    def abort(self, request_id: str) -> None:
        self.worker.engine.abort(RequestId(request_id))

    def step(self) -> Sequence[Ended]:
        ended = []
        for output in self.worker.engine.step():
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                error = output.error or ("error" if output.finish_reason is FinishReason.ERROR else "")
                tokens = tuple(self.tokens.pop(output.request_id))
                ended.append(Ended(output.request_id, tokens, output.handoff, error))
        return ended

    def has_work(self) -> bool:
        return self.worker.engine.has_work()

    def close(self) -> None:
        self.worker.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("suite") / "llama")


@pytest.mark.engine
class TestEmbeddedEngine(ConnectorSuite):
    @pytest.fixture(autouse=True)
    def _model(self, tiny: Path) -> None:
        self.model = tiny

    def make_engine(self, role: Role, settings: FerrySettings) -> EngineUnderTest:
        return MiniAdapter(self.model, role, settings)


# The suite finds the faults that it is meant to find


class Careless(own.OwnEngine):  # type: ignore[misc]
    """An engine that releases blocks at once, whatever a peer may still do with them."""

    def _end(self, request: Any, *, aborted: bool = False) -> None:
        super()._end(request, aborted=aborted)
        for transfer in list(self.held):
            self.free: list[int] = self.held.pop(transfer) + self.free


@pytest.fixture
def settings() -> FerrySettings:
    return FerrySettings(transfer=TransferSettings(transport="memory", staging_bytes=0))


def watched(engine_class: Any, settings: FerrySettings) -> Any:
    """Returns an own engine whose scheduler half is wrapped in the contract."""
    engine = engine_class(f"p-{next(_NUMBERS)}", Role.PREFILL, settings)
    engine.half = Contract(engine.half, [engine.block_tokens])
    return engine


def to_prefill(name: str, index: int) -> Any:
    return own.request_of(name, prompt_of(index), 1, HandoffParams(do_remote_decode=True, transfer_id=f"t-{name}"))


def test_blocks_that_are_reused_too_early_are_found(settings: FerrySettings) -> None:
    engine = watched(Careless, settings)
    try:
        engine.add(to_prefill("first", 0))
        engine.step()
        engine.add(to_prefill("second", 1))
        with pytest.raises(ContractBroken, match="which a peer may touch for 't-first'"):
            engine.step()
    finally:
        engine.close()


def test_calls_that_are_missing_or_come_twice_are_found(settings: FerrySettings) -> None:
    engine = watched(own.OwnEngine, settings)
    try:
        request = to_prefill("r", 0)
        with pytest.raises(ContractBroken, match=r"match\('r'\) comes before on_new_request"):
            engine.half.match(request, 0)
        engine.add(request)
        with pytest.raises(ContractBroken, match="called twice"):
            engine.half.on_new_request(request)
        with pytest.raises(ContractBroken, match="comes without a match"):
            engine.half.after_alloc(request, (), 0)
        with pytest.raises(ContractBroken, match="request_finished was never called"):
            engine.half.check_ended()
    finally:
        engine.close()
