"""The prefill side of hand-offs, one rank: who may touch our blocks, until when, and what we still owe.

Life of one grant (a transfer at this rank):

1. AWAITED    a decode rank named it before the engine did (R17). Ends by a deadline.
2. OFFERED    the engine has computed some of it; `ready` grows; decode ranks read (pull) or we write (push).
3. FINAL      the exact range is known; the lease runs for ranks that have not come.
4. ENDED      every consumer rank confirmed (taken), or went, or its lease ended, or the engine withdrew;
              and no write of ours is in flight. Reported as released, once.

A consumer (one decode rank of a grant) is ACTIVE, then DONE (it confirmed) or GONE (dropped, revoked, expired, failed).
Pull: we are the grantor, its lease counts from what we received. Push: we are the holder of a lease on its blocks, it
counts from what we sent; no write starts that could outlive it.
"""

from collections import OrderedDict

from kvferry.handoff.actions import Action, Disconnect, LayoutQueries, MachineLimits, Peer, PostId, Send
from kvferry.handoff.leases import Heartbeats, Timers, first_of
from kvferry.handoff.orders import Offer, Withdraw
from kvferry.handoff.prefill.grant import Consumer, ConsumerState, Grant, ready, write
from kvferry.ids import PeerName, TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.settings import FerrySettings
from kvferry.wire.handoff_messages import (
    MAX_NOTE_BYTES,
    MAX_REASON_CHARS,
    Claim,
    Confirm,
    Drop,
    Fail,
    Register,
    Renew,
    RenewAck,
    Revoke,
    Stopped,
    Wrote,
    from_wire,
)

__all__ = ["PrefillMachine"]

_NEVER = float("inf")


