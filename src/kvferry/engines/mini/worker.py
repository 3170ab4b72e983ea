"""A worker of the embedded engine: the engine, its ranks and its connector, put together.

In this order: the model and the cache (in every rank), the EngineConnector (it binds the side channel), the worker
halves (in every rank: the transport registers the cache, and the driver starts), the scheduler half, the engine. When
ranks have died, all but the EngineConnector is made again.
"""

import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvferry import __version__
from kvferry.connector.base import EngineIdentity, RankRecord, SchedulerHalf
from kvferry.connector.engine import EngineConnector
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.cache_spec import make_groups
from kvferry.engines.mini.models.config import ModelConfig
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.loading import OpenedModel
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.ranks.build import build_executor
from kvferry.engines.mini.ranks.executor import ConnectorStart, Executor
from kvferry.engines.mini.ranks.launcher import Launcher
from kvferry.engines.mini.ranks.sizing import layers_of
from kvferry.engines.mini.scheduling.block_manager import BlockHash
from kvferry.engines.mini.scheduling.cache_groups import tokens_handed_over
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation.drafter_info import DrafterInfo, open_drafter
from kvferry.engines.mini.speculation.load_drafter import find_drafter
from kvferry.errors import ConfigError
from kvferry.handshake.engine_description import EngineDescription, SpeculationFacts
from kvferry.handshake.fingerprint import model_fingerprint, tokenizer_fingerprint
from kvferry.ids import TransferId, new_incarnation
from kvferry.layout.description import CacheKind, CacheLayout
from kvferry.settings import FerrySettings, Role
from kvferry.stats import HandoffStats
from kvferry.wire.handoff_messages import MAX_ID_CHARS
from kvferry.wire.versions import protocol_range

