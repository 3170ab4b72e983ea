"""One worker of the embedded engine, put together.

Order of construction: model -> cache -> transport (registers the cache) -> driver -> rendezvous -> scheduler half ->
engine. `Worker.close` goes the other way, and leaves no thread, socket, registration or file.
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
from kvferry.connector.worker import HandoffWorker, start_worker
from kvferry.engines.mini.cache import KVCache
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.loading import LoadedModel
from kvferry.engines.mini.models import ModelConfig
from kvferry.engines.mini.settings import EngineSettings
from kvferry.handshake.engine import EngineDescription
from kvferry.handshake.facts import Facts
from kvferry.handshake.fingerprint import model_fingerprint, tokenizer_fingerprint
from kvferry.handshake.fit import make_fit
from kvferry.handshake.handshake import LocalSide
from kvferry.handshake.peers import PeerState
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.settings import FerrySettings, Role
from kvferry.stats import HandoffStats
from kvferry.wire.hello import Hello, RankHello, encode_hello
from kvferry.wire.layout_codec import encode_layout
from kvferry.wire.versions import protocol_range

__all__ = ["Worker", "WorkerSettings", "build_worker"]

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


class Worker:
    """An engine with its connector. `engine` is stepped by one thread; everything else may be read from any."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        engine: Engine,
        identity: EngineIdentity,
        local: LocalSide,
        rendezvous: Rendezvous,
        halves: tuple[HandoffScheduler, HandoffWorker],
        cleanup: ExitStack,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.identity = identity
        self._local = local
        self._rendezvous = rendezvous
        self._scheduler, self._worker = halves
        self._cleanup = cleanup

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
            "protocol": {"oldest": self._local.protocols.oldest, "newest": self._local.protocols.newest},
            "facts": self._local.facts.to_json(),
            "hello": base64.b64encode(encode_hello(self._local.hello)).decode(),
            "tp_size": self.identity.tp_size,
            "pp_size": self.identity.pp_size,
            "limits": {
                "max_model_len": self.engine.max_model_len,
                "block_tokens": self.settings.engine.block_tokens,
                "blocks": self.engine.blocks.num_usable,
            },
            "peers": [
                {
                    "engine": peer.engine,
                    "incarnation": peer.incarnation,
                    "state": peer.state.value,
                    "address": peer.address,
                    "reason": peer.reason,
                }
                for peer in peers
            ],
        }

    def handoff_stats(self) -> HandoffStats:
        """Counters of the hand-offs, with the peers that are known and those that were refused."""
        stats = self._worker.stats()
        return replace(stats, refused_peers=stats.refused_peers + len(self.refused_peers()))

    def refused_peers(self) -> dict[str, str]:
        """Peers that are refused now, and why; for /health and /metrics. Safe from any thread."""
        return {peer.engine: peer.reason for peer in self._rendezvous.peers() if peer.state is PeerState.REFUSED}

    def refusals(self) -> list[str]:
        """The same as sentences."""
        return [f"{engine}: {reason}" for engine, reason in self.refused_peers().items()]

    def release(self, transfer: TransferId, reason: str) -> bool:
        """Nobody will take this finished prefill: see HandoffScheduler.withdraw. On the engine thread."""
        return self._scheduler.withdraw(transfer, reason)

    def drain(self) -> None:
        """Begin no hand-off with a peer that is not open already. From any thread; never blocks. See `drained`."""
        self._worker.drain()

    @property
    def drained(self) -> bool:
        """After `drain`: no hand-off is open, and no block is held for a peer. Read on the engine thread."""
        # The scheduler half first: it knows of orders that the driver may be taking at this moment.
        return not self.engine.has_work() and not self.engine.stats().held_blocks and self._worker.drained

    def close(self) -> None:
        """End everything. Idempotent."""
        self._cleanup.close()


def build_worker(settings: WorkerSettings) -> Worker:
    """Load the model and put the worker together. Raises ConfigError or UnknownModel; then nothing is left behind."""
    engine_id = EngineId(settings.engine_id or f"mini-{secrets.token_hex(4)}")
    incarnation = Incarnation(secrets.token_hex(8))
    with ExitStack() as cleanup:
        parts: list[tuple[HandoffScheduler, HandoffWorker, EngineIdentity, LocalSide, Rendezvous]] = []

        def connect(model: LoadedModel, cache: KVCache) -> tuple[HandoffScheduler, HandoffWorker]:
            layout = cache.layout()
            worker = start_worker(
                layout,
                (cache.data,),
                engine=engine_id,
                incarnation=incarnation,
                settings=settings.ferry,
                on_lost=lambda engine, incarnation, reason: rendezvous.lost(engine, incarnation, reason),
            )
            cleanup.callback(worker.close)
            rendezvous = Rendezvous(settings.ferry.side_channel, worker.introduce, worker.depart, name=engine_id)
            cleanup.callback(rendezvous.close)
            identity = EngineIdentity(engine_id, incarnation, rendezvous.host, rendezvous.port)
            hello = Hello(
                engine=engine_id,
                incarnation=incarnation,
                role=settings.role,
                ranks=(
                    RankHello(
                        layout=encode_layout(layout),
                        transport=settings.ferry.transfer.transport,
                        transport_metadata=worker.transport_metadata,
                    ),
                ),
                host=rendezvous.host,
                port=rendezvous.port,
            )
            facts = Facts.from_engine(describe_engine(settings, model, cache))
            local = LocalSide(
                facts,
                hello,
                make_fit((layout,), settings.role),
                protocol_range(settings.ferry.side_channel.protocol_max),
            )
            scheduler = make_scheduler(identity, rendezvous, settings.ferry)
            parts.append((scheduler, worker, identity, local, rendezvous))
            return scheduler, worker

        engine = Engine.load(settings.engine, connector=connect)
        scheduler, worker, identity, local, rendezvous = parts[0]
        rendezvous.start(local)
        logger.info(
            "worker ready engine=%s incarnation=%s role=%s mode=%s side_channel=%s:%s blocks=%s",
            engine_id,
            incarnation,
            settings.role,
            settings.ferry.transfer.mode,
            identity.host,
            identity.port,
            engine.blocks.num_usable,
        )
        return Worker(
            settings=settings,
            engine=engine,
            identity=identity,
            local=local,
            rendezvous=rendezvous,
            halves=(scheduler, worker),
            cleanup=cleanup.pop_all(),
        )


def describe_engine(settings: WorkerSettings, model: LoadedModel, cache: KVCache) -> EngineDescription:
    """What the embedded engine says of itself, for the table of facts."""
    return describe(settings, model.config, model.directory, str(cache.data.dtype))


def describe(settings: WorkerSettings, config: ModelConfig, directory: Path, dtype: str) -> EngineDescription:
    """The same before anything is loaded: `kvferry facts MODEL`. `dtype`: what weights and cache are, or `auto`."""
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
        layer_kinds=tuple("full" if window is None else "window" for window in config.windows),
        rope=asdict(config.rope),
        window_tokens=next((window for window in config.windows if window is not None), None),
        max_context_tokens=config.max_positions,
        kv_dtype="auto",
        attention_backend="sdpa",
        kv_layout="block-major",
        cross_layer_blocks=True,
        block_tokens=(settings.engine.block_tokens,),
    )
