"""The decode side of hand-offs, one rank: what was asked for, what has arrived, and when the blocks are ours again.

Life of one receive (a fetched transfer at this rank; handoff/transitions.py has every move):

1. OPEN       every prefill rank that has bytes for us was sent a Claim (pull) or a Register (push). Parts arrive: our
              reads end (pull), or Wrote messages come with the last byte of each part (push).
2. LANDED     every part of every prefill rank is here, under a lease that was valid, and its digest is right; each
              prefill rank was sent a Confirm. Reported once; the blocks are the engine's.
   FAILING    nothing new starts. When our reads have ended and every writer has stopped, or their time is over, the
              failure is reported (R26).
   FAILED     the engine knows of the failure, or cancelled. Blocks wait until each prefill rank has stopped, or its
              lease and the quarantine are over.
3. RELEASED   after FAILED, when no read of ours is in flight and every source is finished. Reported once.

Every handler records what happened, then calls `_advance`: only there are failures and releases reported. From the
failure on, decode/wind_down.py decides.
"""

from collections.abc import Callable, Sequence

from kvferry.handoff.actions import LayoutQueries, Peer, PostId, Send
from kvferry.handoff.decode.outgoing import Outgoing
from kvferry.handoff.decode.receive import Receive, Source, nothing_arrived
from kvferry.handoff.decode.wind_down import WindDown
from kvferry.handoff.keep_alives import KeepAlives
from kvferry.handoff.leases import Heartbeats, Timers, first_of
from kvferry.handoff.orders import Cancel, Fetch, KeepAlive, Landed
from kvferry.handoff.transitions import RECEIVE, SETTLED, SOURCE, ReceiveEvent, ReceiveState, SourceEvent, SourceState
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.settings import FerrySettings
from kvferry.wire.handoff_messages import Fail, Ready, Renew, RenewAck, Stopped, Wrote

__all__ = ["DecodeMachine"]

_NEVER = float("inf")
_UNKNOWN_AFTER_S = 1.0
"""After this time without a grant of what prefill has answered for, it is asked whether it knows the transfer."""