class PrefillMachine:
    """All grants of one prefill rank. No I/O: methods take the time, and leave actions in `actions`."""

    def __init__(self, settings: FerrySettings, ports: LayoutQueries, limits: MachineLimits | None = None) -> None:
        self._lease = settings.lease
        self._deadline_s = settings.transfer.deadline_s
        self._ports = ports
        self._limits = limits or MachineLimits()
        self._grants: dict[TransferId, Grant] = {}
        self._ended: OrderedDict[TransferId, str] = OrderedDict()
        self._beats = Heartbeats(settings.lease, from_decode=False)
        self._timers: Timers[TransferId] = Timers()
        self._posts: dict[PostId, tuple[TransferId, int]] = {}
        self._num_posts = 0
        self._num_awaited = 0
        self._draining = False
        self.actions: list[Action] = []
        self.released: list[TransferId] = []
        self.taken: list[TransferId] = []
        self.num_expired = 0
        self.num_ignored = 0

    # ---- orders of our engine

    def offer(self, order: Offer, now_s: float) -> None:
        """More of a transfer is computed. After a withdrawal it changes nothing."""
        grant = self._grants.get(order.transfer)
        if grant is None:
            grant = self._grants[order.transfer] = Grant(order.transfer, _NEVER)
        elif grant.withdrawn is not None or grant.final:
            return
        elif not grant.offered:
            self._num_awaited -= 1
        grant.offered = True
        grant.base_s = now_s + (self._unclaimed_s if self._draining else self._lease.ttl_s) if order.final else _NEVER
        grant.tables, grant.ready, grant.final = order.tables, order.ready, order.final
        # A longer one would be refused by every peer, and the whole message with it.
        grant.note = order.note if len(order.note) <= MAX_NOTE_BYTES else b""
        for consumer in list(grant.consumers.values()):
            if consumer.state is ConsumerState.ACTIVE:
                self._progress(grant, consumer, now_s)
        self._settle(grant, now_s)

    def withdraw(self, order: Withdraw, now_s: float) -> None:
        """The request ended early. Released when no decode rank can be reading and no write is in flight."""
        grant = self._grants.get(order.transfer)
        if grant is None:
            if order.transfer not in self._ended:
                self._end(order.transfer, order.reason)
                self.released.append(order.transfer)
            return
        if grant.withdrawn is not None:
            return
        if not grant.offered:
            self._num_awaited -= 1
            grant.offered = True
        grant.withdrawn = order.reason or "withdrawn"
        for consumer in grant.consumers.values():
            if consumer.state is ConsumerState.ACTIVE:
                self._fail(grant, consumer, f"prefill withdrew it: {grant.withdrawn}")
        self._settle(grant, now_s)

    def drain(self, now_s: float) -> None:
        """Admit nothing that was not offered; what nobody renews or claims ends soon, not with its lease. Idempotent.

        Whoever waits for a grant names it in every renewal: two periods without are enough to know.
        """
        if self._draining:
            return
        self._draining = True
        for grant in list(self._grants.values()):
            if grant.final:
                grant.base_s = min(grant.base_s, now_s + self._unclaimed_s)
                self._settle(grant, now_s)

    @property
    def _unclaimed_s(self) -> float:
        return min(self._lease.ttl_s, 2 * self._lease.renew_every_s)

    def withdraw_all(self, reason: str, now_s: float) -> None:
        """Withdraw everything that is open."""
        for transfer in list(self._grants):
            self.withdraw(Withdraw(transfer, reason), now_s)

    # ---- messages of decode ranks

    def claim(self, peer: Peer, message: Claim, now_s: float) -> None:
        """Pull: a decode rank wants to read."""
        grant = self._admit(peer, message.transfer, message.ranks, now_s)
        if grant is None:
            return
        consumer = grant.consumers.get(peer.rank)
        if consumer is None:
            consumer = self._join(grant, peer, push=False, state=ConsumerState.ACTIVE)
            consumer.start, consumer.stop = message.start, message.stop
        if consumer.state is ConsumerState.GONE or grant.withdrawn is not None:
            self._refuse(peer, message.transfer, grant.withdrawn or "its claim has ended")
        elif consumer.state is ConsumerState.ACTIVE and not consumer.push:
            consumer.until_s = max(consumer.until_s, now_s + self._lease.ttl_s)
            consumer.seq = message.seq
            self._progress(grant, consumer, now_s)
        self._settle(grant, now_s)

    def register(self, peer: Peer, message: Register, now_s: float) -> None:
        """Push: a decode rank lets us write. We may, once it has acknowledged a renewal."""
        grant = self._admit(peer, message.transfer, message.ranks, now_s)
        if grant is None:
            return
        consumer = grant.consumers.get(peer.rank)
        if consumer is not None:
            if consumer.state is ConsumerState.ACTIVE and consumer.lease_s < now_s:
                self._beats.urge(peer, grant.transfer, now_s)
            return
        consumer = self._join(grant, peer, push=True, state=ConsumerState.ACTIVE)
        consumer.start, consumer.stop = message.start, message.stop
        consumer.cut_to = message.start
        consumer.tables, consumer.ttl_s = from_wire(message.tables), message.ttl_s
        consumer.until_s = now_s + message.ttl_s
        if grant.withdrawn is not None:
            self._fail(grant, consumer, f"prefill withdrew it: {grant.withdrawn}")
        elif not self._ports.owes(peer):
            consumer.cut_last = True
            wrote = Wrote(to=peer.incarnation, transfer=grant.transfer, part=0, parts=1, owes=False)
            self.actions.append(Send(peer, wrote))
            self._beats.add(peer, grant.transfer, now_s, message.ttl_s)
        else:
            self._beats.add(peer, grant.transfer, now_s, message.ttl_s)
            self._beats.urge(peer, grant.transfer, now_s)
            self._progress(grant, consumer, now_s)
        self._settle(grant, now_s)

    def confirm(self, peer: Peer, message: Confirm, now_s: float) -> None:
        """A decode rank is done with us; it may never have claimed (a full prefix hit)."""
        self._leave(peer, message, ConsumerState.DONE, now_s)

    def drop(self, peer: Peer, message: Drop, now_s: float) -> None:
        """Pull: a decode rank gives up; it reads no more."""
        self._leave(peer, message, ConsumerState.GONE, now_s)

    def revoke(self, peer: Peer, message: Revoke, now_s: float) -> None:
        """Push: a decode rank takes its blocks back; it hears Stopped when nothing of ours is in flight."""
        consumer = self._leave(peer, message, ConsumerState.GONE, now_s)
        if consumer is not None and consumer.in_flight:
            consumer.stopping = True
        else:
            self.actions.append(Send(peer, Stopped(to=peer.incarnation, transfer=message.transfer)))

    def _leave(
        self, peer: Peer, message: Confirm | Drop | Revoke, state: ConsumerState, now_s: float
    ) -> Consumer | None:
        transfer = TransferId(message.transfer)
        if transfer in self._ended:
            return None
        grant = self._admit(peer, transfer, message.ranks, now_s, answer=False)
        if grant is None:
            return None
        consumer = grant.consumers.get(peer.rank)
        if consumer is None:
            consumer = self._join(grant, peer, push=False, state=state)
        elif consumer.state is ConsumerState.ACTIVE:
            self._leave_as(grant, consumer, state)
        self._settle(grant, now_s)
        return consumer

    def renew(self, peer: Peer, message: Renew, now_s: float) -> None:
        """Pull: the holder is alive; everything it names and we still keep is extended."""
        ended = []
        until_s = now_s + self._lease.ttl_s
        for name in message.transfers:
            grant = self._grants.get(TransferId(name))
            if grant is None or grant.withdrawn is not None:
                ended.append(name)
                continue
            if grant.owner is not None and grant.owner != (peer.engine, peer.incarnation):
                ended.append(name)
                continue
            consumer = grant.consumers.get(peer.rank)
            if consumer is not None:
                if consumer.push or consumer.state is not ConsumerState.ACTIVE:
                    ended.append(name)
                    continue
                consumer.until_s = until_s
            if grant.final:
                grant.base_s = until_s
        ack = RenewAck(to=peer.incarnation, seq=message.seq, to_decode=True, ended=tuple(ended))
        self.actions.append(Send(peer, ack))

    def renewed(self, peer: Peer, message: RenewAck, now_s: float) -> None:
        """Push: our lease on a decode rank's blocks goes on, from when we sent the renewal."""
        matched = self._beats.acked(peer.name, message)
        if matched is None:
            self.num_ignored += 1
            return
        sent_s, transfers = matched
        for transfer in transfers:
            grant = self._grants.get(transfer)
            consumer = None if grant is None else grant.consumers.get(peer.rank)
            if grant is None or consumer is None or consumer.state is not ConsumerState.ACTIVE or consumer.peer != peer:
                continue
            if transfer in message.ended:
                self._leave_as(grant, consumer, ConsumerState.GONE)
            else:
                consumer.lease_s = max(consumer.lease_s, self._beats.held_s(sent_s, consumer.ttl_s))
                consumer.until_s = consumer.lease_s
                self._pump(grant, consumer, now_s, urge=False)
            self._settle(grant, now_s)

    # ---- what the driver tells

    def completed(self, post: PostId, error: str | None, now_s: float, *, started: bool = True) -> bool:
        """A write of ours has ended. False: it is not one of ours."""
        key = self._posts.pop(post, None)
        if key is None:
            return False
        grant = self._grants[key[0]]
        consumer = grant.consumers[key[1]]
        part = consumer.in_flight.pop(post)
        if consumer.state is ConsumerState.ACTIVE:
            if not started:
                consumer.todo.appendleft(part)
                self._pump(grant, consumer, now_s, urge=True)
            elif error is not None:
                self._fail(grant, consumer, f"a write failed: {error}")
        if consumer.stopping and not consumer.in_flight:
            consumer.stopping = False
            self.actions.append(Send(consumer.peer, Stopped(to=consumer.peer.incarnation, transfer=grant.transfer)))
        self._settle(grant, now_s)
        return True

    def peer_lost(self, peer: Peer, now_s: float) -> None:
        """Its connection is gone. It may live and read on: pull grants wait for their lease. We write no more."""
        self._beats.forget(peer.name)
        for grant in list(self._grants.values()):
            consumer = grant.consumers.get(peer.rank)
            if consumer is not None and consumer.peer == peer and consumer.push:
                if consumer.state is ConsumerState.ACTIVE:
                    self._leave_as(grant, consumer, ConsumerState.GONE)
                consumer.stopping = False
                self._settle(grant, now_s)

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        for transfer in self._timers.pop_due(now_s):
            grant = self._grants.get(transfer)
            if grant is not None:
                self._settle(grant, now_s)
        for peer, renew in self._beats.tick(now_s):
            self.actions.append(Send(peer, renew))

    def next_deadline_s(self) -> float | None:
        """When `tick` has something to do."""
        return first_of(self._timers.next_s(), self._beats.next_s())

    @property
    def num_open(self) -> int:
        """Offered transfers whose blocks are not free yet."""
        return len(self._grants) - self._num_awaited

    @property
    def has_final(self) -> bool:
        """A whole prompt is offered, and its blocks are not free yet."""
        return any(grant.final for grant in self._grants.values())

    # ---- inside

    def _admit(self, peer: Peer, name: str, ranks: int, now_s: float, *, answer: bool = True) -> Grant | None:
        """The grant that this peer may take part in; else it is told why not."""
        transfer = TransferId(name)
        grant = self._grants.get(transfer)
        why = None
        if grant is None:
            if transfer in self._ended:
                why = self._ended[transfer]
            elif self._draining:
                why = "prefill is shutting down"
            elif self._num_awaited >= self._limits.max_open:
                why = "prefill awaits too many transfers"
            else:
                grant = self._grants[transfer] = Grant(transfer, now_s + self._deadline_s)
                self._num_awaited += 1
        if grant is not None:
            if grant.owner is None and peer.rank < ranks:
                grant.owner, grant.ranks = (peer.engine, peer.incarnation), ranks
            if grant.owner != (peer.engine, peer.incarnation) or ranks != grant.ranks or peer.rank >= ranks:
                why, grant = "another engine has claimed it", None
        if grant is None:
            self.num_ignored += 1
            if answer:
                self._refuse(peer, transfer, why or "unknown")
        return grant

    def _refuse(self, peer: Peer, transfer: str, why: str) -> None:
        reason = f"prefill has nothing for it: {why}"[:MAX_REASON_CHARS]
        self.actions.append(Send(peer, Fail(to=peer.incarnation, transfer=transfer, reason=reason, quiet=True)))

    def _join(self, grant: Grant, peer: Peer, *, push: bool, state: ConsumerState) -> Consumer:
        consumer = grant.consumers[peer.rank] = Consumer(peer, push, state)
        return consumer

    def _leave_as(self, grant: Grant, consumer: Consumer, state: ConsumerState) -> None:
        consumer.state = state
        consumer.todo.clear()
        if consumer.push:
            self._beats.remove(consumer.peer, grant.transfer)

    def _fail(self, grant: Grant, consumer: Consumer, reason: str) -> None:
        """Tell the decode rank. In pull it may be reading: it stays until it drops or its lease ends."""
        quiet = not consumer.in_flight
        if consumer.push:
            self._leave_as(grant, consumer, ConsumerState.GONE)
            consumer.stopping = not quiet
        fail = Fail(
            to=consumer.peer.incarnation, transfer=grant.transfer, reason=reason[:MAX_REASON_CHARS], quiet=quiet
        )
        self.actions.append(Send(consumer.peer, fail))

    def _progress(self, grant: Grant, consumer: Consumer, now_s: float) -> None:
        """Bring an active consumer up to what is ready."""
        if not grant.offered:
            return
        if consumer.push:
            if grant.ready.start > consumer.start:
                have, asked = grant.ready.start, consumer.start
                self._fail(grant, consumer, f"prefill has tokens from {have}, {asked} was asked for")
                return
            consumer.cut(grant, self._ports)
            self._pump(grant, consumer, now_s, urge=True)
            return
        if not (grant.final or grant.ready.stop > grant.ready.start):
            return
        digest = self._digest(grant, consumer, grant.final)
        self.actions.append(Send(consumer.peer, ready(grant, consumer, self._lease.ttl_s, digest)))

    def _digest(self, grant: Grant, consumer: Consumer, last: bool) -> bytes:
        tokens = TokenRange(consumer.start, min(consumer.stop, grant.ready.stop))
        if not last or grant.ready.start > tokens.start or not len(tokens):
            return b""
        return self._ports.digest(grant.transfer, consumer.peer, grant.tables, tokens)

    def _pump(self, grant: Grant, consumer: Consumer, now_s: float, *, urge: bool) -> None:
        """Push: start the writes that end safely before the lease does."""
        peer = consumer.peer
        while consumer.todo:
            part = consumer.todo[0]
            write_s = self._ports.write_s(peer, len(part.tokens))
            if write_s > self._beats.held_s(0.0, consumer.ttl_s):
                self._fail(grant, consumer, f"a write may take {write_s:.1f} s, longer than the lease lasts")
                return
            if now_s + write_s > consumer.lease_s:
                if urge:
                    self._beats.urge(peer, grant.transfer, now_s)
                return
            consumer.todo.popleft()
            self._num_posts += 1
            post = PostId(2 * self._num_posts)
            consumer.in_flight[post] = part
            self._posts[post] = (grant.transfer, peer.rank)
            self.actions.append(write(grant, consumer, part, post, write_s, self._digest(grant, consumer, part.last)))

    def _expired(self, consumer: Consumer, now_s: float) -> bool:
        return consumer.state is ConsumerState.ACTIVE and now_s >= consumer.until_s

    def _settle(self, grant: Grant, now_s: float) -> None:
        """Look at everything that time or an event may have ended; set the next deadline."""
        due_s = grant.base_s if grant.base_s > now_s else _NEVER
        busy = live = False
        for consumer in grant.consumers.values():
            if self._expired(consumer, now_s):
                self.num_expired += 1
                self._leave_as(grant, consumer, ConsumerState.GONE)
            if consumer.state is ConsumerState.ACTIVE:
                live = True
                due_s = min(due_s, consumer.until_s)
            if consumer.in_flight:
                busy = True
                due_s = min(due_s, self._cut_off(consumer, now_s))
        if not grant.offered:
            if now_s >= grant.base_s:
                self._forget_awaited(grant)
                return
        elif grant.final or grant.withdrawn is not None:
            missing = grant.withdrawn is None and (not grant.ranks or len(grant.consumers) < grant.ranks)
            if not busy and not live and (not missing or now_s >= grant.base_s):
                self._release(grant, missing=missing)
                return
        if due_s < _NEVER:
            self._timers.set(grant.transfer, due_s)

    def _cut_off(self, consumer: Consumer, now_s: float) -> float:
        """A write that is in flight when the lease ends: the connection goes, and with it the write.

        Writes start only where they should end before that. Decode keeps its blocks for quarantine_s beyond the lease:
        the time that a transport has to let go of what is in flight.
        """
        if consumer.cut_off:
            return _NEVER
        if now_s >= consumer.lease_s:
            consumer.cut_off = True
            self.num_expired += 1
            self.actions.append(Disconnect(consumer.peer))
            return _NEVER
        return consumer.lease_s

    def _forget_awaited(self, grant: Grant) -> None:
        for consumer in grant.consumers.values():
            if consumer.state is ConsumerState.ACTIVE:
                self._leave_as(grant, consumer, ConsumerState.GONE)
                self._refuse(consumer.peer, grant.transfer, f"no such request came within {self._deadline_s:g} s")
        self._num_awaited -= 1
        del self._grants[grant.transfer]
        self._end(grant.transfer, "it was never offered")

    def _release(self, grant: Grant, *, missing: bool) -> None:
        del self._grants[grant.transfer]
        self._timers.clear(grant.transfer)
        states = [consumer.state for consumer in grant.consumers.values()]
        taken = grant.final and not missing and len(states) == grant.ranks > 0
        taken = taken and all(state is ConsumerState.DONE for state in states)
        if missing:
            self.num_expired += 1
        self.released.append(grant.transfer)
        if taken:
            self.taken.append(grant.transfer)
        self._end(grant.transfer, grant.withdrawn or ("it was taken" if taken else "its lease has ended"))

    def _end(self, transfer: TransferId, why: str) -> None:
        self._ended[transfer] = why
        if len(self._ended) > self._limits.max_ended:
            self._ended.popitem(last=False)

    def peers_of(self, transfer: TransferId) -> list[PeerName]:
        """Who takes part; for logs and tests."""
        grant = self._grants.get(transfer)
        return [] if grant is None else [consumer.peer.name for consumer in grant.consumers.values()]