__all__ = ["Worker", "WorkerSettings", "build_worker", "describe", "describe_engine"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """All the settings of one worker."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    """The model and how it runs."""

    ferry: FerrySettings = field(default_factory=FerrySettings)
    """How KV is handed over."""

    role: Role = Role.BOTH
    """What it does for others."""

    engine_id: str | None = None
    """Its name in the fleet, which no other worker may have. None makes one at random."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a name that messages and headers cannot carry."""
        name = self.engine_id
        if name is not None and not (0 < len(name) <= MAX_ID_CHARS and name.isascii() and name.isprintable()):
            raise ConfigError(
                f"engine_id={name[:80]!r} must have 1 to {MAX_ID_CHARS} printable ASCII characters. "
                "Choose another name, or leave it out (--engine-id)"
            )


class Worker:
    """An engine with its connector. One thread steps `engine`; everything else may be called from any, unless it says
    otherwise."""

    engine: Engine
    connector: EngineConnector

    def __init__(
        self, settings: WorkerSettings, model: OpenedModel, executor: Executor, launcher: Launcher | None = None
    ) -> None:
        """Nothing runs before `open`. Whatever happens there, `close` is to be called. `launcher`: see build_worker."""
        self._launcher = launcher
        self.settings = settings
        self._model = model
        self._executor = executor
        self._cleanup = ExitStack()

    def open(self) -> None:
        """Bind the side channel, start the worker halves, and begin to answer peers. Raises ConfigError."""
        settings = self.settings.engine
        self._cleanup.callback(lambda: self._executor.close())
        self.connector = EngineConnector(
            describe_engine(self.settings, self._model),
            self.settings.ferry,
            engine_id=self.settings.engine_id or f"mini-{secrets.token_hex(4)}",
            handoff_tokens=_handoff_tokens(self.settings, self._model, self._executor.layouts[0]),
        )
        self._cleanup.callback(self.connector.close)
        ranks = self._start_worker_halves(self._executor)
        self._scheduler_half = self.connector.start(ranks, self._executor.send)
        revives = settings.tp * settings.pp > 1 and settings.on_rank_death == "restart"
        self.engine = Engine(
            self._model,
            self._executor,
            settings,
            connector=self._scheduler_half,
            revive=self._revive if revives else None,
        )
        self.connector.on_question(self.engine.wake)
        self._log("worker ready")

    def _start_worker_halves(self, executor: Executor) -> list[RankRecord]:
        """Start the worker half of every rank, as a new incarnation."""
        incarnation = new_incarnation()
        executor.connect(
            ConnectorStart(self.connector.engine_id, incarnation, self.settings.ferry), self.connector.lost
        )
        return [
            RankRecord(layout, incarnation, self.settings.ferry.transfer.transport, metadata)
            for layout, metadata in zip(executor.layouts, executor.metadata, strict=True)
        ]

    def _revive(self) -> tuple[Executor, SchedulerHalf]:
        """Start new ranks after the old ones have died: another incarnation, at the same address. On the engine's
        thread."""
        launcher = self._launcher if self._launcher is not None and self._launcher.running else None
        _, executor = build_executor(self.settings.engine, launcher)
        try:
            ranks = self._start_worker_halves(executor)
        except BaseException:
            executor.close()
            raise
        self._executor = executor
        self._scheduler_half = self.connector.restart(ranks, executor.send)
        self._log("worker is ready again")
        return executor, self._scheduler_half

    def _log(self, what: str) -> None:
        logger.info(
            "%s engine=%s incarnation=%s role=%s mode=%s side_channel=%s:%s blocks=%s ranks=%s",
            what,
            self.identity.engine,
            self.identity.incarnation,
            self.settings.role,
            self.settings.ferry.transfer.mode,
            self.identity.host,
            self.identity.port,
            self._executor.num_blocks - 1,
            self.identity.num_ranks,
        )

    @property
    def identity(self) -> EngineIdentity:
        """The engine's name, incarnation and address. The incarnation changes after ranks have died."""
        return self.connector.identity

    def describe(self) -> dict[str, object]:
        """Return the JSON of GET /v1/kvferry, which routers and `kvferry compare` read."""
        return {
            **self.connector.describe(),
            "version": __version__,
            "model": self.settings.engine.model,
            "limits": {
                "max_model_len": self.engine.max_model_len,
                "block_tokens": self.settings.engine.block_tokens,
                "blocks": self.engine.blocks.num_usable,
                "tokens": self.engine.longest_request,
            },
            "room": {"free_blocks": self.engine.blocks.num_free, "waiting": self.engine.stats().waiting},
            "cache": self._cache_mark(),
            "abilities": ["first-token", "meet", "prompt-blocks", "decode-checks", "fetch"],
            "ranks": self._describe_ranks(),
        }

    def _describe_ranks(self) -> list[dict[str, object]]:
        executor = self._executor
        return [
            {
                "index": layout.rank.index,
                "tp_rank": layout.rank.tp_rank,
                "pp_rank": layout.rank.pp_rank,
                "pid": pid,
                "cache_bytes": sum(region.num_bytes for region in layout.regions),
                "landed": stats.landed,
                "failed": stats.failed,
                "bytes": stats.bytes,
            }
            for layout, pid, stats in zip(executor.layouts, executor.pids, executor.rank_stats(), strict=True)
        ]

    def _cache_mark(self) -> dict[str, int]:
        """Return a version that changes whenever `cached_blocks` does, and the number of blocks."""
        version, num_blocks = self.engine.blocks.mark(self.engine.scheduler.groups.routing_group)
        return {"version": version, "blocks": num_blocks}

    def cached_blocks(self) -> list[BlockHash]:
        """Return the hashes of the blocks in the prefix cache. On the engine's thread."""
        return self.engine.blocks.known_hashes(self.engine.scheduler.groups.routing_group)

    def meet(self, engine: str, incarnation: str | None, host: str, port: int) -> str:
        """Shake hands with this engine if that is due: `asking`, `accepted` or `refused`. On the engine's thread."""
        return self.connector.preconnect(engine, incarnation, host, port).status.value

    def handoff_stats(self) -> HandoffStats:
        """Return the counters of the hand-offs, with the peers that are known and those that were refused."""
        return self.connector.stats(self._executor.rank_stats())

    def refused_peers(self) -> dict[str, str]:
        """Return the peers that are refused now, and the reasons; for /health and /metrics."""
        return self.connector.refused_peers()

    def refusals(self) -> list[str]:
        """Return the same as sentences."""
        return [f"{engine}: {reason}" for engine, reason in self.refused_peers().items()]

    def release(self, transfer: TransferId, reason: str) -> bool:
        """Withdraw a finished prefill that no decode engine will take (SchedulerHalf.withdraw). On the engine's
        thread."""
        return self._scheduler_half.withdraw(transfer, reason)

    def drain(self) -> None:
        """Begin no hand-off with a peer that is not open already. Never blocks. `drained` says when all have ended."""
        self._executor.drain()

    @property
    def drained(self) -> bool:
        """True after `drain`, once no hand-off is open and no block is held for a peer. Read on the engine's thread."""
        # The scheduler half first: it knows of orders that the driver may be taking at this moment.
        return not self.engine.has_work() and not self.engine.stats().held_blocks and self._executor.drained

    def close(self) -> None:
        """End everything: no process, thread, socket, registration or file remains. Idempotent."""
        self._cleanup.close()


def build_worker(settings: WorkerSettings, launcher: Launcher | None = None) -> Worker:
    """Load the model and put the worker together. Raises ConfigError or UnknownModel; then nothing is left behind.

    `launcher` starts the ranks, and those that replace them. It outlives the worker: the caller closes it.
    """
    worker = Worker(settings, *build_executor(settings.engine, launcher), launcher)
    try:
        worker.open()
    except BaseException:
        worker.close()
        raise
    return worker


def _handoff_tokens(settings: WorkerSettings, model: OpenedModel, layout: CacheLayout) -> Callable[[int], int]:
    """Return how many tokens of a prompt of a given length are handed over (R32)."""
    drafter = find_drafter(settings.engine, model)
    state = any(group.kind is CacheKind.STATE for group in layout.groups)
    lookahead = drafter.speculative.handoff_lookahead(state=state) if drafter is not None else 0
    return tokens_handed_over(layout.groups, lookahead=lookahead, first_token=settings.ferry.transfer.first_token)


def describe_engine(settings: WorkerSettings, model: OpenedModel) -> EngineDescription:
    """Describe the embedded engine for its peers."""
    return describe(settings, model.config, model.directory, str(model.dtype), model.kv)


def describe(
    settings: WorkerSettings, config: ModelConfig, directory: Path, dtype: str, kv: KvFormat
) -> EngineDescription:
    """Describe the engine before its weights are loaded, as `kvferry facts MODEL` does. `dtype` may be `auto`."""
    caches = layers_of(config, kv, Shard())
    states, groups = [cache for cache in caches if cache.kind is CacheKind.STATE], make_groups(caches)
    return EngineDescription(
        engine="mini",
        engine_version=__version__,
        role=settings.role,
        mode=settings.ferry.transfer.mode,
        strict=settings.ferry.strict,
        model_id=settings.engine.model,
        protocol=protocol_range(settings.ferry.side_channel.protocol_max).newest,
        fingerprint=model_fingerprint(directory),
        tokenizer=tokenizer_fingerprint(directory),
        dtype=dtype,
        checkpoint_dtype=config.dtype,
        total_kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        hidden_layers=config.num_layers,
        layer_kinds=config.layer_kinds,
        rope=asdict(config.rope),
        window_tokens=next((window for window in config.windows if window is not None), None),
        max_context_tokens=config.max_positions,
        kv_dtype=settings.engine.kv_dtype,
        kv_scales=kv.digest,
        attention_backend="sdpa",
        kv_layout="block-major",
        cross_layer_blocks=True,
        state_dtypes=sorted({f"{p.name.partition('.')[0]}={p.encoding}" for c in states for p in c.parts}),
        hma=len(groups) > 1,
        block_tokens=tuple(settings.engine.block_tokens for g in groups if g.kind is not CacheKind.STATE),
        layer_groups={layer: index for index, group in enumerate(groups) for layer in group.layers},
        tp=settings.engine.tp,
        pp=settings.engine.pp,
        speculation=_speculation(settings, config, directory),
    )


def _speculation(settings: WorkerSettings, config: ModelConfig, directory: Path) -> SpeculationFacts | None:
    """Describe the drafter for peers (R3, R4). One that starts cold needs nothing from a peer, so no peer needs to know
    of it."""
    spec = settings.engine.speculation
    if spec is None or spec.cold_start:
        return None
    drafter: DrafterInfo = open_drafter(spec, directory, config, pp=settings.engine.pp)
    return SpeculationFacts(
        method=spec.method,
        draft_model=spec.model,
        draft_revision=spec.revision,
        draft_fingerprint=model_fingerprint(drafter.directory) if drafter.directory is not None else None,
        aux_layers=drafter.aux_layers,
        num_layers=drafter.config.num_layers if drafter.config is not None else None,
        num_tokens=spec.num_speculative_tokens,
        attention_backend="sdpa" if drafter.config is not None else None,
    )
