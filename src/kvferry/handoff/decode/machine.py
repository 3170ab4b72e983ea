"""The decode side of hand-offs, one rank: what we asked for, what has arrived, and when our blocks are ours again.

Life of one receive (a wanted transfer at this rank):

1. ASKED      every prefill rank that owes us something was sent a Claim (pull) or a Register (push).
2. MOVING     parts arrive: our reads end (pull), or Wrote messages come with the last byte of each part (push).
3. LANDED     every part of every prefill rank is here, under a lease that was valid, and its digest is right;
              each prefill rank was told (Confirm). Reported once; the blocks are the engine's.
   FAILED     from 1 or 2. Reported once, when our reads in flight have ended or their time is over.
4. RELEASED   after FAILED or a cancel: no read of ours is in flight, and each prefill rank has stopped, or its lease
              and the quarantine are over. Reported once.

A source (one prefill rank of a receive) is WAITING (asked, no answer), ACTIVE (granted, or holds our grant), DONE
(all arrived and confirmed) or QUIET (touches nothing any more).
"""

from collections.abc import Callable, Sequence

from kvferry.handoff.actions import Action, Disconnect, LayoutQueries, Peer, PostId, Send
from kvferry.handoff.decode.receive import Receive, Source, State, claim, confirm, drop, read, register, revoke
from kvferry.handoff.keep_alives import KeepAlives
from kvferry.handoff.leases import Heartbeats, Timers, first_of
from kvferry.handoff.orders import Cancel, Failed, Fetch, KeepAlive, Landed
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.settings import FerrySettings
from kvferry.wire.handoff_messages import Fail, Ready, Renew, RenewAck, Stopped, Wrote, from_wire

__all__ = ["DecodeMachine"]

_NEVER = float("inf")


