"""The worker half in vLLM's terms: it describes the cache, starts the driver, and forwards orders and reports."""

import logging
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvferry.connector.worker import HandoffWorker, start_worker
from kvferry.engines.vllm.channel.report_queue import ReportQueue
from kvferry.engines.vllm.channel.worker_channel import WorkerChannel
from kvferry.engines.vllm.describe.cache_layout import AttentionForm, StateForm, describe_cache
from kvferry.engines.vllm.describe.head_packing import HeadPacking, classify, measure
from kvferry.engines.vllm.describe.introspect import RankView, group_forms, layer_kinds, layer_specs, layer_views
from kvferry.engines.vllm.describe.layer_names import canonical_names
from kvferry.engines.vllm.metadata import Orders, RankInfo, Reports
from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.worker_side.cpu_affinity import on_every_core
from kvferry.errors import ConfigError
from kvferry.ids import EngineId, Incarnation
from kvferry.layout.description import Rank
from kvferry.stats import HandoffStats
from kvferry.wire.layout_codec import decode_layout, encode_layout

__all__ = ["VllmWorker"]

logger = logging.getLogger(__name__)


class VllmWorker:
    """One per rank, used on the thread that runs the model."""

    def __init__(self, config: Any, kv_cache_config: Any, options: Options) -> None:
        self._config = config
        self._cache_config = kv_cache_config
        self._options = options
        self._engine = EngineId(str(config.kv_transfer_config.engine_id))
        self._half: HandoffWorker | None = None
        self._channel: WorkerChannel | None = None
        self._report_queue = ReportQueue()
        self._packings: dict[tuple[str, str, int, int], HeadPacking] = {}
        self.info: RankInfo | None = None

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Describes and registers this rank's cache, and starts the driver. Raises ConfigError if it cannot be
        served.
        """
        config, cache_config = self._config, self._cache_config
        names = canonical_names(layer_kinds(cache_config), int(config.model_config.hf_text_config.num_hidden_layers))
        specs = layer_specs(cache_config)
        kernel_tokens: list[int | None] = [None] * len(cache_config.transfer_groups)
        for name, (group, _) in specs.items():
            if name in caches and caches[name].ndim == 4:
                kernel_tokens[group] = int(caches[name].shape[2])
        forms = group_forms(cache_config, kernel_tokens)
        view = _rank_view(config)
        views = layer_views(cache_config, caches, names, view, self._packing_of)
        if _on_cpu(config) and any(isinstance(v.form, AttentionForm) and v.form.latent for v in views):
            _warn_of_rope(config)
        layout = describe_cache(view.rank, forms, views)
        storages = {cache.untyped_storage().data_ptr(): cache for cache in caches.values()}
        owners = [storages[region.address] for region in layout.regions]
        gathered = _gather((secrets.token_hex(8), encode_layout(layout)))
        incarnation = Incarnation(gathered[0][0])  # that of rank 0
        with on_every_core() if _on_cpu(config) else nullcontext():
            self._half = start_worker(
                layout,
                owners,
                engine=self._engine,
                incarnation=incarnation,
                settings=self._options.ferry,
                num_ranks=len(gathered),
                engine_layouts=tuple(decode_layout(body) for _, body in gathered),
                on_lost=self._report_queue.lost,
                on_report=self._report_queue.report,
            )
            self._channel = WorkerChannel(self._half.start_step)
        self._report_queue.open(self._half.end_step, self._channel.send)
        self.info = RankInfo(
            index=view.rank.index,
            incarnation=incarnation,
            layout=encode_layout(layout),
            transport=self._options.ferry.transfer.transport,
            transport_metadata=self._half.record.transport_metadata,
            kernel_tokens=tuple(kernel_tokens),
            backends=_backends(config, [name for name in specs if name in caches]),
            packings=tuple({tag for v in views if (tag := _packing_tag(v.form))}),
            state_dtypes=tuple(
                f"{'ssm' if piece.part == 'ssm' else 'conv'}={piece.encoding}"
                for v in views
                if isinstance(v.form, StateForm)
                for piece in v.form.pieces
            ),
            layer_groups=tuple((v.layer, v.group) for v in views),
            channel_address=self._channel.address,
        )
        logger.info(
            "kvferry worker ready engine=%s rank=%d layers=%d groups=%d regions=%d packings=%s",
            self._engine,
            view.rank.index,
            len(views),
            len(forms),
            len(layout.regions),
            self.info.packings or "none",
        )

    def start(self, orders: Orders) -> None:
        """Passes this step's orders to the driver at once."""
        if self._channel is not None:
            # Orders of this step may name a peer that came through the channel; and on a busy machine this thread is
            # often quicker than the one that reads the channel.
            self._channel.catch_up()
        if self._half is not None and orders.orders:
            self._half.start_step(orders.orders)

    def end(self, *, report_expected: bool) -> Reports | None:
        """Returns what has ended and did not go through the channel; never None if a report is expected (Orders)."""
        reports, lost = self._report_queue.take()
        return Reports(reports, lost) if reports or lost or report_expected else None

    def stats(self) -> HandoffStats:
        """Returns the counters since the start."""
        return HandoffStats() if self._half is None else self._half.stats()

    def close(self) -> None:
        """Ends every thread and removes every registration."""
        if self._channel is not None:
            self._channel.close()
        if self._half is not None:
            self._half.close()

    def _packing_of(self, name: str, spec: Any, tokens: int) -> HeadPacking | None:
        """Returns how the CPU backend packs a head's block for its kernels; None elsewhere, where content is token by
        token.
        """
        if not _on_cpu(self._config):
            return None
        layer = self._config.compilation_config.static_forward_context.get(name)
        isa, size = getattr(layer, "isa", None), int(spec.head_size)
        if isa is None:
            from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

            dtype = self._config.model_config.dtype
            isa = _get_attn_isa(dtype, int(spec.block_size), size, self._config.cache_config.cache_dtype)
        key = (str(isa), str(spec.dtype), tokens, size)
        if key not in self._packings:
            self._packings[key] = self._measured(str(isa), spec.dtype, tokens, size)
        return self._packings[key]

    def _measured(self, isa: str, dtype: torch.dtype, tokens: int, size: int) -> HeadPacking:
        model_dtype = self._config.model_config.dtype
        kv_dtype = str(self._config.cache_config.cache_dtype)

        def write(keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            block = torch.zeros((1, 1, 2 * tokens, size), dtype=dtype)
            key_cache, value_cache = block.chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(
                torch.from_numpy(keys).to(model_dtype)[:, None, :].contiguous(),
                torch.from_numpy(values).to(model_dtype)[:, None, :].contiguous(),
                key_cache,
                value_cache,
                torch.arange(tokens, dtype=torch.int64),
                isa,
                k_scale=1.0,
                v_scale=1.0,
                kv_cache_dtype=kv_dtype,
            )
            flat: npt.NDArray[np.float32] = block.reshape(-1).to(torch.float32).numpy()
            return flat

        try:
            order = measure(write, tokens, size)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"the CPU backend's packing for isa={isa!r} dtype={dtype} block={tokens} head={size} cannot be "
                f"measured: {error}. Use another --dtype or --kv-cache-dtype"
            ) from error
        return classify(order, tokens, size, label=f"cpu-{isa}-{str(dtype).removeprefix('torch.')}")


