# ruff: noqa: E402  (vllm is imported only where it is there)
"""vLLM's own scheduler with our connector, step by step, without a model: the cases that vLLM tests connectors with.

Runs in the virtual environment that has vLLM (make test-vllm). What the workers would report is made here; everything
else, the handshake between two engines in one process included, is real.
"""

import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("KVFERRY_TEST_VLLM") != "1":
    pytest.skip("it needs vLLM's own environment: make test-vllm", allow_module_level=True)
vllm = pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make test-vllm")

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.connector.base import Failed, Landed, StepOrders, StepReport
from kvferry.engines.vllm.channel.worker_channel import WorkerChannel
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.describe.block_tables import GroupForm
from kvferry.engines.vllm.describe.cache_layout import AttentionForm, LayerView, Memory, describe_cache
from kvferry.engines.vllm.describe.head_packing import classify, measure
from kvferry.engines.vllm.metadata import RankInfo, Reports
from kvferry.engines.vllm.scheduler_side.engine_sleep import EngineSleep
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.layout.builders import Heads
from kvferry.layout.description import CacheKind, Rank
from kvferry.wire.layout_codec import encode_layout
from tests.engines.vllm.servers import poll_until
from tests.harness.vllm_models import make_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BLOCK, BLOCKS = 16, 64
LAYER = "model.layers.0.self_attn.attn"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=1)


def a_card(line: str = "") -> RankInfo:
    """Returns what a worker would report: one layer, 2 heads of 32."""
    block = 2 * BLOCK * 2 * 32 * 4
    view = LayerView(
        layer="layers.0.attn",
        group=0,
        memory=Memory(1 << 30, BLOCKS * block),
        address=1 << 30,
        num_blocks=BLOCKS,
        block_stride=block,
        head_stride=block // 2,
        token_stride=2 * 32 * 4,
        tokens=BLOCK,
        content_bytes=2 * 32 * 4,
        form=AttentionForm(heads=Heads(2, 0, 2), encoding="fp32", element_bytes=4, head_size=32, head_size_v=32),
    )
    form = GroupForm(kind=CacheKind.FULL, block_tokens=BLOCK, kernel_tokens=BLOCK)
    layout = describe_cache(Rank(), [form], [view])
    return RankInfo(
        0,
        os.urandom(4).hex(),
        encode_layout(layout),
        "nixl",
        b"",
        (BLOCK,),
        ("CPU_ATTN",),
        (),
        (),
        (("layers.0.attn", 0),),
        line,
    )


class Engine:
    """vLLM's scheduler, and what a test says that the workers did."""

    def __init__(
        self,
        model: Path,
        role: str,
        name: str,
        *,
        mode: str = "pull",
        policy: str = "fail",
        queued: bool = True,
        line: str = "",
    ) -> None:
        # As in vLLM's engine core: it exists when the connector is created.
        self.input_queue: queue.Queue[Any] | None = queue.Queue() if queued else None
        self.shutdown_state = EngineShutdownState.RUNNING
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            max_model_len=512,
            enforce_eager=True,
            block_size=BLOCK,
            max_num_batched_tokens=64,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVFerryConnector",
                kv_connector_module_path="kvferry.engines.vllm.connector",
                kv_role=role,
                engine_id=name,
                kv_load_failure_policy=policy,
                kv_connector_extra_config={"mode": mode},
            ),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        page = spec.page_size_bytes
        cache = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[KVCacheTensor(page * BLOCKS, [LAYER], page * BLOCKS, page)],
            kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)],
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        assert isinstance(self.connector, KVFerryConnector)
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): a_card(line)})
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.free = self.num_free

    @property
    def num_free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, num_tokens: int, params: dict[str, Any] | None, max_tokens: int = 4) -> Request:
        request = Request(
            name,
            list(range(7, 7 + num_tokens)),
            SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": params} if params else None),
            None,
            block_hasher=self._hasher,
        )
        request.sampling_params.update_from_generation_config({}, 2)
        self.scheduler.add_request(request)
        return request

    def step(self, *reports: StepReport, token: int = 11) -> Any:
        """Schedules, pretends to run, and updates. `reports` is what the worker reports."""
        scheduled = self.scheduler.schedule()
        meta = scheduled.kv_connector_metadata
        failing = set(meta.failing)
        output = KVConnectorOutput(
            finished_recving=failing or None,
            failed_recving=set(failing),
            kv_connector_worker_meta=Reports(tuple(reports)) if reports or meta.report_expected else None,
        )
        names = list(scheduled.num_scheduled_tokens)
        if names:
            tokens = [[token] if not self.scheduler.requests[name].is_prefill_chunk else [] for name in names]
            ran = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
        else:
            ran = ModelRunnerOutput([], {})
        ran.kv_connector_output = None if output.is_empty() else output
        self.last = scheduled
        return self.scheduler.update_from_output(scheduled, ran)

    def until(self, request: Request, status: RequestStatus) -> None:
        """Steps until a request has this status; a handshake takes some steps."""

        def there() -> bool:
            self.step()
            return bool(request.status == status)

        assert poll_until(there, 20.0, every_s=0.01) >= 0, f"it is {request.status!r}"

    def close(self) -> None:
        self.scheduler.shutdown()


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


