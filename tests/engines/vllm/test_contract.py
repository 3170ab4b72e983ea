"""vLLM's own scheduler with our connector, step by step, without a model: the cases that vLLM tests connectors with.

Runs in the virtual environment that has vLLM (make test-vllm). What the workers would report is made here; everything
else, the handshake between two engines in one process included, is real.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.vllm_only import VLLM_MARKS, require_vllm

require_vllm()

import torch
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.request import RequestStatus

from kvferry.connector.base import Failed, Landed, StepOrders, StepReport
from kvferry.engines.vllm.channel.worker_channel import WorkerChannel
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.describe.head_packing import classify, measure
from kvferry.engines.vllm.scheduler_side.engine_sleep import EngineSleep
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import TokenRange
from tests.engines.vllm.servers import poll_until
from tests.harness.vllm_engine import Engine, failed, landed, released
from tests.harness.vllm_models import make_model

pytestmark = VLLM_MARKS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=1)


@pytest.fixture
def prefill(model: Path) -> Iterator[Engine]:
    engine = Engine(model, "kv_producer", "p")
    yield engine
    engine.close()


@pytest.fixture(params=["fail", "recompute"])
def decode(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(model, "kv_consumer", "d", policy=request.param)
    yield engine
    engine.close()


def test_prefill_keeps_its_blocks_until_the_workers_release_them(prefill: Engine) -> None:  # R15 R25
    params = prefill.prefilled()
    assert (params["do_remote_prefill"], params["transfer_mode"], params["remote_num_tokens"]) == (True, "pull", 40)
    assert prefill.num_free == prefill.free - 3
    assert prefill.scheduler.has_requests(), "the workers do not know yet"
    prefill.step()
    assert prefill.num_free == prefill.free - 3
    assert not prefill.scheduler.has_requests(), "the engine sleeps while a peer may read"
    prefill.step(released(params))
    assert prefill.num_free == prefill.free
    assert not prefill.scheduler.requests


def test_an_engine_that_was_asked_to_end_waits_for_its_peers(prefill: Engine) -> None:  # R25
    params = prefill.prefilled()
    prefill.step()
    prefill.shutdown_state = EngineShutdownState.REQUESTED
    assert prefill.scheduler.has_requests()
    prefill.step(released(params))
    assert not prefill.scheduler.has_requests()


@pytest.fixture
def sent() -> list[StepOrders]:
    """Orders that the worker received over the channel."""
    return []


@pytest.fixture
def line(sent: list[StepOrders]) -> Iterator[WorkerChannel]:
    one = WorkerChannel(sent.append)
    yield one
    one.close()


def test_orders_over_the_channel_do_not_wait_for_a_step(
    model: Path, line: WorkerChannel, sent: list[StepOrders]
) -> None:
    prefill = Engine(model, "kv_producer", "p", channel_address=line.address)
    orders: list[StepOrders] = []
    other = WorkerChannel(orders.append)
    decode = Engine(model, "kv_consumer", "d", channel_address=other.address)
    try:
        params = prefill.prefilled()
        line.catch_up()
        assert [offer.final for one in sent for offer in one.offer] == [True], "in the step that computed it"
        request = decode.add("d1", 40, params)
        decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
        other.catch_up()
        assert orders[0].accepted, "who it is, before what is wanted of it"
        assert [want.wanted for one in orders for want in one.fetch] == [TokenRange(0, 40)]
        assert not decode.last.kv_connector_metadata.orders
        line.catch_up()
        assert any(one.accepted for one in sent), "an idle prefill learns of decode at once"
    finally:
        prefill.close()
        decode.close()
        other.close()


def test_reports_over_the_channel_free_blocks_of_an_engine_that_sleeps(
    model: Path, line: WorkerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:  # R25
    slept: list[float] = []
    monkeypatch.setattr(EngineSleep, "sleep", lambda _self, timeout_s: slept.append(timeout_s))
    engine = Engine(model, "kv_producer", "p", channel_address=line.address)
    try:
        params = engine.prefilled()
        engine.step()
        assert not engine.scheduler.has_requests()
        assert engine.num_free == engine.free - 3
        assert poll_until(lambda: line.connected, 10.0, every_s=0.01) >= 0
        assert line.send(released(params))
        assert engine.input_queue is not None
        assert engine.input_queue.get(timeout=10.0)[0] is EngineCoreRequestType.WAKEUP
        assert engine.scheduler.has_requests(), "a step, for vLLM's metrics"
        assert engine.scheduler.has_requests()
        assert slept == [pytest.approx(0.02)], "which can wait for a moment, once"
        assert engine.num_free == engine.free
        engine.step()
        assert not engine.scheduler.has_requests()
    finally:
        engine.close()


def test_decode_sleeps_while_everything_waits_for_prefill(
    model: Path, prefill: Engine, line: WorkerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(EngineSleep, "sleep", lambda _self, timeout_s: slept.append(timeout_s))
    decode = Engine(model, "kv_consumer", "d", channel_address=line.address)
    try:
        params = prefill.prefilled()
        request = decode.add("d1", 40, params)
        while request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            assert not slept, "a handshake is asked for step by step"
            decode.step()
        slept.clear()
        decode.step()
        assert len(slept) == 1
        other = decode.add("o", 20, None, max_tokens=2)
        decode.step()
        assert len(slept) == 1, "there is something to compute"
        decode.scheduler.finish_requests(other.request_id, RequestStatus.FINISHED_ABORTED)
        decode.step()
        assert poll_until(lambda: line.connected, 10.0, every_s=0.01) >= 0
        slept.clear()
        assert line.send(landed(request, params))
        assert decode.input_queue is not None
        decode.input_queue.get(timeout=10.0)
        decode.step()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        decode.step()
        assert request.status is RequestStatus.RUNNING, "the step in progress has informed vLLM"
        assert not slept
    finally:
        decode.close()


def test_an_engine_that_cannot_be_woken_steps_while_blocks_are_held(model: Path) -> None:
    engine = Engine(model, "kv_producer", "p", queued=False)
    try:
        params = engine.prefilled()
        engine.step()
        assert engine.scheduler.has_requests()
        engine.step(released(params))
        assert not engine.scheduler.has_requests()
    finally:
        engine.close()


def test_a_prefill_of_several_chunks_is_offered_as_it_grows(prefill: Engine) -> None:
    prefill.add("p1", 150, {"do_remote_decode": True}, max_tokens=1)
    offers = []
    for _ in range(4):
        prefill.step()
        offers += prefill.last.kv_connector_metadata.orders.offer
    assert [(offer.ready.stop, offer.final) for offer in offers] == [(64, False), (128, False), (150, True)]


def test_an_aborted_prefill_releases_its_blocks(prefill: Engine) -> None:
    request = prefill.add("p1", 150, {"do_remote_decode": True, "transfer_id": "t"}, max_tokens=1)
    prefill.step()
    prefill.step()
    prefill.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    prefill.step()
    assert prefill.last.kv_connector_metadata.orders.withdraw
    prefill.step(released({"transfer_id": "t"}))
    assert prefill.num_free == prefill.free


def test_decode_waits_and_then_computes_one_token(prefill: Engine, decode: Engine) -> None:  # R36
    params = prefill.prefilled()
    request = decode.add("d1", 40, params)
    decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
    decode.step(landed(request, params))
    decode.step()
    assert decode.last.num_scheduled_tokens == {"d1": 1}
    assert request.prefill_stats is None or request.prefill_stats.num_external_cached_tokens == 40
    while decode.scheduler.requests:
        decode.step()
    assert decode.num_free == decode.free


def test_whole_blocks_that_decode_has_are_not_requested(prefill: Engine, decode: Engine) -> None:  # R30
    params = prefill.prefilled()
    first = decode.add("d1", 40, None)
    while not first.is_finished():
        decode.step()
    request = decode.add("d2", 40, params)
    decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
    wants = decode.last.kv_connector_metadata.orders.fetch
    assert [want.wanted for want in wants] == [TokenRange(32, 40)]


def test_a_failed_load_ends_by_policy_and_no_block_is_lost(prefill: Engine, decode: Engine) -> None:  # R28 R29
    params = prefill.prefilled()
    request = decode.add("d1", 40, params)
    decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
    decode.step(failed(request, params))
    policy = decode.scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy
    ends: list[Any] = []
    for _ in range(8):
        outputs = decode.step()
        ends += [
            one.finish_reason for batch in outputs.values() for one in batch.outputs if one.finish_reason is not None
        ]
    assert len(ends) == 1
    assert (str(ends[0]) == "error") is (policy == "fail")
    assert decode.num_free == decode.free - 3, "a peer may still write into the old blocks"
    decode.step(released(params))
    assert decode.num_free == decode.free
    assert not decode.scheduler.has_requests()


def test_an_abort_during_the_load(prefill: Engine, decode: Engine) -> None:  # R28
    params = prefill.prefilled()
    request = decode.add("d1", 40, params)
    decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
    decode.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    decode.step()
    assert decode.num_free == decode.free - 3
    decode.step(released(params))
    assert decode.num_free == decode.free
    assert not decode.scheduler.has_requests()


def test_an_abort_in_the_step_in_which_the_load_lands(prefill: Engine, decode: Engine) -> None:
    params = prefill.prefilled()
    request = decode.add("d1", 40, params)
    decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
    decode.step(landed(request, params))
    decode.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    decode.step()
    assert decode.num_free == decode.free
    assert not decode.scheduler.has_requests()


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": 1.5},
        {"do_remote_prefill": True},
        {
            "do_remote_prefill": True,
            "transfer_id": "x",
            "remote_engine_id": "q",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        },
    ],
)
def test_parameters_that_lead_nowhere_end_by_policy(decode: Engine, params: dict[str, Any]) -> None:  # R29
    from tests.engines.vllm.servers import poll_until

    decode.add("d1", 40, params)
    ends: list[str] = []

    def ended() -> bool:
        outputs = decode.step()
        ends.extend(str(one.finish_reason) for batch in outputs.values() for one in batch.outputs if one.finish_reason)
        return not decode.scheduler.requests

    assert poll_until(ended, 30.0, every_s=0.01) >= 0
    policy = decode.scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy
    assert (ends == ["error"]) is (policy == "fail")
    assert decode.num_free == decode.free


def test_reports_of_unknown_requests_change_nothing(decode: Engine) -> None:
    decode.add("d1", 40, None)
    for name in ("x", "y"):
        bad = Failed(TransferId(name), RequestId(name), "?", TokenRange(0, 0))
        good = Landed(TransferId(name), RequestId(name), TokenRange(0, 1), 1, 1, 0.1)
        decode.step(StepReport(landed=(good,), failed=(bad,), released=frozenset({TransferId(name)})))
    assert not {"x", "y"} & set(decode.scheduler.requests)


def test_the_entry_point_registers_the_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvferry.engines.vllm.plugin import register

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVFerryConnector") is KVFerryConnector


@pytest.mark.parametrize(("isa", "dtype", "plain"), [("vec", "float32", True), ("vec16", "float32", True),
                                                    ("vec", "bfloat16", True), ("amx", "bfloat16", False)])  # fmt: skip
def test_the_orders_of_the_kernels_are_measured(isa: str, dtype: str, plain: bool) -> None:
    """What vLLM's kernels do today. A change is no fault: it is measured at each start; the docs would say less."""
    from vllm import _custom_ops as ops

    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    tokens, size, kind = 64, 32, getattr(torch, dtype)

    def write(keys: Any, values: Any) -> Any:
        block = torch.zeros((1, 1, 2 * tokens, size), dtype=kind)
        k, v = block.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            torch.from_numpy(keys).to(kind)[:, None, :].contiguous(),
            torch.from_numpy(values).to(kind)[:, None, :].contiguous(),
            k,
            v,
            torch.arange(tokens),
            isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="auto",
        )
        return block.reshape(-1).to(torch.float32).numpy()

    found = classify(measure(write, tokens, size), tokens, size, label="x")
    assert (not found.tag) is plain