class DecodeMachine:
    """All receives of one decode rank. No I/O: methods take the time, and leave actions in `actions`.

    `ranks_of` returns the ranks of an accepted incarnation, or None. `whole_prefix` says that what arrived of a failed
    hand-off can be used as a prefix: all cache groups keep every token.
    """

    def __init__(
        self,
        settings: FerrySettings,
        queries: LayoutQueries,
        ranks_of: Callable[[str, str], Sequence[Peer] | None],
        *,
        num_ranks: int,
        whole_prefix: bool = True,
    ) -> None:
        self._lease = settings.lease
        self._older_peers = settings.transfer.older_peers
        self._queries = queries
        self._ranks_of = ranks_of
        self._receives: dict[TransferId, Receive] = {}
        self._heartbeats = Heartbeats(settings.lease, from_decode=True)
        self._outgoing = Outgoing(num_ranks, settings.lease.ttl_s, self._heartbeats)
        self._wind_down = WindDown(settings.lease, self._heartbeats, self._outgoing, whole_prefix=whole_prefix)
        self._keep_alives = KeepAlives(self._heartbeats, settings.transfer.deadline_s)
        self._timers: Timers[TransferId] = Timers()
        self.actions = self._outgoing.actions
        self.landed: list[Landed] = []
        self.failed = self._wind_down.failed
        self.released: list[TransferId] = []
        self.silent: list[Peer] = []
        """Peers that gave no sign of life during a hand-off; the caller takes them."""
        self.num_ignored = 0
        self._num_silent = 0

    # ---- orders of our engine

    def keep_alive(self, order: KeepAlive, now_s: float) -> None:
        """The request waits in our queue: renew prefill's grant."""
        if order.transfer not in self._receives:
            self._keep_alives.keep(order.transfer, self._ranks_of(order.engine, order.incarnation) or (), now_s)

    def fetch(self, order: Fetch, now_s: float) -> None:
        """Begins a receive. An unknown peer fails it at once; an empty range lands at once."""
        if order.transfer in self._receives:
            self.num_ignored += 1
            return
        self._keep_alives.end(order.transfer)
        if (peers := self._ranks_of(order.engine, order.incarnation)) is None:
            reason = f"prefill engine {order.engine!r} is not known, or has restarted"
            self.failed.append(nothing_arrived(order, reason))
            self.released.append(order.transfer)
            return
        receive = Receive(order, now_s, now_s + order.deadline_s)
        self._receives[order.transfer] = receive
        for peer in peers:
            if not len(order.wanted) or not self._queries.owes(peer):
                self._outgoing.confirm(receive, peer)
                continue
            source = receive.sources[peer.rank] = Source(peer, alive_at_s=now_s, asked_s=now_s)
            source.arrived_to = source.cutter.next_token = order.wanted.start
            if receive.pull:
                self._heartbeats.add(peer, order.transfer, now_s)
            self._outgoing.ask(receive, source, now_s)
        if not receive.sources and len(order.wanted):
            self._wind_down.fail(receive, f"{order.engine!r} has nothing that this rank needs", now_s)
        elif not receive.sources:
            self._land(receive, now_s)
        self._advance(receive, now_s)

    def cancel(self, order: Cancel, now_s: float) -> None:
        """The request is gone; nothing but `released` is reported of it any more."""
        if (receive := self._receives.get(order.transfer)) is not None:
            self._cancel(receive, f"cancelled: {order.reason}", now_s)
            return
        self._keep_alives.end(order.transfer)
        for peer in self._ranks_of(order.engine, order.incarnation) or ():
            self._outgoing.drop(order.transfer, peer, order.reason)

    def cancel_all(self, reason: str, now_s: float) -> None:
        """Cancels everything that is open."""
        for receive in list(self._receives.values()):
            self._cancel(receive, reason, now_s)

    # ---- messages of prefill ranks

    def on_ready(self, peer: Peer, message: Ready, now_s: float) -> None:
        """Pull: more may be read."""
        if (found := self._find(peer, message.transfer)) is None:
            return
        receive, source = found
        if receive.state is not ReceiveState.OPEN or not receive.pull or source.state in SETTLED:
            return
        source.alive_at_s = now_s
        if message.ack:
            source.acked_s = max(source.acked_s, self._heartbeats.claim_acked(peer.name, message.ack))
        source.ttl_s = message.ttl_s
        source.lease_s = self._heartbeats.held_s(source.acked_s, source.ttl_s)
        wanted = receive.fetch.wanted
        if message.start > wanted.start:
            self._wind_down.fail(
                receive, f"prefill has tokens from {message.start}, {wanted.start} was asked for", now_s
            )
        else:
            receive.grant(source, now_s)
            self._heartbeats.add(peer, receive.fetch.transfer, now_s, message.ttl_s)
            if not source.final and (message.final or message.stop >= source.ready_stop):
                source.extend(message, receive.fetch, self._queries, self._lease.ttl_s)
            self._start_reads(receive, source, now_s)
        self._advance(receive, now_s)

    def on_wrote(self, peer: Peer, message: Wrote, now_s: float) -> None:
        """Push: a part is in our memory."""
        if (found := self._find(peer, message.transfer)) is None:
            return
        receive, source = found
        if receive.pull or source.finished or message.part in source.parts:
            self.num_ignored += 1
            return
        if message.owes:
            self._record_part(receive, source, message, now_s)
        else:
            self._wind_down.fail(receive, f"prefill rank {peer.rank} says that it has nothing for us", now_s)
        self._advance(receive, now_s)

    def on_fail(self, peer: Peer, message: Fail, now_s: float) -> None:
        """A prefill rank cannot hand over."""
        if (found := self._find(peer, message.transfer)) is None:
            return
        receive, source = found
        if source.state is not SourceState.DONE:
            if message.quiet and not receive.pull:
                SOURCE.move(source, SourceEvent.STOP)
            self._wind_down.fail(receive, message.reason, now_s)
            self._advance(receive, now_s)

    def on_stopped(self, peer: Peer, message: Stopped, now_s: float) -> None:
        """Push: this prefill rank writes no more."""
        if (found := self._find(peer, message.transfer)) is None:
            return
        receive, source = found
        if source.state is not SourceState.DONE and not receive.pull:
            SOURCE.move(source, SourceEvent.STOP)
            self._wind_down.fail(receive, "prefill has stopped", now_s)
            self._advance(receive, now_s)

    def on_renew(self, peer: Peer, message: Renew, now_s: float) -> None:
        """Push: the holder of grants on our blocks is alive."""
        ended = []
        for name in message.transfers:
            found = self._lookup(peer, name)
            if found is None or found[0].pull or found[0].state is not ReceiveState.OPEN or found[1].finished:
                ended.append(name)
                continue
            receive, source = found
            source.alive_at_s = now_s
            if source.state is SourceState.WAITING:
                receive.grant(source, now_s)
                self._advance(receive, now_s)
        ack = RenewAck(to=peer.incarnation, seq=message.seq, to_decode=False, ended=tuple(ended))
        self.actions.append(Send(peer, ack))

    def on_renew_ack(self, peer: Peer, message: RenewAck, now_s: float) -> None:
        """Pull: our lease goes on, from when we sent the renewal."""
        if (matched := self._heartbeats.acked(peer.name, message)) is None:
            self.num_ignored += 1
            return
        sent_s, transfers = matched
        for transfer in transfers:
            found = self._lookup(peer, transfer)
            if found is None or found[1].finished:
                continue
            receive, source = found
            if transfer not in message.ended:
                source.alive_at_s = now_s
                source.acked_s = max(source.acked_s, sent_s)
                if source.ttl_s:
                    source.lease_s = self._heartbeats.held_s(source.acked_s, source.ttl_s)
                self._start_reads(receive, source, now_s, renew=False)
                self._check_known(receive, source, sent_s, now_s)
            elif source.state is SourceState.ACTIVE:
                source.acked_s = source.lease_s = -_NEVER
                self._wind_down.fail(receive, "prefill has ended the grant", now_s)
                self._advance(receive, now_s)

    # ---- what the driver reports

    def completed(
        self,
        post: PostId,
        error: str | None,
        now_s: float,
        *,
        started: bool = True,
        num_bytes: int = 0,
        num_runs: int = 0,
    ) -> bool:
        """A read of ours has ended. False: it is not one of ours."""
        if (found := self._outgoing.read_ended(post)) is None:
            return False
        receive, source, part = found
        receive.num_bytes, receive.num_runs = receive.num_bytes + num_bytes, receive.num_runs + num_runs
        if source.disconnected:
            source.safe_s = now_s + self._lease.quarantine_s
        if not started:
            source.todo.appendleft(part)
            self._start_reads(receive, source, now_s)
        elif error is not None:
            self._wind_down.fail(receive, f"a read failed: {error}", now_s)
        elif now_s >= source.lease_s:
            self._wind_down.fail(receive, "the lease ended while a read was in flight", now_s)
        else:
            source.arrive(part.tokens.start, part.tokens.stop)
            moved = source.cutter.finished and not source.todo and not source.in_flight
            if receive.state is ReceiveState.OPEN and moved:
                self._complete_source(receive, source, now_s)
        self._advance(receive, now_s)
        return True

    def peer_restarted(self, engine: EngineId, incarnation: Incarnation, now_s: float) -> None:
        """An engine runs as `incarnation` now."""
        for receive in [one for one in self._receives.values() if one.mark_dead(engine, incarnation)]:
            self._advance(receive, now_s)

    def peer_lost(self, peer: Peer, reason: str, now_s: float, *, dead: bool = False) -> None:
        """Its connection is gone: what is in flight ends with errors. It may write on until its lease ends."""
        self._heartbeats.forget(peer.name)
        for receive in list(self._receives.values()):
            source = receive.sources.get(peer.rank)
            if source is not None and source.peer == peer and not source.finished:
                source.disconnected |= bool(source.in_flight)
                source.lost, source.dead = True, source.dead or dead
                self._wind_down.fail(receive, f"prefill rank {peer.rank} is gone: {reason}", now_s)
                self._advance(receive, now_s)

    def tick(self, now_s: float) -> None:
        """Does what is due by now."""
        for transfer in self._timers.pop_due(now_s):
            if (receive := self._receives.get(transfer)) is not None:
                self._advance(receive, now_s)
        self._keep_alives.tick(now_s)
        for peer, renew in self._heartbeats.tick(now_s):
            self.actions.append(Send(peer, renew))

    def next_deadline_s(self) -> float | None:
        """Returns when `tick` next has something to do."""
        return first_of(self._timers.next_s(), self._keep_alives.next_s(), self._heartbeats.next_s())

    @property
    def num_expired(self) -> int:
        """The number of leases that ended without a sign of life from the peer."""
        return self._num_silent + self._wind_down.num_expired

    @property
    def num_open(self) -> int:
        """The number of receives whose blocks are not the engine's yet."""
        return len(self._receives)

    @property
    def quarantined_blocks(self) -> int:
        """The number of blocks of failed and cancelled receives, which a peer might still write to."""
        return sum(one.num_blocks for one in self._receives.values() if one.state is not ReceiveState.OPEN)

    # ---- what is found, and read

    def _lookup(self, peer: Peer, transfer: str) -> tuple[Receive, Source] | None:
        receive = self._receives.get(TransferId(transfer))
        source = None if receive is None else receive.sources.get(peer.rank)
        return None if receive is None or source is None or source.peer != peer else (receive, source)

    def _find(self, peer: Peer, transfer: str) -> tuple[Receive, Source] | None:
        self.num_ignored += (found := self._lookup(peer, transfer)) is None
        return found

    def _start_reads(self, receive: Receive, source: Source, now_s: float, *, renew: bool = True) -> None:
        """Pull: starts the reads that our lease covers. `renew`: asks for a longer lease if that is not all."""
        while source.todo and receive.state is ReceiveState.OPEN and source.state is SourceState.ACTIVE:
            if now_s >= source.lease_s:
                if renew:
                    self._heartbeats.renew_now(source.peer, receive.fetch.transfer, now_s)
                return
            self._outgoing.read(receive, source, source.todo.popleft())

    # ---- parts, and the end of a receive

    def _record_part(self, receive: Receive, source: Source, message: Wrote, now_s: float) -> None:
        """Push: counts a part that was written; the last one may complete its source."""
        if receive.state is ReceiveState.OPEN:
            source.alive_at_s = now_s
        receive.add_part(source, message)
        if len(source.parts) != source.num_parts:
            return
        if message.parts and message.start > receive.fetch.wanted.start:
            SOURCE.move(source, SourceEvent.STOP)
            self._wind_down.fail(receive, f"prefill has tokens from {message.start} only", now_s)
        else:
            self._complete_source(receive, source, now_s)

    def _complete_source(self, receive: Receive, source: Source, now_s: float) -> None:
        """All parts of one prefill rank are here: verifies and confirms them; the last source lands the receive."""
        if receive.state is not ReceiveState.OPEN:
            SOURCE.move(source, SourceEvent.STOP)
            return
        fetch = receive.fetch
        start, stop = fetch.wanted.start, min(fetch.wanted.stop, source.ready_stop)
        reason = source.unbound_reason(fetch, self._older_peers)
        if source.digest and stop > start and not reason:
            cells = self._queries.check(
                fetch.transfer, source.peer, fetch.tables, TokenRange(start, stop), source.digest
            )
            receive.verified_cells += max(0, cells)
            reason = f"what prefill rank {source.peer.rank} sent is not what arrived" if cells < 0 else ""
        if reason:
            receive.arrived = TokenRange(start, start)
            if not receive.pull:
                SOURCE.move(source, SourceEvent.STOP)
            self._wind_down.fail(receive, reason, now_s)
            return
        SOURCE.move(source, SourceEvent.COMPLETE)
        source.arrived_to = max(stop, start)
        self._outgoing.confirm(receive, source.peer)
        if receive.pull:
            self._heartbeats.remove(source.peer, fetch.transfer)
        if all(other.state is SourceState.DONE for other in receive.sources.values()):
            if len({other.ready_stop for other in receive.sources.values()}) > 1:
                self._wind_down.fail(receive, "prefill ranks disagree on how many tokens there are", now_s)
            else:
                self._land(receive, now_s)

    def _land(self, receive: Receive, now_s: float) -> None:
        RECEIVE.move(receive, ReceiveEvent.LAND)
        self._forget(receive)
        self.landed.append(receive.as_landed(now_s))

    def _forget(self, receive: Receive) -> None:
        del self._receives[receive.fetch.transfer]
        self._timers.clear(receive.fetch.transfer)
        for source in receive.sources.values():
            self._heartbeats.remove(source.peer, receive.fetch.transfer)

    def _cancel(self, receive: Receive, reason: str, now_s: float) -> None:
        """Ends a receive of which the engine gets no report but the release of its blocks."""
        self._wind_down.fail(receive, reason, now_s)
        RECEIVE.move(receive, ReceiveEvent.CANCEL)
        self._advance(receive, now_s)

    # ---- time

    def _advance(self, receive: Receive, now_s: float) -> None:
        """Moves a receive on as far as events and time allow, and sets its next deadline."""
        due_s = _NEVER
        if receive.state is ReceiveState.OPEN:
            due_s = self._watch(receive, now_s)
        if receive.state in (ReceiveState.FAILING, ReceiveState.FAILED):
            due_s = self._wind_down.advance(receive, now_s)
        if receive.state is ReceiveState.RELEASED:
            self._forget(receive)
            self.released.append(receive.fetch.transfer)
            return
        if due_s < _NEVER:
            self._timers.set(receive.fetch.transfer, due_s)

    def _watch(self, receive: Receive, now_s: float) -> float:
        """Asks again, and fails an open receive whose time is over. Returns when to look again."""
        ttl_s, again_s = self._lease.ttl_s, self._lease.renew_every_s
        due_s = receive.deadline_s
        if now_s >= receive.deadline_s:
            self._wind_down.fail(receive, f"it has not ended {receive.fetch.deadline_s:g} s after it began", now_s)
            return _NEVER
        for source in receive.sources.values():
            if source.finished:
                continue
            if now_s >= source.alive_at_s + ttl_s:
                self._num_silent += 1
                self.silent.append(source.peer)
                source.lost = True
                self._wind_down.fail(
                    receive, f"prefill rank {source.peer.rank} gave no sign of life for {ttl_s:g} s", now_s
                )
                return _NEVER
            due_s = min(due_s, source.alive_at_s + ttl_s)
            if source.state is SourceState.WAITING:
                if now_s >= source.asked_s + again_s:
                    if receive.pull:
                        self._heartbeats.add(source.peer, receive.fetch.transfer, now_s)
                    self._outgoing.ask(receive, source, now_s)
                due_s = min(due_s, source.asked_s + again_s)
                if receive.fetch.answered and not source.doubted:
                    due_s = min(due_s, self._doubt(receive, source, now_s))
        return due_s

    # ---- what prefill should know, and does not

    def _doubt_s(self, receive: Receive) -> float:
        """Returns when prefill should have granted what it has answered for. Ranks beside the first may still compute
        when it answers."""
        ranks = self._ranks_of(receive.fetch.engine, receive.fetch.incarnation) or ()
        wait_s = _UNKNOWN_AFTER_S if len(ranks) == 1 else 5 * _UNKNOWN_AFTER_S
        return receive.begun_s + min(wait_s, self._lease.renew_every_s)

    def _doubt(self, receive: Receive, source: Source, now_s: float) -> float:
        """Claims again and asks for a sign of life, which comes after the grant, if there is one. Returns when."""
        if now_s < (at_s := self._doubt_s(receive)):
            return at_s
        source.doubted = True
        self._outgoing.ask(receive, source, now_s)
        self._heartbeats.renew_now(source.peer, receive.fetch.transfer, now_s)
        return _NEVER

    def _check_known(self, receive: Receive, source: Source, sent_s: float, now_s: float) -> None:
        """Fails a receive whose prefill lives, has had our claims, and has granted nothing although it has answered."""
        waits = receive.state is ReceiveState.OPEN and source.state is SourceState.WAITING
        if not (waits and source.doubted and sent_s >= self._doubt_s(receive)):
            return
        if now_s < source.first_sign_s:
            source.first_sign_s = now_s
            self._heartbeats.renew_now(source.peer, receive.fetch.transfer, now_s)
        elif sent_s >= source.first_sign_s:
            self._wind_down.fail(
                receive, "prefill does not know it: it has ended there, or was another engine's", now_s
            )
            self._advance(receive, now_s)