def finished_params(outputs: Any) -> list[Any]:
    return [
        one.kv_transfer_params for batch in outputs.values() for one in batch.outputs if one.finish_reason is not None
    ]


def prefilled(engine: Engine, num_tokens: int = 40) -> dict[str, Any]:
    """Runs a prefill to its end, and returns the parameters that a router would carry."""
    engine.add("p1", num_tokens, {"do_remote_decode": True}, max_tokens=1)
    for _ in range(4):
        params = finished_params(engine.step())
        if params:
            assert params[0] is not None
            return dict(params[0])
    raise AssertionError("the prefill did not end")


def landed(request: Request, params: dict[str, Any]) -> StepReport:
    stop = params["remote_num_tokens"]
    one = Landed(TransferId(params["transfer_id"]), RequestId(request.request_id), TokenRange(0, stop), 1, 1, 0.1)
    return StepReport(landed=(one,))


def failed(request: Request, params: dict[str, Any]) -> StepReport:
    one = Failed(TransferId(params["transfer_id"]), RequestId(request.request_id), "gone", TokenRange(0, 0))
    return StepReport(failed=(one,))


def released(params: dict[str, Any]) -> StepReport:
    return StepReport(released=frozenset({TransferId(params["transfer_id"])}))


def test_prefill_keeps_its_blocks_until_the_workers_release_them(prefill: Engine) -> None:  # R15 R25
    params = prefilled(prefill)
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
    params = prefilled(prefill)
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
    prefill = Engine(model, "kv_producer", "p", line=line.address)
    orders: list[StepOrders] = []
    other = WorkerChannel(orders.append)
    decode = Engine(model, "kv_consumer", "d", line=other.address)
    try:
        params = prefilled(prefill)
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
    engine = Engine(model, "kv_producer", "p", line=line.address)
    try:
        params = prefilled(engine)
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
    decode = Engine(model, "kv_consumer", "d", line=line.address)
    try:
        params = prefilled(prefill)
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
        params = prefilled(engine)
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
    params = prefilled(prefill)
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
    params = prefilled(prefill)
    first = decode.add("d1", 40, None)
    while not first.is_finished():
        decode.step()
    request = decode.add("d2", 40, params)
    decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
    wants = decode.last.kv_connector_metadata.orders.fetch
    assert [want.wanted for want in wants] == [TokenRange(32, 40)]


def test_a_failed_load_ends_by_policy_and_no_block_is_lost(prefill: Engine, decode: Engine) -> None:  # R28 R29
    params = prefilled(prefill)
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
    params = prefilled(prefill)
    request = decode.add("d1", 40, params)
    decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
    decode.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    decode.step()
    assert decode.num_free == decode.free - 3
    decode.step(released(params))
    assert decode.num_free == decode.free
    assert not decode.scheduler.has_requests()


def test_an_abort_in_the_step_in_which_the_load_lands(prefill: Engine, decode: Engine) -> None:
    params = prefilled(prefill)
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
