"""vLLM's own scheduler with kvferry's connector, in process and without a model. A test says what the workers did.

Imports vllm: only tests that run in vLLM's environment may import this module.
"""

import os
import queue
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.connector.base import Failed, Landed, StepReport
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.describe.block_tables import GroupForm
from kvferry.engines.vllm.describe.cache_layout import AttentionForm, LayerView, Memory, describe_cache
from kvferry.engines.vllm.metadata import RankInfo, Reports
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.layout.builders import Heads
from kvferry.layout.description import CacheKind, Rank
from kvferry.wire.layout_codec import encode_layout
from tests.harness.until import until

__all__ = ["BLOCK", "BLOCKS", "CHAINS", "Engine", "failed", "finished_params", "landed", "rank_info", "released"]

BLOCK, BLOCKS = 16, 64
CHAINS = ("alone", "first of two", "second of two")
"""Where kvferry's connector stands: as vLLM's only one, or as a child of MultiConnector."""
_LAYER = "model.layers.0.self_attn.attn"
_FERRY = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.engines.vllm.connector"}
_IDLE = {"kv_connector": "IdleConnector", "kv_connector_module_path": "tests.harness.vllm_idle_connector"}


def rank_info(channel_address: str = "") -> RankInfo:
    """Returns what a worker reports at its start: one layer, 2 heads of 32."""
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
    return RankInfo(
        index=0,
        incarnation=os.urandom(4).hex(),
        layout=encode_layout(describe_cache(Rank(), [form], [view])),
        transport="nixl",
        transport_metadata=b"",
        kernel_tokens=(BLOCK,),
        backends=("CPU_ATTN",),
        packings=(),
        state_dtypes=(),
        layer_groups=(("layers.0.attn", 0),),
        channel_address=channel_address,
    )


