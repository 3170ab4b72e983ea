"""The connector class that vLLM loads, by `kv_connector_module_path` or by the entry point in plugin.py.

    --kv-transfer-config '{"kv_connector": "KVFerryConnector",
                           "kv_connector_module_path": "kvferry.engines.vllm.connector",
                           "kv_role": "kv_producer", "kv_connector_extra_config": {"mode": "pull"}}'

vLLM makes one instance in the scheduler's process and one in each worker; they share nothing. Each hook translates its
arguments and forwards the call to `scheduler_side` or `worker_side`. A worker hook never raises, because an exception
there would end the engine.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvferry.engines.vllm.logs import share_logging
from kvferry.engines.vllm.metadata import Orders, RankInfo, Reports
from kvferry.engines.vllm.metrics import FerryMetrics, FerryStats, of_ended, of_unstarted, of_worker
from kvferry.engines.vllm.options import read_options
from kvferry.engines.vllm.scheduler_side.engine import VllmEngine, start_engine
from kvferry.engines.vllm.scheduler_side.engine_sleep import find_engine_sleep
from kvferry.engines.vllm.supported_versions import check_version
from kvferry.engines.vllm.worker_side.worker import VllmWorker
from kvferry.stats import HandoffStats

__all__ = ["KVFerryConnector"]

logger = logging.getLogger(__name__)


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # no vllm where types are checked
    """Implements vLLM's KVConnectorBase_V1, whose documentation says when each hook is called."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for a vLLM release that is not supported, or a wrong setting."""
        super().__init__(vllm_config, role, kv_cache_config)
        share_logging()
        transfer = vllm_config.kv_transfer_config
        self._options = read_options(
            transfer.kv_connector_extra_config,
            kv_role=transfer.kv_role,
            failure_policy=transfer.kv_load_failure_policy,
        )
        check_version(vllm.__version__, anyway=self._options.any_version)
        self._cleanup = ExitStack()
        self._engine: VllmEngine | None = None
        self._worker: VllmWorker | None = None
        self._manager: Any = None
        self._ended: FerryStats | None = None
        self._reported = HandoffStats()
        if role is KVConnectorRole.WORKER:
            self._worker = VllmWorker(vllm_config, kv_cache_config, self._options)
            self._cleanup.callback(self._worker.close)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Asks for heads before tokens, so that ranks of another tensor-parallel size read longer runs. MLA has no
        heads.
        """
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """Returns the statistics that another process sent, or empty ones."""
        return FerryStats(data) if data else FerryStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> FerryMetrics:
        """Returns the object that adds kvferry's series to vLLM's /metrics."""
        return FerryMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, ...], RankInfo]) -> None:
        """Starts to answer peers, now that all workers have registered their caches. Raises ConfigError."""
        ranks = sorted(metadata.values(), key=lambda info: info.index)
        self._engine = start_engine(
            self._vllm_config,
            self._kv_cache_config,
            self._options,
            ranks,
            vllm.__version__,
            find_engine_sleep(EngineCoreRequestType),
        )
        self._cleanup.callback(self._engine.close)
        if self._manager is not None:
            self._engine.scheduler.bind(self._manager)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Receives the manager of the blocks to which the scheduler side holds references."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        if self._engine is not None:
            self._engine.scheduler.bind(kv_cache_manager)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Returns all groups, because a hand-off fills the blocks of every group."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def on_new_request(self, request: Any) -> None:
        """Registers a request that may be part of a hand-off."""
        self._open.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens a hand-off will bring, and whether they arrive later; (None, False) means ask
        again.
        """
        return self._open.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Starts the hand-off of a request whose blocks were allocated."""
        self._open.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)
        self._open.send_orders()

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """Returns the orders of this step for the workers."""
        computes = scheduler_output.total_num_scheduled_tokens or scheduler_output.finished_req_ids
        return Orders(
            *self._open.build_orders(scheduler_output.preempted_req_ids or (), computes=bool(computes)),
            report_expected=self._open.report_expected,
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Adds the ids of finished transfers to the output, which vLLM reads right after this call."""
        reported = connector_output.kv_connector_worker_meta
        if not isinstance(reported, Reports):
            return
        ended = self._open.update(reported.reports, reported.lost)
        if ended.received:
            connector_output.finished_recving = set(connector_output.finished_recving or ()) | ended.received
        if ended.sent:
            connector_output.finished_sending = set(connector_output.finished_sending or ()) | ended.sent
        self._ended = of_ended(ended.landed, ended.failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Is called instead of the hook for all groups when the hybrid allocator is off."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether vLLM must keep the blocks until their id is reported, and the client's kv_transfer_params."""
        well = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        ended = self._open.scheduler.request_finished(request, block_ids, well=well)
        self._open.send_orders()
        return ended

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping although no request runs."""
        return self._engine is not None and self._engine.has_pending_work()

    @property
    def _open(self) -> VllmEngine:
        assert self._engine is not None, "vLLM hands over the workers' metadata before the first request"
        return self._engine

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers this rank's cache. Raises ConfigError, before any request, for a cache that cannot be described."""
        assert self._worker is not None, "workers register caches"
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> RankInfo | None:
        """What the scheduler needs to know of this rank."""
        return None if self._worker is None else self._worker.info

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Receives this step's orders. On a CPU no earlier step is still writing, so transfers start before the
        pass.
        """
        super().bind_connector_metadata(connector_metadata)
        if self._on_cpu:
            self._start()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts transfers on a device, in the order of its stream."""
        if not self._on_cpu:
            self._start()

    @property
    def _on_cpu(self) -> bool:
        return str(self._vllm_config.device_config.device_type) == "cpu"

    def _start(self) -> None:
        if self._worker is not None and isinstance(self._connector_metadata, Orders):
            self._worker.start(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: no layer is loaded by itself."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: no layer is saved by itself."""

    def wait_for_save(self) -> None:
        """Does nothing: blocks are sent from where they are."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the requests that the scheduler half lets fail; it learns everything else from the workers'
        reports.
        """
        orders = self._connector_metadata
        failing = set(orders.failing) if isinstance(orders, Orders) else set()
        return KVConnectorTransferResults(finished_recving=failing, failed_recving=set(failing))

    def build_connector_worker_meta(self) -> Reports | None:
        """Returns what has ended on this rank, for the scheduler."""
        if self._worker is None:
            return None
        orders = self._connector_metadata
        return self._worker.end(report_expected=isinstance(orders, Orders) and orders.report_expected)

    def get_kv_connector_stats(self) -> FerryStats | None:
        """Returns what this half has counted since the last call."""
        if self._worker is None:
            return self._scheduler_stats()
        now = self._worker.stats()
        changed, self._reported = of_worker(now, self._reported), now
        return changed

    def _scheduler_stats(self) -> FerryStats | None:
        ended, self._ended = self._ended, None
        unstarted = of_unstarted(0 if self._engine is None else self._engine.scheduler.take_num_unstarted_failures())
        if ended is None or unstarted is None:
            return ended or unstarted
        return ended.aggregate(unstarted)

    def shutdown(self) -> None:
        """Ends every thread, closes every socket and removes every registration."""
        self._cleanup.close()
