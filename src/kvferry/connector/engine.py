"""EngineConnector: all that an engine needs of other engines, in one object, in its scheduler's process.

An engine is put together in this order (examples/own_engine.py does it in one process):

    connector = EngineConnector(description, settings, engine_id=...)      # binds the side channel: the port is known
    worker = start_worker(layout, [cache], engine=connector.engine_id, settings=settings,
                          on_lost=connector.lost)                          # one per rank, in the rank's process
    scheduler_half = connector.start([worker.record], worker.start_step)   # from here on, peers come and go

and taken apart with `connector.close()` and `worker.close()`.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from kvferry.clock import Clock
from kvferry.connector.base import EngineIdentity, RankRecord
from kvferry.connector.by_mode import make_scheduler
from kvferry.connector.digest_thread import DigestThread
from kvferry.connector.peers import PeerView
from kvferry.connector.rendezvous import Rendezvous
from kvferry.connector.scheduler import HandoffScheduler
from kvferry.errors import ConfigError
from kvferry.handoff.orders import StepOrders
from kvferry.handshake.engine_description import EngineDescription
from kvferry.handshake.exchange import LocalSide
from kvferry.handshake.facts import Facts
from kvferry.handshake.fit import make_fetch_obstacle, make_fit
from kvferry.handshake.peer_table import PeerState
from kvferry.ids import EngineId, Incarnation
from kvferry.settings import FerrySettings
from kvferry.stats import HandoffStats
from kvferry.wire.hello import Hello, encode_hello
from kvferry.wire.versions import protocol_range

__all__ = ["EngineConnector", "joined_stats"]


class EngineConnector:
    """One engine's connector: its side channel, its handshakes, and the scheduler half that they belong to.

    Threads: `start` and `restart` are called on the engine's thread, as is all of the scheduler half; `lost` and the
    methods that only look may be called on any thread. Nothing blocks but the constructor and `close`, for moments.
    """

    def __init__(
        self,
        description: EngineDescription,
        settings: FerrySettings,
        *,
        engine_id: str,
        handoff_tokens: Callable[[int], int] | None = None,
        mode_remedy: str = "start both with the same --transfer-mode",
        clock: Clock | None = None,
    ) -> None:
        """Bind the side channel. Raises ConfigError if the address or the key cannot be used.

        `engine_id` is the engine's name, which no other engine in the fleet may have. `handoff_tokens` says how many
        tokens of a prompt are handed over (R32); None means all of them. `mode_remedy` says what to do about a peer of
        the other transfer mode, in the words of this engine's settings.
        """
        described = (description.mode, description.strict)
        assert described == (settings.transfer.mode, settings.strict), "description and settings state the same mode"
        self.engine_id = EngineId(engine_id)
        self.settings = settings
        self.role = description.role
        self._protocols = protocol_range(settings.side_channel.protocol_max)
        self._facts = Facts.from_engine(replace(description, protocol=self._protocols.newest))
        self._handoff_tokens = handoff_tokens
        self._mode_remedy = mode_remedy
        self._rendezvous = Rendezvous(settings.side_channel, settings.fetch, name=self.engine_id, clock=clock)
        self._digests = DigestThread()
        self._identity: EngineIdentity | None = None
        self._local: LocalSide | None = None

    def start(self, ranks: Sequence[RankRecord], send: Callable[[StepOrders], None]) -> HandoffScheduler:
        """Begin to answer peers, and return the scheduler half. Raises ConfigError if `ranks` are not one engine's.

        `ranks` are the records of all worker halves, in the order of Rank.index. `send` hands orders to every worker
        half at once, without waiting for a step: that is how they learn of peers. It is called on any thread, and must
        neither block nor raise.
        """
        local, half = self._join(ranks)
        self._rendezvous.start(local, send)
        return half

    def restart(self, ranks: Sequence[RankRecord], send: Callable[[StepOrders], None]) -> HandoffScheduler:
        """Go on with new ranks after the old ones have died: another incarnation, at the same address.

        Every peer is forgotten, and met again. The scheduler half that `start` returned is not to be used any more.
        """
        local, half = self._join(ranks)
        self._rendezvous.restart(local, send)
        return half

    def _join(self, ranks: Sequence[RankRecord]) -> tuple[LocalSide, HandoffScheduler]:
        """Make one engine of its ranks: what it shows to peers, and its scheduler half."""
        _check(ranks)
        rank = ranks[0].layout.rank
        identity = EngineIdentity(
            engine=self.engine_id,
            incarnation=ranks[0].incarnation,
            host=self._rendezvous.host,
            port=self._rendezvous.port,
            tp_size=rank.tp_size,
            pp_size=rank.pp_size,
            mode_remedy=self._mode_remedy,
        )
        hello = Hello(
            engine=identity.engine,
            incarnation=identity.incarnation,
            role=self.role,
            ranks=tuple(one.hello() for one in ranks),
            host=identity.host,
            port=identity.port,
        )
        fit = make_fit([one.layout for one in ranks], self.role)
        obstacle = make_fetch_obstacle([one.layout for one in ranks])
        self._identity, self._local = identity, LocalSide(self._facts, hello, fit, self._protocols, obstacle)
        return self._local, make_scheduler(
            identity,
            self._rendezvous,
            self.settings,
            self._handoff_tokens,
            hash_ahead=self._digests.submit,
            prefixes=self._rendezvous,
        )

    @property
    def identity(self) -> EngineIdentity:
        """Who this engine is, and where it listens. Known after `start`; `restart` changes the incarnation."""
        assert self._identity is not None, "start() makes the identity"
        return self._identity

    def preconnect(self, engine: str, incarnation: str | None, host: str, port: int) -> PeerView:
        """Shake hands with this engine now, if that is due, so that no request has to wait for it. On the engine's
        thread; call it again to see how the handshake went."""
        return self._rendezvous.view(
            EngineId(engine), None if incarnation is None else Incarnation(incarnation), host, port
        )

    def on_question(self, wake: Callable[[], None]) -> None:
        """Call `wake` when another engine has asked for KV that this one may hold: the scheduler half's
        `has_pending_work` is true then, and its next `build_orders` answers. `wake` is called on another thread, and
        must neither block nor raise."""
        self._rendezvous.on_question(wake)

    def lost(self, engine: EngineId, incarnation: Incarnation, reason: str) -> None:
        """A worker half has found that this peer is gone: tell the other ranks, and shake hands again when a request
        names it. Give this to `start_worker` as `on_lost`. From any thread."""
        self._rendezvous.lost(engine, incarnation, reason)

    def refused_peers(self) -> dict[str, str]:
        """Peers that are refused now, and the reason, which names the remedy. From any thread."""
        return {peer.engine: peer.reason for peer in self._rendezvous.peers() if peer.state is PeerState.REFUSED}

    def stats(self, ranks: Sequence[HandoffStats]) -> HandoffStats:
        """The engine's counters, from those of its worker halves. From any thread."""
        joined = joined_stats(ranks)
        return replace(joined, refused_peers=joined.refused_peers + len(self.refused_peers()))

    def describe(self) -> dict[str, object]:
        """What routers and `kvferry compare` read of an engine, as JSON values. From any thread."""
        assert self._local is not None, "start() makes what there is to describe"
        identity = self.identity
        return {
            "engine": identity.engine,
            "incarnation": identity.incarnation,
            "role": self.role.value,
            "mode": self.settings.transfer.mode.value,
            "transport": self.settings.transfer.transport,
            "side_channel": {"host": identity.host, "port": identity.port},
            "protocol": {"oldest": self._protocols.oldest, "newest": self._protocols.newest},
            "facts": self._facts.to_json(),
            "hello": base64.b64encode(encode_hello(self._local.hello)).decode(),
            "tp_size": identity.tp_size,
            "pp_size": identity.pp_size,
            "peers": [
                {
                    "engine": peer.engine,
                    "incarnation": peer.incarnation,
                    "state": peer.state.value,
                    "notes": list(peer.notes),
                    "address": peer.address,
                    "reason": peer.reason,
                }
                for peer in self._rendezvous.peers()
            ],
        }

    def close(self) -> None:
        """Close the side channel: no socket and no thread remains. Idempotent. The worker halves are closed apart."""
        self._rendezvous.close()
        self._digests.close()


def joined_stats(ranks: Sequence[HandoffStats]) -> HandoffStats:
    """The counters of an engine, from those of its ranks. Bytes add up. Every other number counts the same hand-offs on
    each rank, so the highest one is taken."""
    highest = {field.name: max(getattr(one, field.name) for one in ranks) for field in fields(HandoffStats)}
    return HandoffStats(**{**highest, "bytes": sum(one.bytes for one in ranks)})


def _check(ranks: Sequence[RankRecord]) -> None:
    indices = [one.layout.rank.index for one in ranks]
    expected = ranks[0].layout.rank.tp_size * ranks[0].layout.rank.pp_size if ranks else 1
    if indices != list(range(expected)):
        raise ConfigError(f"ranks {indices!r} have registered caches; {expected} were expected")
    incarnations = sorted({str(one.incarnation) for one in ranks})
    if len(incarnations) > 1:
        raise ConfigError(
            f"the ranks of one engine were started as {incarnations!r}: start all of them with one incarnation"
        )
