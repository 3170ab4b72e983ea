"""The class that vLLM loads: by `kv_connector_module_path` = this module, or by the entry point (engines.vllm.plugin).

    --kv-transfer-config '{"kv_connector": "KVFerryConnector",
                           "kv_connector_module_path": "kvferry.engines.vllm.connector",
                           "kv_role": "kv_producer", "kv_connector_extra_config": {"mode": "pull"}}'

vLLM makes one in the scheduler's process and one in each worker; they share nothing. Each hook translates and forwards:
`scheduler_side` and `worker_side` hold the halves. A worker hook never raises: an exception there would end the engine.
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
from kvferry.engines.vllm.metrics import FerryMetrics, FerryStats, of_ended, of_worker
from kvferry.engines.vllm.options import read_options
from kvferry.engines.vllm.scheduler_side.engine import VllmEngine, start_engine
from kvferry.engines.vllm.scheduler_side.engine_sleep import find_wake
from kvferry.engines.vllm.supported_versions import check_version
from kvferry.engines.vllm.worker_side.worker import VllmWorker
from kvferry.stats import HandoffStats

__all__ = ["KVFerryConnector"]

logger = logging.getLogger(__name__)


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # no vllm where types are checked
    """See vLLM's KVConnectorBase_V1 for when each hook is called."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError: a vLLM that is not supported, a setting that is wrong."""
        super().__init__(vllm_config, role, kv_cache_config)
        share_logging()
        told = vllm_config.kv_transfer_config
        self._options = read_options(
            told.kv_connector_extra_config, kv_role=told.kv_role, failure_policy=told.kv_load_failure_policy
        )
        check_version(vllm.__version__, anyway=self._options.any_version)
        self._cleanup = ExitStack()
        self._engine: VllmEngine | None = None
        self._worker: VllmWorker | None = None
        self._manager: Any = None
        self._ended: FerryStats | None = None
        self._told = HandoffStats()
        if role is KVConnectorRole.WORKER:
            self._worker = VllmWorker(vllm_config, kv_cache_config, self._options)
            self._cleanup.callback(self._worker.close)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads before tokens, where the model has heads: ranks of another tensor parallelism read longer runs."""
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """From what another process sent, or empty."""
        return FerryStats(data) if data else FerryStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> FerryMetrics:
        """The kvferry series."""
        return FerryMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, ...], RankInfo]) -> None:
        """All workers have registered their caches: from here on we can answer peers. Raises ConfigError."""
        cards = sorted(metadata.values(), key=lambda card: card.index)
        self._engine = start_engine(
            self._vllm_config,
            self._kv_cache_config,
            self._options,
            cards,
            vllm.__version__,
            find_wake(EngineCoreRequestType),
        )
        self._cleanup.callback(self._engine.close)
        if self._manager is not None:
            self._engine.scheduler.bind(self._manager)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """The manager whose blocks we hold references to."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        if self._engine is not None:
            self._engine.scheduler.bind(kv_cache_manager)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A hand-off brings every group's own blocks."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def on_new_request(self, request: Any) -> None:
        """See VllmScheduler."""
        self._open.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See VllmScheduler."""
        return self._open.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See VllmScheduler."""
        self._open.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)
        self._open.send_orders()

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """The orders of this step."""
        computes = scheduler_output.total_num_scheduled_tokens or scheduler_output.finished_req_ids
        return Orders(
            *self._open.build_orders(scheduler_output.preempted_req_ids or (), computes=bool(computes)),
            answer=self._open.listens,
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """vLLM reads the ids that we add here right after this call."""
        told = connector_output.kv_connector_worker_meta
        if not isinstance(told, Reports):
            return
        ended = self._open.update(told.reports, told.lost)
        if ended.received:
            connector_output.finished_recving = set(connector_output.finished_recving or ()) | ended.received
        if ended.sent:
            connector_output.finished_sending = set(connector_output.finished_sending or ()) | ended.sent
        self._ended = of_ended(ended.landed, ended.failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Without the hybrid allocator."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See VllmScheduler."""
        well = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        ended = self._open.scheduler.request_finished(request, block_ids, well=well)
        self._open.send_orders()
        return ended

    def has_pending_push_work(self) -> bool:
        """The engine must go on stepping although no request runs."""
        return self._engine is not None and self._engine.has_pending_work()

    @property
    def _open(self) -> VllmEngine:
        assert self._engine is not None, "vLLM hands over the workers' metadata before the first request"
        return self._engine

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ConfigError for a cache that cannot be described: at the start, before any request."""
        assert self._worker is not None, "workers register caches"
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> RankInfo | None:
        """What the scheduler needs to know of this rank."""
        return None if self._worker is None else self._worker.card

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """This step's orders. On a CPU nothing of an earlier step is still writing: transfers start before the pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._on_cpu:
            self._start()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """On a device: in the order of its stream."""
        if not self._on_cpu:
            self._start()

    @property
    def _on_cpu(self) -> bool:
        return str(self._vllm_config.device_config.device_type) == "cpu"

    def _start(self) -> None:
        if self._worker is not None and isinstance(self._connector_metadata, Orders):
            self._worker.start(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """Blocks stay where they are."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Only what the scheduler half has doomed: everything else it learns from our reports."""
        told = self._connector_metadata
        doomed = set(told.doomed) if isinstance(told, Orders) else set()
        return KVConnectorTransferResults(finished_recving=doomed, failed_recving=set(doomed))

    def build_connector_worker_meta(self) -> Reports | None:
        """What has ended on this rank."""
        told = self._connector_metadata
        return None if self._worker is None else self._worker.end(answer=isinstance(told, Orders) and told.answer)

    def get_kv_connector_stats(self) -> FerryStats | None:
        """Of this half, since the last call."""
        if self._worker is None:
            ended, self._ended = self._ended, None
            return ended
        now = self._worker.stats()
        changed, self._told = of_worker(now, self._told), now
        return changed

    def shutdown(self) -> None:
        """No thread, no socket, no registration remains."""
        self._cleanup.close()