def _on_cpu(config: Any) -> bool:
    return str(config.device_config.device_type) == "cpu"


def _warn_of_rope(config: Any) -> None:
    """Warns of a fault of vLLM 0.32 that appears without any connector (tests/engines/vllm/mla_alone.py).

    With `rope_type` default a step's result depends on how many tokens it computes, because the kernel reads queries of
    shape [tokens, heads, size] as [tokens, size].
    """
    text = config.model_config.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if str(rope.get("rope_type") or rope.get("type") or "default") == "default":
        logger.warning(
            "MLA with rope_type 'default' on a CPU: this vLLM rotates the wrong heads of a query, so its tokens depend "
            "on how a prompt is cut into steps, with or without a hand-off. Yarn, which published DeepSeek models use, "
            "is right; GPUs were not tried"
        )


def _packing_tag(form: AttentionForm | StateForm) -> str:
    if not isinstance(form, AttentionForm):
        return ""
    return form.opaque or (form.packing.tag if form.packing is not None else "")


def _gather(mine: tuple[str, bytes]) -> list[tuple[str, bytes]]:
    """Gathers one value from every rank, in the order of Rank.index; all workers register their caches in step."""
    tp, pp = get_tp_group(), get_pp_group()
    stage: list[Any] = [None] * tp.world_size
    torch.distributed.all_gather_object(stage, mine, group=tp.cpu_group)
    stages: list[Any] = [None] * pp.world_size
    torch.distributed.all_gather_object(stages, stage, group=pp.cpu_group)
    return [rank for ranks in stages for rank in ranks]


def _rank_view(config: Any) -> RankView:
    model, parallel = config.model_config, config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1)) > 1:
            raise ConfigError(
                f"{name}={getattr(parallel, name)!r}: kvferry cannot hand over vLLM's context parallelism: set it to 1"
            )
    tp, pp = get_tp_group(), get_pp_group()
    rank = Rank(
        index=pp.rank_in_group * tp.world_size + tp.rank_in_group,
        tp_rank=tp.rank_in_group,
        tp_size=tp.world_size,
        pp_rank=pp.rank_in_group,
        pp_size=pp.world_size,
    )
    draft = getattr(config.speculative_config, "draft_model_config", None)
    text = model.hf_text_config
    groups = getattr(text, "n_groups", None) or getattr(text, "mamba_n_groups", None)
    return RankView(
        rank,
        kv_dtype=str(config.cache_config.cache_dtype),
        total_kv_heads=int(model.get_total_num_kv_heads()),
        draft_kv_heads=None if draft is None else int(draft.get_total_num_kv_heads()),
        mamba_groups=None if groups is None else int(groups),
        channels_first=_channels_first(),
    )


def _channels_first() -> bool:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def _backends(config: Any, names: list[str]) -> tuple[str, ...]:
    context = config.compilation_config.static_forward_context
    found = {
        context[name].get_attn_backend().get_name() for name in names if hasattr(context.get(name), "get_attn_backend")
    }
    return tuple(sorted(found)) or ("unknown",)