class DecodeMachine:
    """All receives of one decode rank. No I/O: methods take the time, and leave actions in `actions`.

    `ranks_of` gives the ranks of an introduced incarnation, or None. `whole_prefix` says that what arrived of a failed
    hand-off can be used as a prefix: all cache groups keep every token.
    """

    def __init__(
        self,
        settings: FerrySettings,
        ports: LayoutQueries,
        ranks_of: Callable[[str, str], Sequence[Peer] | None],
        *,
        num_ranks: int,
        whole_prefix: bool = True,
    ) -> None:
        self._lease = settings.lease
        self._ports = ports
        self._ranks_of = ranks_of
        self._num_ranks = num_ranks
        self._whole_prefix = whole_prefix
        self._receives: dict[TransferId, Receive] = {}
        self._beats = Heartbeats(settings.lease, from_decode=True)
        self._holds = KeepAlives(self._beats, settings.transfer.deadline_s)
        self._timers: Timers[TransferId] = Timers()
        self._posts: dict[PostId, tuple[Receive, Source]] = {}
        self._num_posts = 0
        self.actions: list[Action] = []
        self.landed: list[Landed] = []
        self.failed: list[Failed] = []
        self.released: list[TransferId] = []
        self.silent: list[Peer] = []
        self.num_expired = self.num_ignored = 0

    # ---- orders of our engine

    def hold(self, order: KeepAlive, now_s: float) -> None:
        """The request waits in our queue: renew prefill's grant."""
        if order.transfer not in self._receives:
            self._holds.keep(order.transfer, self._ranks_of(order.engine, order.incarnation) or (), now_s)

    def want(self, order: Fetch, now_s: float) -> None:
        """Begin a receive. An unknown peer fails it at once; an empty want lands at once."""
        if order.transfer in self._receives:
            self.num_ignored += 1
            return
        self._holds.end(order.transfer)
        peers = self._ranks_of(order.engine, order.incarnation)
        if peers is None:
            reason = f"prefill engine {order.engine!r} is not known, or has restarted"
            nothing = TokenRange(order.wanted.start, order.wanted.start)
            self.failed.append(Failed(order.transfer, order.request, reason, nothing))
            self.released.append(order.transfer)
            return
        receive = Receive(order, now_s, now_s + order.deadline_s)
        self._receives[order.transfer] = receive
        for peer in peers:
            source = Source(peer, State.WAITING, now_s, now_s)
            source.arrived_to = source.cut_to = order.wanted.start
            if len(order.wanted) and self._ports.owes(peer):
                receive.sources[peer.rank] = source
                if receive.pull:
                    self._beats.add(peer, order.transfer, now_s)
                self._ask(receive, source, now_s)
            else:
                self._confirm(receive, peer)
        if all(source.over for source in receive.sources.values()):
            self._land(receive, now_s)
        else:
            self._look(receive, now_s)

    def cancel(self, order: Cancel, now_s: float) -> None:
        """The request is gone; no end but `released` is reported any more."""
        receive = self._receives.get(order.transfer)
        if receive is not None:
            receive.reported = True
            self._fail(receive, f"cancelled: {order.reason}", now_s)
            return
        self._holds.end(order.transfer)
        for peer in self._ranks_of(order.engine, order.incarnation) or ():
            self._drop(order.transfer, peer, order.reason)

    def cancel_all(self, reason: str, now_s: float) -> None:
        """Cancel everything that is open."""
        for receive in list(self._receives.values()):
            receive.reported = True
            self._fail(receive, reason, now_s)

    # ---- messages of prefill ranks

    def ready(self, peer: Peer, message: Ready, now_s: float) -> None:
        """Pull: more may be read."""
        found = self._find(peer, message.transfer)
        if found is None:
            return
        receive, source = found
        if receive.failed is not None or not receive.pull or source.state not in (State.WAITING, State.ACTIVE):
            return
        source.heard_s = now_s
        if message.ack:
            source.acked_s = max(source.acked_s, self._beats.claim_acked(peer.name, message.ack))
        source.ttl_s = message.ttl_s
        source.lease_s = self._beats.held_s(source.acked_s, source.ttl_s)
        if message.start > receive.want.wanted.start:
            want = receive.want.wanted
            self._fail(receive, f"prefill has tokens from {message.start}, {want.start} was asked for", now_s)
            return
        receive.grant(source, now_s)
        self._beats.add(peer, receive.want.transfer, now_s, message.ttl_s)
        if not source.final and (message.final or message.stop >= source.ready_stop):
            source.tables, source.ready_stop, source.final = from_wire(message.tables), message.stop, message.final
            source.digest, source.note = message.digest, message.note
            source.cut(receive.want, self._ports, self._lease.ttl_s)
        self._pump(receive, source, now_s, urge=True)
        self._look(receive, now_s)

    def wrote(self, peer: Peer, message: Wrote, now_s: float) -> None:
        """Push: a part is in our memory."""
        found = self._find(peer, message.transfer)
        if found is None:
            return
        receive, source = found
        if receive.pull or source.over or message.part in source.parts:
            self.num_ignored += 1
            return
        if not message.owes:
            self._fail(receive, f"prefill rank {peer.rank} says that it has nothing for us", now_s)
            return
        source.parts.add(message.part)
        if receive.failed is None:
            source.heard_s = now_s
        receive.num_bytes += message.num_bytes
        receive.num_runs += message.num_runs
        if message.parts:
            source.num_parts, source.final, source.ready_stop = message.parts, True, message.stop
            source.digest, source.note = message.digest, message.note
        else:
            source.arrive(message.start, message.stop)
        if len(source.parts) == source.num_parts:
            if message.parts and message.start > receive.want.wanted.start:
                source.state = State.QUIET
                self._fail(receive, f"prefill has tokens from {message.start} only", now_s)
            else:
                self._source_complete(receive, source, now_s)
        self._look(receive, now_s)

    def fail(self, peer: Peer, message: Fail, now_s: float) -> None:
        """A prefill rank cannot hand over."""
        found = self._find(peer, message.transfer)
        if found is None:
            return
        receive, source = found
        if source.state is State.DONE:
            return
        if message.quiet and not receive.pull:
            source.state = State.QUIET
        self._fail(receive, message.reason, now_s)

    def stopped(self, peer: Peer, message: Stopped, now_s: float) -> None:
        """Push: this prefill rank writes no more."""
        found = self._find(peer, message.transfer)
        if found is None:
            return
        receive, source = found
        if source.state is not State.DONE and not receive.pull:
            source.state = State.QUIET
            self._fail(receive, "prefill has stopped", now_s)

    def renew(self, peer: Peer, message: Renew, now_s: float) -> None:
        """Push: the holder of grants on our blocks is alive."""
        ended = []
        for name in message.transfers:
            receive = self._receives.get(TransferId(name))
            source = None if receive is None else receive.sources.get(peer.rank)
            if (
                receive is None
                or source is None
                or source.peer != peer
                or receive.pull
                or receive.failed is not None
                or source.over
            ):
                ended.append(name)
                continue
            source.heard_s = now_s
            if source.state is State.WAITING:
                receive.grant(source, now_s)
                self._look(receive, now_s)
        ack = RenewAck(to=peer.incarnation, seq=message.seq, to_decode=False, ended=tuple(ended))
        self.actions.append(Send(peer, ack))

    def renewed(self, peer: Peer, message: RenewAck, now_s: float) -> None:
        """Pull: our lease goes on, from when we sent the renewal."""
        matched = self._beats.acked(peer.name, message)
        if matched is None:
            self.num_ignored += 1
            return
        sent_s, transfers = matched
        for transfer in transfers:
            receive = self._receives.get(transfer)
            source = None if receive is None else receive.sources.get(peer.rank)
            if receive is None or source is None or source.peer != peer or source.over:
                continue
            if transfer not in message.ended:
                source.heard_s = now_s
                source.acked_s = max(source.acked_s, sent_s)
                if source.ttl_s:
                    source.lease_s = self._beats.held_s(source.acked_s, source.ttl_s)
                self._pump(receive, source, now_s, urge=False)
            elif source.state is State.ACTIVE:
                source.acked_s = source.lease_s = -_NEVER
                self._fail(receive, "prefill has ended the grant", now_s)

    # ---- what the driver tells

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
        key = self._posts.pop(post, None)
        if key is None:
            return False
        receive, source = key
        part = source.in_flight.pop(post)
        receive.num_bytes += num_bytes
        receive.num_runs += num_runs
        if source.cut_off:
            source.safe_s = now_s + self._lease.quarantine_s
        if not started:
            source.todo.appendleft(part)
            self._pump(receive, source, now_s, urge=True)
        elif error is not None:
            self._fail(receive, f"a read failed: {error}", now_s)
        elif now_s >= source.lease_s:
            self._fail(receive, "the lease ended while a read was in flight", now_s)
        else:
            source.arrive(part.tokens.start, part.tokens.stop)
            if receive.failed is None and source.cut_last and not source.todo and not source.in_flight:
                self._source_complete(receive, source, now_s)
        self._look(receive, now_s)
        return True

    def replaced(self, engine: EngineId, incarnation: Incarnation, now_s: float) -> None:
        """An engine has restarted as `incarnation`."""
        for receive in [one for one in self._receives.values() if one.mark_dead(engine, incarnation)]:
            self._look(receive, now_s)

    def peer_lost(self, peer: Peer, why: str, now_s: float, *, dead: bool = False) -> None:
        """Its connection is gone: what is in flight ends with errors. It may write on until its lease ends."""
        self._beats.forget(peer.name)
        for receive in list(self._receives.values()):
            source = receive.sources.get(peer.rank)
            if source is not None and source.peer == peer and not source.over:
                source.cut_off, source.dead = source.cut_off or bool(source.in_flight), source.dead or dead
                self._fail(receive, f"prefill rank {peer.rank} is gone: {why}", now_s)

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        for transfer in self._timers.pop_due(now_s):
            receive = self._receives.get(transfer)
            if receive is not None:
                self._look(receive, now_s)
        self._holds.tick(now_s)
        for peer, renew in self._beats.tick(now_s):
            self.actions.append(Send(peer, renew))

    def next_deadline_s(self) -> float | None:
        """When `tick` has something to do."""
        return first_of(self._timers.next_s(), self._holds.next_s(), self._beats.next_s())

    @property
    def num_open(self) -> int:
        """Receives whose blocks are not the engine's yet."""
        return len(self._receives)

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of failed and cancelled receives that somebody might still write to."""
        return sum(receive.num_blocks for receive in self._receives.values() if receive.failed is not None)

    # ---- inside

    def _find(self, peer: Peer, transfer: str) -> tuple[Receive, Source] | None:
        receive = self._receives.get(TransferId(transfer))
        source = None if receive is None else receive.sources.get(peer.rank)
        if receive is None or source is None or source.peer != peer:
            self.num_ignored += 1
            return None
        return receive, source

    def _ask(self, receive: Receive, source: Source, now_s: float) -> None:
        """Claim or register; also again, while nothing was heard."""
        source.asked_s = now_s
        if receive.pull:
            seq = self._beats.note_sent(source.peer, receive.want.transfer, now_s)
            self.actions.append(Send(source.peer, claim(receive.want, source.peer, self._num_ranks, seq)))
        else:
            request = register(receive.want, source.peer, self._num_ranks, self._lease.ttl_s)
            self.actions.append(Send(source.peer, request))

    def _confirm(self, receive: Receive, peer: Peer) -> None:
        self.actions.append(Send(peer, confirm(receive.want.transfer, peer, self._num_ranks)))

    def _drop(self, transfer: TransferId, peer: Peer, reason: str) -> None:
        self.actions.append(Send(peer, drop(transfer, peer, self._num_ranks, reason)))

    def _revoke(self, receive: Receive, source: Source, now_s: float) -> None:
        source.asked_s = now_s
        reason = receive.failed or ""
        self.actions.append(Send(source.peer, revoke(receive.want.transfer, source.peer, self._num_ranks, reason)))

    def _pump(self, receive: Receive, source: Source, now_s: float, *, urge: bool) -> None:
        """Pull: start the reads that our lease covers."""
        want = receive.want
        while source.todo and receive.failed is None and source.state is State.ACTIVE:
            if now_s >= source.lease_s:
                if urge:
                    self._beats.urge(source.peer, want.transfer, now_s)
                return
            part = source.todo.popleft()
            self._num_posts += 1
            post = PostId(2 * self._num_posts + 1)
            source.in_flight[post] = part
            self._posts[post] = (receive, source)
            self.actions.append(read(want, source, part, post))

    def _source_complete(self, receive: Receive, source: Source, now_s: float) -> None:
        """All parts of one prefill rank are here: check them, tell it, and see whether that was the last one."""
        want = receive.want
        stop = min(want.wanted.stop, source.ready_stop)
        source.state = State.DONE if receive.failed is None else State.QUIET
        if receive.failed is not None:
            return
        if source.digest and stop > want.wanted.start:
            tokens = TokenRange(want.wanted.start, stop)
            cells = self._ports.check(want.transfer, source.peer, want.tables, tokens, source.digest)
            if cells < 0:
                receive.arrived = TokenRange(want.wanted.start, want.wanted.start)
                source.state = State.ACTIVE if receive.pull else State.QUIET
                self._fail(receive, f"what prefill rank {source.peer.rank} sent is not what arrived", now_s)
                return
            receive.verified_cells += cells
        source.arrived_to = max(stop, want.wanted.start)
        self._confirm(receive, source.peer)
        if receive.pull:
            self._beats.remove(source.peer, want.transfer)
        if all(other.state is State.DONE for other in receive.sources.values()):
            if len({other.ready_stop for other in receive.sources.values()}) > 1:
                self._fail(receive, "prefill ranks disagree on how many tokens there are", now_s)
            else:
                self._land(receive, now_s)

    def _land(self, receive: Receive, now_s: float) -> None:
        want, sources = receive.want, list(receive.sources.values())
        stop = min((source.arrived_to for source in sources), default=want.wanted.stop)
        note = next((source.note for source in sources if source.note), b"")
        self._forget(receive)
        self.landed.append(receive.as_landed(stop, note, now_s))

    def _forget(self, receive: Receive) -> None:
        del self._receives[receive.want.transfer]
        self._timers.clear(receive.want.transfer)
        for source in receive.sources.values():
            self._beats.remove(source.peer, receive.want.transfer)

    def _fail(self, receive: Receive, reason: str, now_s: float) -> None:
        """End it without its bytes. Nothing new is started; what is in flight is waited for."""
        if receive.failed is None:
            receive.failed = reason
            receive.cut_s = now_s + self._lease.quarantine_s
            receive.report_s = min(receive.cut_s, max(receive.deadline_s, now_s))
            for source in receive.sources.values():
                source.todo.clear()
                if not receive.pull and source.state is not State.DONE:
                    self._revoke(receive, source, now_s)
                    if source.state is State.WAITING:
                        source.state = State.QUIET  # it never had a lease: it cannot have written
        self._look(receive, now_s)

    def _look(self, receive: Receive, now_s: float) -> None:
        """Look at everything that time or an event may have ended; set the next deadline."""
        transfer = receive.want.transfer
        if self._receives.get(transfer) is not receive:
            return
        if receive.failed is None:
            self._look_alive(receive, now_s)
        else:
            self._look_failed(receive, now_s)

    def _look_alive(self, receive: Receive, now_s: float) -> None:
        ttl_s, again_s = self._lease.ttl_s, self._lease.renew_every_s
        due_s = receive.deadline_s
        if now_s >= receive.deadline_s:
            self._fail(receive, f"it has not ended {receive.want.deadline_s:g} s after it began", now_s)
            return
        for source in receive.sources.values():
            if source.over:
                continue
            if now_s >= source.heard_s + ttl_s:
                self.num_expired += 1
                self.silent.append(source.peer)
                self._fail(receive, f"prefill rank {source.peer.rank} gave no sign of life for {ttl_s:g} s", now_s)
                return
            due_s = min(due_s, source.heard_s + ttl_s)
            if source.state is State.WAITING:
                if now_s >= source.asked_s + again_s:
                    if receive.pull:
                        self._beats.add(source.peer, transfer=receive.want.transfer, now_s=now_s)
                    self._ask(receive, source, now_s)
                due_s = min(due_s, source.asked_s + again_s)
        self._timers.set(receive.want.transfer, due_s)

    def _look_failed(self, receive: Receive, now_s: float) -> None:
        want, due_s = receive.want, _NEVER
        in_flight = over = 0
        for source in receive.sources.values():
            if source.in_flight:
                in_flight += 1
                if now_s >= receive.cut_s and not source.cut_off:
                    source.cut_off = True
                    self.actions.append(Disconnect(source.peer))
            elif not source.over:
                due_s = min(due_s, self._wind_down(receive, source, now_s))
            over += source.over
        if not receive.reported and (not in_flight or now_s >= receive.report_s):
            receive.reported = True
            assert receive.failed is not None, "only a failed receive is reported as failed"
            arrived = receive.what_arrived(whole_prefix=self._whole_prefix)
            self.failed.append(Failed(want.transfer, want.request, receive.failed, arrived))
        if over == len(receive.sources):
            self._forget(receive)
            self.released.append(want.transfer)
            return
        if in_flight:
            if not receive.reported:
                due_s = min(due_s, receive.report_s)
            if now_s < receive.cut_s:
                due_s = min(due_s, receive.cut_s)
        if due_s < _NEVER:
            self._timers.set(want.transfer, due_s)

    def _wind_down(self, receive: Receive, source: Source, now_s: float) -> float:
        """One source of a failed receive with no read in flight; when to look again."""
        if receive.pull:
            if now_s < source.safe_s:
                return source.safe_s
            source.state = State.QUIET
            self._drop(receive.want.transfer, source.peer, receive.failed or "")
            self._beats.remove(source.peer, receive.want.transfer)
            return _NEVER
        if not source.cut_off and now_s >= source.quiet_s(self._lease):
            source.give_up(now_s, self._lease)
            self.num_expired += 1
            self.actions.append(Disconnect(source.peer))
        if now_s >= (ends_s := source.quiet_s(self._lease)):
            source.state = State.QUIET
            return _NEVER
        if now_s >= source.asked_s + self._lease.renew_every_s:
            self._revoke(receive, source, now_s)
        return min(ends_s, source.asked_s + self._lease.renew_every_s)