class Engine:
    """One engine: vLLM's scheduler, and the connector in it. A context: leaving it closes all sockets."""

    def __init__(
        self,
        model: Path,
        role: str,
        name: str,
        *,
        mode: str = "pull",
        policy: str = "fail",
        child_policy: str | None = None,
        chain: str = CHAINS[0],
        queued: bool = True,
        channel_address: str = "",
    ) -> None:
        """`queued` says whether the engine can be woken; `chain` is one of CHAINS. `child_policy` is the policy in the
        configuration of MultiConnector's child, if there is one; `policy` is vLLM's own.
        """
        # As in vLLM's engine core: there when the connector is made.
        self.input_queue: queue.Queue[Any] | None = queue.Queue() if queued else None
        self.shutdown_state = EngineShutdownState.RUNNING
        self.policy, self.child_policy = policy, child_policy
        self._chain = chain
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            max_model_len=512,
            enforce_eager=True,
            block_size=BLOCK,
            max_num_batched_tokens=64,
            kv_transfer_config=_transfer_config(chain, role, name, policy, child_policy, {"mode": mode}),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        page = spec.page_size_bytes
        cache = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[KVCacheTensor(page * BLOCKS, [_LAYER], page * BLOCKS, page)],
            kv_cache_groups=[KVCacheGroupSpec([_LAYER], spec)],
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): rank_info(channel_address)})
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.free = self.num_free
        self.last: Any = None
        self._counts: dict[str, int] = {}

    @property
    def connector(self) -> KVFerryConnector:
        """kvferry's connector, wherever it stands."""
        found = self.scheduler.connector
        ours = found if self._chain == CHAINS[0] else found.sub_connectors[self._index]
        assert isinstance(ours, KVFerryConnector)
        return ours

    @property
    def _index(self) -> int:
        return CHAINS.index(self._chain) - 1

    @property
    def orders(self) -> Any:
        """The metadata that the last step had for kvferry's workers."""
        meta = self.last.kv_connector_metadata
        return meta if self._chain == CHAINS[0] else meta.metadata[self._index]

    def count(self, name: str) -> int:
        """Adds up one of the counters that this half reports to vLLM's metrics."""
        return self._counts.get(name, 0)

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, num_tokens: int, params: dict[str, Any] | None, max_tokens: int = 4) -> Request:
        """Adds a request. All prompts begin alike."""
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
        """Schedules, pretends to run, updates. `reports` are the workers'."""
        self.last = scheduled = self.scheduler.schedule()
        orders = self.orders
        failing = set(orders.failing)
        meta: Any = Reports(tuple(reports)) if reports or orders.report_expected else None
        if meta is not None and self._chain != CHAINS[0]:
            meta = MultiKVConnectorWorkerMetadata(tuple(meta if i == self._index else None for i in range(2)))
        output = KVConnectorOutput(
            finished_recving=failing or None, failed_recving=set(failing), kv_connector_worker_meta=meta
        )
        names = list(scheduled.num_scheduled_tokens)
        if names:
            tokens = [[token] if not self.scheduler.requests[name].is_prefill_chunk else [] for name in names]
            ran = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
        else:
            ran = ModelRunnerOutput([], {})
        ran.kv_connector_output = None if output.is_empty() else output
        outputs = self.scheduler.update_from_output(scheduled, ran)
        for each in outputs.values():
            stats = each.scheduler_stats and each.scheduler_stats.kv_connector_stats
            if stats:
                ours = stats if self._chain == CHAINS[0] else stats["KVFerryConnector"]
                for name, value in (ours["counts"] if isinstance(ours, dict) else ours.data["counts"]).items():
                    self._counts[name] = self._counts.get(name, 0) + value
        return outputs

    def until(self, request: Request, status: RequestStatus) -> None:
        """Steps until a request has this status: a handshake takes some steps."""

        def there() -> bool:
            self.step()
            return bool(request.status == status)

        until(there, f"{request.request_id} is {status.name}", within_s=20.0)

    def until_idle(self, *reports: StepReport, max_steps: int = 100) -> list[str]:
        """Steps until no request is left; the first step has the reports. Returns how the requests ended.

        A request that does not end within `max_steps` steps that had something to do fails the test: nothing may loop.
        """
        ends = finish_reasons(self.step(*reports))
        busy = 0

        def over() -> bool:
            nonlocal busy
            ends.extend(finish_reasons(self.step()))
            busy += bool(self.last.num_scheduled_tokens or self.orders.failing)
            assert busy <= max_steps, f"after {busy} steps these have not ended: {list(self.scheduler.requests)}"
            return not self.scheduler.requests

        if self.scheduler.requests:
            until(over, "no request is left", within_s=60.0, every_s=0.002)
        self.step()
        return ends

    def prefilled(self, num_tokens: int = 40, name: str = "p1") -> dict[str, Any]:
        """Runs a prefill to its end. Returns the parameters that a router would carry."""
        self.add(name, num_tokens, {"do_remote_decode": True}, max_tokens=1)
        for _ in range(4):
            returned = finished_params(self.step())
            if returned:
                assert returned[0] is not None
                return dict(returned[0])
        raise AssertionError("the prefill did not end")

    def close(self) -> None:
        """Closes the connector."""
        self.scheduler.shutdown()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _transfer_config(
    chain: str, role: str, name: str, policy: str, child_policy: str | None, extra: dict[str, Any]
) -> KVTransferConfig:
    ferry = {**_FERRY, "kv_role": role, "kv_connector_extra_config": extra}
    if child_policy is not None:
        ferry["kv_load_failure_policy"] = child_policy
    if chain == CHAINS[0]:
        return KVTransferConfig(**ferry, engine_id=name, kv_load_failure_policy=policy)
    children = [ferry, {**_IDLE, "kv_role": role}]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=role,
        engine_id=name,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": children if chain == CHAINS[1] else children[::-1]},
    )


def _finished(outputs: Any) -> Iterable[Any]:
    return (one for each in outputs.values() for one in each.outputs if one.finish_reason is not None)


def finish_reasons(outputs: Any) -> list[str]:
    """Returns how the requests that a step has ended have ended."""
    return [str(one.finish_reason) for one in _finished(outputs)]


def finished_params(outputs: Any) -> list[Any]:
    """Returns the kv_transfer_params of the requests that a step has ended."""
    return [one.kv_transfer_params for one in _finished(outputs)]


def landed(request: Request, params: dict[str, Any]) -> StepReport:
    """Returns a worker's report that a request's hand-off has landed."""
    stop = params["remote_num_tokens"]
    one = Landed(TransferId(params["transfer_id"]), RequestId(request.request_id), TokenRange(0, stop), 1, 1, 0.1)
    return StepReport(landed=(one,))


def failed(request: Request, params: dict[str, Any], reason: str = "gone") -> StepReport:
    """Returns a worker's report that a request's hand-off has failed."""
    one = Failed(TransferId(params["transfer_id"]), RequestId(request.request_id), reason, TokenRange(0, 0))
    return StepReport(failed=(one,))


def released(params: dict[str, Any]) -> StepReport:
    """Returns a worker's report that no peer touches a hand-off's blocks any more."""
    return StepReport(released=frozenset({TransferId(params["transfer_id"])}))
