"""One rank's hand-offs: the two machines, the peers that they know, and whom a message is for.

Life of a peer engine: accepted (by the handshake), then gone (it restarted, fits no longer, or was silent). In between,
its ranks may be lost and connected again any number of times.

Still no I/O: the driver and the simulator feed it the same events, and carry out the same actions.
"""

from dataclasses import replace

from kvferry.handoff.actions import Action, Disconnect, LayoutQueries, MachineLimits, Peer, PostId, Send
from kvferry.handoff.decode.machine import DecodeMachine
from kvferry.handoff.leases import first_of
from kvferry.handoff.orders import StepOrders, StepReport
from kvferry.handoff.prefill.machine import PrefillMachine
from kvferry.ids import EngineId, Incarnation, PeerName, peer_name
from kvferry.settings import FerrySettings
from kvferry.stats import HandoffStats
from kvferry.wire.handoff_messages import (
    Claim,
    Confirm,
    Drop,
    Fail,
    Message,
    Ready,
    Register,
    Renew,
    RenewAck,
    Revoke,
    Stopped,
    Wrote,
)
from kvferry.wire.versions import PROTOCOL_MAX

__all__ = ["RankProtocol"]


class RankProtocol:
    """Both machines of one rank. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        settings: FerrySettings,
        prefill_queries: LayoutQueries,
        decode_queries: LayoutQueries,
        incarnation: Incarnation,
        *,
        num_ranks: int,
        whole_prefix: bool = True,
        limits: MachineLimits | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._engines: dict[EngineId, tuple[Peer, ...]] = {}
        self._peers: dict[PeerName, Peer] = {}
        self.prefill = PrefillMachine(settings, prefill_queries, limits, whole_prefix=whole_prefix)
        self.decode = DecodeMachine(
            settings, decode_queries, self._ranks_of, num_ranks=num_ranks, whole_prefix=whole_prefix
        )
        self.num_stale = 0
        """Messages of strangers, or of or to an old incarnation."""
        self._ended = HandoffStats()
        self._actions: list[Action] = []

    # ---- peers

    def peer_accepted(
        self,
        engine: EngineId,
        incarnation: Incarnation,
        num_ranks: int,
        now_s: float,
        *,
        protocol: int = PROTOCOL_MAX,
    ) -> None:
        """An engine was accepted, to speak this version. Any other incarnation of it is gone from now on (I6)."""
        known = self._engines.get(engine)
        if known is not None and known[0].incarnation == incarnation:
            return
        if known is not None:
            self.peer_gone(engine, known[0].incarnation, "it has restarted", now_s)
        peers = tuple(
            Peer(peer_name(engine, incarnation, rank), engine, incarnation, rank, protocol) for rank in range(num_ranks)
        )
        self._engines[engine] = peers
        for peer in peers:
            self._peers[peer.name] = peer
        self.decode.peer_restarted(engine, incarnation, now_s)

    def peer_gone(self, engine: EngineId, incarnation: Incarnation, reason: str, now_s: float) -> None:
        """Forgets an engine. Hand-offs with it end as after `peer_lost`: by lease and quarantine, no sooner."""
        known = self._ranks_of(engine, incarnation)
        if known is None:
            return
        for peer in known:
            self.peer_lost(peer.name, reason, now_s)
            del self._peers[peer.name]
        del self._engines[engine]

    def ping(self, name: PeerName) -> None:
        """Asks a peer for a sign of life. The question is a renewal of nothing, which a peer that knows us answers."""
        peer = self._peers.get(name)
        if peer is not None:
            self._actions.append(Send(peer, Renew(to=peer.incarnation, seq=0, from_decode=True, transfers=())))

    def take_silent(self) -> list[Peer]:
        """Returns the peers that gave no sign of life during a hand-off of ours; each failure is returned once."""
        silent, self.decode.silent = self.decode.silent, []
        return silent

    def peer_lost(self, name: PeerName, reason: str, now_s: float, *, dead: bool = False) -> None:
        """The transport lost a peer. Hand-offs with it end; it stays known, and may be connected again.

        `dead`: the transport says that there is no process at the other end, which can write nothing more.
        """
        peer = self._peers.get(name)
        if peer is None:
            return
        self._actions.append(Disconnect(peer))
        self.prefill.peer_lost(peer, now_s)
        self.decode.peer_lost(peer, reason, now_s, dead=dead)

    def _ranks_of(self, engine: str, incarnation: str) -> tuple[Peer, ...] | None:
        peers = self._engines.get(EngineId(engine))
        return peers if peers is not None and peers[0].incarnation == incarnation else None

    # ---- events

    def orders(self, orders: StepOrders, now_s: float) -> None:
        """Carries out orders of the scheduler half, except `accepted` and `gone`, which the driver does first."""
        prefill, decode = self.prefill, self.decode
        for offer in orders.offer:
            prefill.offer(offer, now_s)
        for withdraw in orders.withdraw:
            prefill.withdraw(withdraw, now_s)
        for keep_alive in orders.keep_alive:
            decode.keep_alive(keep_alive, now_s)
        for fetch in orders.fetch:
            decode.fetch(fetch, now_s)
        for cancel in orders.cancel:
            decode.cancel(cancel, now_s)

    def message(self, name: PeerName, message: Message, now_s: float) -> None:
        """A message came from a peer's rank. One of a stranger, or of or to an old incarnation, changes nothing."""
        peer = self._peers.get(name)
        if peer is None or message.to != self._incarnation:
            self.num_stale += 1
            return
        if isinstance(message, Renew):
            (self.prefill if message.from_decode else self.decode).on_renew(peer, message, now_s)
        elif isinstance(message, RenewAck):
            (self.decode if message.to_decode else self.prefill).on_renew_ack(peer, message, now_s)
        elif isinstance(message, Ready | Wrote | Fail | Stopped):
            self._for_decode(peer, message, now_s)
        else:
            self._for_prefill(peer, message, now_s)

    def _for_decode(self, peer: Peer, message: Ready | Wrote | Fail | Stopped, now_s: float) -> None:
        decode = self.decode
        if isinstance(message, Ready):
            decode.on_ready(peer, message, now_s)
        elif isinstance(message, Wrote):
            decode.on_wrote(peer, message, now_s)
        elif isinstance(message, Fail):
            decode.on_fail(peer, message, now_s)
        else:
            decode.on_stopped(peer, message, now_s)

    def _for_prefill(self, peer: Peer, message: Claim | Register | Confirm | Drop | Revoke, now_s: float) -> None:
        prefill = self.prefill
        if isinstance(message, Claim):
            prefill.on_claim(peer, message, now_s)
        elif isinstance(message, Register):
            prefill.on_register(peer, message, now_s)
        elif isinstance(message, Confirm):
            prefill.on_confirm(peer, message, now_s)
        elif isinstance(message, Drop):
            prefill.on_drop(peer, message, now_s)
        else:
            prefill.on_revoke(peer, message, now_s)

    def completed(
        self,
        post: PostId,
        error: str | None,
        now_s: float,
        *,
        started: bool = True,
        num_bytes: int = 0,
        num_runs: int = 0,
    ) -> None:
        """A posted part has ended, with all its handles (R26); or was not started, because it was too late."""
        if not self.prefill.completed(post, error, now_s, started=started):
            self.decode.completed(post, error, now_s, started=started, num_bytes=num_bytes, num_runs=num_runs)

    def tick(self, now_s: float) -> None:
        """Does what is due by now."""
        self.prefill.tick(now_s)
        self.decode.tick(now_s)

    def next_deadline_s(self) -> float | None:
        """Returns when `tick` next has something to do, or None for never."""
        return first_of(self.prefill.next_deadline_s(), self.decode.next_deadline_s())

    def shut_down(self, now_s: float) -> None:
        """Ends every hand-off, with a message to each peer concerned; nothing new begins."""
        self.prefill.drain(now_s)
        self.prefill.withdraw_all("prefill is shutting down", now_s)
        self.decode.cancel_all("decode is shutting down", now_s)

    # ---- what comes out

    def take_actions(self) -> list[Action]:
        """Returns what is to be done, in order. Each action is returned once."""
        taken = self._actions
        taken += self.prefill.actions
        taken += self.decode.actions
        self._actions = []
        self.prefill.actions.clear()
        self.decode.actions.clear()
        return taken

    def take_report(self) -> StepReport | None:
        """Returns what has ended since the last call, or None for nothing."""
        prefill, decode = self.prefill, self.decode
        if not (decode.landed or decode.failed or decode.released or prefill.released):
            return None
        report = StepReport(
            landed=tuple(decode.landed),
            failed=tuple(decode.failed),
            released=frozenset(decode.released + prefill.released),
            taken=frozenset(prefill.taken),
        )
        for done in (decode.landed, decode.failed, decode.released, prefill.released, prefill.taken):
            done.clear()
        ended = self._ended
        self._ended = replace(
            ended,
            landed=ended.landed + len(report.landed),
            failed=ended.failed + len(report.failed),
            bytes=ended.bytes + sum(landed.num_bytes for landed in report.landed),
            transfer_s=ended.transfer_s + sum(landed.transfer_s for landed in report.landed),
        )
        return report

    def stats(self) -> HandoffStats:
        """Returns what has ended since the start, and what is open now."""
        return replace(
            self._ended,
            open_grants=self.prefill.num_open,
            quarantined_blocks=self.decode.quarantined_blocks,
            expired_leases=self.prefill.num_expired + self.decode.num_expired,
            peers=self.num_peers,
        )

    @property
    def idle(self) -> bool:
        """True if the connector has no block of our engine. Peers may still ask for what was never offered."""
        return not (self.prefill.num_open or self.decode.num_open)

    @property
    def reply_expected(self) -> bool:
        """True if the next message matters at once: a whole prompt is offered here, or a receive of ours is open.

        While a prompt is being computed nothing waits: what a peer says of it can wait until more of it is there.
        """
        return bool(self.decode.num_open) or self.prefill.has_final

    @property
    def num_peers(self) -> int:
        """The number of ranks of accepted peers."""
        return len(self._peers)
