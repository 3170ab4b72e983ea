"""One worker of the embedded engine, put together.

Order of construction: model -> cache (both in every rank) -> rendezvous -> transport (registers the cache) and driver
in every rank -> scheduler half -> engine. `Worker.close` leaves no process, thread, socket, registration or file. When
ranks have died all but the rendezvous is made anew.
"""

import base64
import logging
import secrets
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from kvferry import __version__
from kvferry.connector.rendezvous import Rendezvous
from kvferry.connector.scheduler import EngineIdentity, HandoffScheduler, make_scheduler
from kvferry.connector.worker import joined_stats
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
from kvferry.handshake.engine_description import EngineDescription, SpeculationFacts
from kvferry.handshake.exchange import LocalSide
from kvferry.handshake.facts import Facts
from kvferry.handshake.fingerprint import model_fingerprint, tokenizer_fingerprint
from kvferry.handshake.fit import make_fit
from kvferry.handshake.peer_table import PeerState
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.layout.description import CacheKind
from kvferry.settings import FerrySettings, Role
from kvferry.stats import HandoffStats
from kvferry.wire.hello import Hello, RankHello, encode_hello
from kvferry.wire.layout_codec import encode_layout
from kvferry.wire.versions import protocol_range

__all__ = ["Standing", "Worker", "WorkerSettings", "build_worker", "describe", "describe_engine"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """All that one worker is started with."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    """The model and how it runs."""

    ferry: FerrySettings = field(default_factory=FerrySettings)
    """How KV crosses."""

    role: Role = Role.BOTH
    """What it does for others."""

    engine_id: str | None = None
    """Its name in the fleet; None makes one at random. Two workers must not share one."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How an engine stands among the others, from the start of its ranks to their end."""

    identity: EngineIdentity
    local: LocalSide
    scheduler: HandoffScheduler


class Worker:
    """An engine with its connector. `engine` is stepped by one thread; everything else may be read from any."""

    engine: Engine

    def __init__(
        self, settings: WorkerSettings, model: OpenedModel, executor: Executor, launcher: Launcher | None = None
    ) -> None:
        """Nothing runs before `open`; whatever happens there, `close` is called. `launcher`: see build_worker."""
        self._launcher = launcher
        self.settings = settings
        self._engine_id = EngineId(settings.engine_id or f"mini-{secrets.token_hex(4)}")
        self._model = model
        self._executor = executor
        self._cleanup = ExitStack()

    def open(self) -> None:
        """Connect the ranks, and begin to answer peers. Raises ConfigError."""
        self._cleanup.callback(lambda: self._executor.close())
        self._rendezvous = Rendezvous(
            self.settings.ferry.side_channel,
            lambda peer: self._executor.introduce(peer),
            lambda peer: self._executor.depart(peer),
            name=self._engine_id,
        )
        self._cleanup.callback(self._rendezvous.close)
        self._standing = self._stand(self._executor)
        settings = self.settings.engine
        revives = settings.tp * settings.pp > 1 and settings.on_rank_death == "restart"
        self.engine = Engine(
            self._model,
            self._executor,
            settings,
            connector=self._standing.scheduler,
            revive=self._revive if revives else None,
        )
        self._rendezvous.start(self._standing.local)
        self._log("worker ready")

    def _stand(self, executor: Executor) -> Standing:
        """Start the worker halves, as a new incarnation, and put together what peers are told."""
        settings, rendezvous = self.settings, self._rendezvous
        tp, pp = settings.engine.tp, settings.engine.pp
        incarnation = Incarnation(secrets.token_hex(8))
        executor.connect(ConnectorStart(self._engine_id, incarnation, settings.ferry), rendezvous.lost)
        identity = EngineIdentity(self._engine_id, incarnation, rendezvous.host, rendezvous.port, tp, pp)
        ranks = tuple(
            RankHello(
                layout=encode_layout(layout),
                transport=settings.ferry.transfer.transport,
                transport_metadata=metadata,
            )
            for layout, metadata in zip(executor.layouts, executor.metadata, strict=True)
        )
        hello = Hello(
            engine=self._engine_id,
            incarnation=incarnation,
            role=settings.role,
            ranks=ranks,
            host=rendezvous.host,
            port=rendezvous.port,
        )
        local = LocalSide(
            Facts.from_engine(describe_engine(settings, self._model)),
            hello,
            make_fit(executor.layouts, settings.role),
            protocol_range(settings.ferry.side_channel.protocol_max),
        )
        groups, first_token = executor.layouts[0].groups, settings.ferry.transfer.first_token
        drafter = find_drafter(settings.engine, self._model)
        state = any(group.kind is CacheKind.STATE for group in groups)
        lookahead = drafter.speculative.handoff_lookahead(state=state) if drafter is not None else 0
        count = tokens_handed_over(groups, lookahead=lookahead, first_token=first_token)
        return Standing(identity, local, make_scheduler(identity, rendezvous, settings.ferry, count))

    def _revive(self) -> tuple[Executor, HandoffScheduler]:
        """New ranks after the old ones have died: another incarnation at the same address. On the engine's thread."""
        launcher = self._launcher if self._launcher is not None and self._launcher.running else None
        _, executor = build_executor(self.settings.engine, launcher)
        try:
            standing = self._stand(executor)
        except BaseException:
            executor.close()
            raise
        # In this order: who is accepted as of now is introduced to the new ranks.
        self._executor, self._standing = executor, standing
        self._rendezvous.restart(standing.local)
        self._log("worker is ready again")
        return executor, standing.scheduler

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
        """Who it is; another one after ranks have died."""
        return self._standing.identity

    def describe(self) -> dict[str, object]:
        """The JSON of GET /v1/kvferry: what routers and `kvferry compare` read."""
        peers = self._rendezvous.peers()
        return {
            "engine": self.identity.engine,
            "incarnation": self.identity.incarnation,
            "version": __version__,
            "role": self.settings.role.value,
            "mode": self.settings.ferry.transfer.mode.value,
            "transport": self.settings.ferry.transfer.transport,
            "model": self.settings.engine.model,
            "side_channel": {"host": self.identity.host, "port": self.identity.port},
            "protocol": {
                "oldest": self._standing.local.protocols.oldest,
                "newest": self._standing.local.protocols.newest,
            },
            "facts": self._standing.local.facts.to_json(),
            "hello": base64.b64encode(encode_hello(self._standing.local.hello)).decode(),
            "tp_size": self.identity.tp_size,
            "pp_size": self.identity.pp_size,
            "limits": {
                "max_model_len": self.engine.max_model_len,
                "block_tokens": self.settings.engine.block_tokens,
                "blocks": self.engine.blocks.num_usable,
            },
            "room": {"free_blocks": self.engine.blocks.num_free, "waiting": self.engine.stats().waiting},
            "cache": self._cache_mark(),
            "abilities": ["first-token", "meet", "prompt-blocks"],
            "ranks": self._describe_ranks(),
            "peers": [
                {
                    "engine": peer.engine,
                    "incarnation": peer.incarnation,
                    "state": peer.state.value,
                    "notes": list(peer.notes),
                    "address": peer.address,
                    "reason": peer.reason,
                }
                for peer in peers
            ],
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
        """Changes whenever `cached_blocks` does."""
        hashes = self.cached_blocks()
        return {"version": hash(frozenset(hashes)) & 0x7FFFFFFFFFFFFFFF, "blocks": len(hashes)}

    def cached_blocks(self) -> list[BlockHash]:
        """The hashes of the blocks in the prefix cache. On the engine thread."""
        return self.engine.blocks.known_hashes(self.engine.scheduler.groups.telling)

    def meet(self, engine: str, incarnation: str | None, host: str, port: int) -> str:
        """Shake hands with this engine if that is due: `asking`, `accepted` or `refused`. On the engine thread."""
        known = Incarnation(incarnation) if incarnation is not None else None
        return self._rendezvous.view(EngineId(engine), known, host, port).status.value

    def handoff_stats(self) -> HandoffStats:
        """Counters of the hand-offs, with the peers that are known and those that were refused."""
        stats = joined_stats(self._executor.rank_stats())
        return replace(stats, refused_peers=stats.refused_peers + len(self.refused_peers()))

    def refused_peers(self) -> dict[str, str]:
        """Peers that are refused now, and why; for /health and /metrics. Safe from any thread."""
        return {peer.engine: peer.reason for peer in self._rendezvous.peers() if peer.state is PeerState.REFUSED}

    def refusals(self) -> list[str]:
        """The same as sentences."""
        return [f"{engine}: {reason}" for engine, reason in self.refused_peers().items()]

    def release(self, transfer: TransferId, reason: str) -> bool:
        """Nobody will take this finished prefill: see HandoffScheduler.withdraw. On the engine thread."""
        return self._standing.scheduler.withdraw(transfer, reason)

    def drain(self) -> None:
        """Begin no hand-off with a peer that is not open already. From any thread; never blocks. See `drained`."""
        self._executor.drain()

    @property
    def drained(self) -> bool:
        """After `drain`: no hand-off is open, and no block is held for a peer. Read on the engine thread."""
        # The scheduler half first: it knows of orders that the driver may be taking at this moment.
        return not self.engine.has_work() and not self.engine.stats().held_blocks and self._executor.drained

    def close(self) -> None:
        """End everything. Idempotent."""
        self._cleanup.close()


def build_worker(settings: WorkerSettings, launcher: Launcher | None = None) -> Worker:
    """Load the model and put the worker together. Raises ConfigError or UnknownModel; then nothing is left behind.

    `launcher`: one that outlives the worker, for its ranks and those that replace them; the caller closes it.
    """
    worker = Worker(settings, *build_executor(settings.engine, launcher), launcher)
    try:
        worker.open()
    except BaseException:
        worker.close()
        raise
    return worker


def describe_engine(settings: WorkerSettings, model: OpenedModel) -> EngineDescription:
    """What the embedded engine says of itself, for the table of facts."""
    return describe(settings, model.config, model.directory, str(model.dtype), model.kv)


def describe(
    settings: WorkerSettings, config: ModelConfig, directory: Path, dtype: str, kv: KvFormat
) -> EngineDescription:
    """The same before the weights are loaded: `kvferry facts MODEL`. `dtype`: what weights are, or `auto`."""
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
    """What peers are told of the drafter (R3, R4). A cold one is nobody's but ours: it wants nothing from a peer."""
    spec = settings.engine.speculation
    if spec is None or spec.cold_start:
        return None
    card: DrafterInfo = open_drafter(spec, directory, config, pp=settings.engine.pp)
    return SpeculationFacts(
        method=spec.method,
        draft_model=spec.model,
        draft_revision=spec.revision,
        draft_fingerprint=model_fingerprint(card.directory) if card.directory is not None else None,
        aux_layers=card.aux_layers,
        num_layers=card.config.num_layers if card.config is not None else None,
        num_tokens=spec.num_speculative_tokens,
        attention_backend="sdpa" if card.config is not None else None,
    )
