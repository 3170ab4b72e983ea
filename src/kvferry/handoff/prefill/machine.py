"""The prefill side of hand-offs, one rank: who may touch our blocks, until when, and what we still have to move.

Life of one grant (a transfer at this rank; handoff/transitions.py has every move):

1. AWAITED    a decode rank named it before the engine did (R17). Ends by a deadline.
2. OFFERED    the engine has computed some of it; `ready` grows; decode ranks read (pull) or we write (push).
3. FINAL      the exact range is known; the lease runs for decode ranks that have not come.
   WITHDRAWN  the request ended early.
4. ENDED      every consumer confirmed (the grant was taken), or gave up, or its lease ended; and no write of ours is in
              flight. Reported as released, once.

A consumer (one decode rank of a grant) is ACTIVE, then DONE (it confirmed) or GONE (dropped, revoked, expired, failed).
Pull: we are the grantor; the lease counts from what we received. Push: we are the holder of a lease on its blocks; it
counts from what we sent, and no write starts that could outlive it.

Every handler records what happened, then calls `_advance`: only there do leases expire and grants end.
"""

from collections import OrderedDict

from kvferry.handoff.actions import Action, Disconnect, LayoutQueries, MachineLimits, Peer, PostId, Send
from kvferry.handoff.leases import Heartbeats, Timers, first_of
from kvferry.handoff.orders import Offer, Withdraw
from kvferry.handoff.prefill.grant import Consumer, Grant
from kvferry.handoff.prefill.messages import make_fail, make_ready, make_stopped, make_write, make_wrote_nothing
from kvferry.handoff.transitions import CONSUMER, GRANT, ConsumerEvent, ConsumerState, GrantEvent, GrantState
from kvferry.ids import PeerName, TransferId
from kvferry.settings import FerrySettings
from kvferry.wire.handoff_messages import (
    MAX_NOTE_BYTES,
    Claim,
    Confirm,
    Drop,
    Register,
    Renew,
    RenewAck,
    Revoke,
    from_wire,
)

__all__ = ["PrefillMachine"]

_NEVER = float("inf")


class PrefillMachine:
    """All grants of one prefill rank. No I/O: methods take the time, and leave actions in `actions`."""

    def __init__(
        self,
        settings: FerrySettings,
        queries: LayoutQueries,
        limits: MachineLimits | None = None,
        *,
        whole_prefix: bool = True,
    ) -> None:
        """`whole_prefix` says that any part of a prompt is of use: all cache groups keep every token."""
        self._lease = settings.lease
        self._older_peers = settings.transfer.older_peers
        self._whole_prefix = whole_prefix
        self._deadline_s = settings.transfer.deadline_s
        self._queries = queries
        self._limits = limits or MachineLimits()
        self._grants: dict[TransferId, Grant] = {}
        self._ended: OrderedDict[TransferId, str] = OrderedDict()
        self._heartbeats = Heartbeats(settings.lease, from_decode=False)
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
        """More of a transfer is computed. After the final offer, or a withdrawal, this changes nothing."""
        grant = self._grants.get(order.transfer)
        if grant is None:
            grant = self._add(order.transfer, _NEVER)
        elif grant.state in (GrantState.FINAL, GrantState.WITHDRAWN):
            return
        self._move(grant, GrantEvent.FINAL_OFFER if order.final else GrantEvent.OFFER)
        grant.unclaimed_until_s = (
            now_s + (self._unclaimed_s if self._draining else self._lease.ttl_s) if order.final else _NEVER
        )
        grant.tables, grant.ready, grant.final = order.tables, order.ready, order.final
        grant.prompt = order.prompt
        # A longer one would be refused by every peer, and the whole message with it.
        grant.note = order.note if len(order.note) <= MAX_NOTE_BYTES else b""
        for consumer in list(grant.consumers.values()):
            if consumer.state is ConsumerState.ACTIVE:
                self._progress(grant, consumer, now_s)
        self._advance(grant, now_s)

    def withdraw(self, order: Withdraw, now_s: float) -> None:
        """The request ended early. It is released when no decode rank can be reading and no write is in flight."""
        grant = self._grants.get(order.transfer)
        if grant is None:
            if order.transfer not in self._ended:
                self._end(order.transfer, order.reason)
                self.released.append(order.transfer)
            return
        if grant.state is GrantState.WITHDRAWN:
            return
        self._move(grant, GrantEvent.WITHDRAW)
        grant.end_reason = order.reason or "withdrawn"
        for consumer in grant.consumers.values():
            if consumer.state is ConsumerState.ACTIVE:
                self._fail(grant, consumer, f"prefill withdrew it: {grant.end_reason}")
        self._advance(grant, now_s)

    def drain(self, now_s: float) -> None:
        """Admits only what was offered, and ends soon the grants that no peer claims or renews. Idempotent.

        A peer that waits for a grant names it in every renewal: two periods without one are enough to know.
        """
        if self._draining:
            return
        self._draining = True
        for grant in list(self._grants.values()):
            if grant.state is GrantState.FINAL:
                grant.unclaimed_until_s = min(grant.unclaimed_until_s, now_s + self._unclaimed_s)
                self._advance(grant, now_s)

    @property
    def _unclaimed_s(self) -> float:
        return min(self._lease.ttl_s, 2 * self._lease.renew_every_s)

    def withdraw_all(self, reason: str, now_s: float) -> None:
        """Withdraws everything that is open."""
        for transfer in list(self._grants):
            self.withdraw(Withdraw(transfer, reason), now_s)

    # ---- messages of decode ranks

    def on_claim(self, peer: Peer, message: Claim, now_s: float) -> None:
        """Pull: a decode rank wants to read."""
        grant = self._admit(peer, message.transfer, message.ranks, now_s)
        if grant is None:
            return
        consumer = grant.consumers.get(peer.rank)
        if consumer is None:
            consumer = self._join(grant, peer, push=False)
            consumer.start, consumer.stop, consumer.prompt = message.start, message.stop, message.prompt
        if consumer.state is ConsumerState.GONE or grant.state is GrantState.WITHDRAWN:
            self._refuse(peer, message.transfer, grant.end_reason or "its claim has ended")
        elif consumer.state is ConsumerState.ACTIVE and not consumer.push:
            consumer.until_s = max(consumer.until_s, now_s + self._lease.ttl_s)
            consumer.seq = message.seq
            self._progress(grant, consumer, now_s)
        self._advance(grant, now_s)

    def on_register(self, peer: Peer, message: Register, now_s: float) -> None:
        """Push: a decode rank lets us write, after it has acknowledged a renewal."""
        grant = self._admit(peer, message.transfer, message.ranks, now_s)
        if grant is None:
            return
        consumer = grant.consumers.get(peer.rank)
        if consumer is not None:
            if consumer.state is ConsumerState.ACTIVE and consumer.lease_s < now_s:
                self._heartbeats.renew_now(peer, grant.transfer, now_s)
            return
        consumer = self._join(grant, peer, push=True)
        consumer.start, consumer.stop, consumer.prompt = message.start, message.stop, message.prompt
        consumer.cutter.next_token = message.start
        consumer.tables, consumer.ttl_s = from_wire(message.tables), message.ttl_s
        consumer.until_s = now_s + message.ttl_s
        if grant.state is GrantState.WITHDRAWN:
            self._fail(grant, consumer, f"prefill withdrew it: {grant.end_reason}")
        elif not self._queries.owes(peer):
            consumer.cutter.finished = True
            self.actions.append(Send(peer, make_wrote_nothing(peer, grant.transfer)))
            self._heartbeats.add(peer, grant.transfer, now_s, message.ttl_s)
        else:
            self._heartbeats.add(peer, grant.transfer, now_s, message.ttl_s)
            self._heartbeats.renew_now(peer, grant.transfer, now_s)
            self._progress(grant, consumer, now_s)
        self._advance(grant, now_s)

    def on_confirm(self, peer: Peer, message: Confirm, now_s: float) -> None:
        """A decode rank has all that it wanted; it may never have claimed (a full prefix hit)."""
        self._leave(peer, message, ConsumerEvent.CONFIRM, now_s)

    def on_drop(self, peer: Peer, message: Drop, now_s: float) -> None:
        """Pull: a decode rank gives up; it reads no more."""
        self._leave(peer, message, ConsumerEvent.GIVE_UP, now_s)

    def on_revoke(self, peer: Peer, message: Revoke, now_s: float) -> None:
        """Push: a decode rank takes its blocks back; it gets a Stopped when no write of ours is in flight."""
        consumer = self._leave(peer, message, ConsumerEvent.GIVE_UP, now_s)
        if consumer is not None and consumer.in_flight:
            consumer.owes_stopped = True
        else:
            self.actions.append(Send(peer, make_stopped(peer, message.transfer)))

    def _leave(
        self, peer: Peer, message: Confirm | Drop | Revoke, event: ConsumerEvent, now_s: float
    ) -> Consumer | None:
        """Ends one decode rank's part, also if it never claimed. Returns None if the transfer is not open."""
        transfer = TransferId(message.transfer)
        if transfer in self._ended:
            return None
        grant = self._admit(peer, transfer, message.ranks, now_s, answer=False)
        if grant is None:
            return None
        consumer = grant.consumers.get(peer.rank)
        if consumer is None:
            consumer = self._join(grant, peer, push=False)
        if consumer.state is ConsumerState.ACTIVE:
            self._end_consumer(grant, consumer, event)
        self._advance(grant, now_s)
        return consumer

    def on_renew(self, peer: Peer, message: Renew, now_s: float) -> None:
        """Pull: the holder is alive; everything that it names, and that we still keep, is extended."""
        ended = []
        until_s = now_s + self._lease.ttl_s
        for name in message.transfers:
            grant = self._grants.get(TransferId(name))
            if grant is None or grant.state is GrantState.WITHDRAWN:
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
            if grant.state is GrantState.FINAL:
                grant.unclaimed_until_s = until_s
        ack = RenewAck(to=peer.incarnation, seq=message.seq, to_decode=True, ended=tuple(ended))
        self.actions.append(Send(peer, ack))

    def on_renew_ack(self, peer: Peer, message: RenewAck, now_s: float) -> None:
        """Push: our lease on a decode rank's blocks goes on, from when we sent the renewal."""
        matched = self._heartbeats.acked(peer.name, message)
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
                self._end_consumer(grant, consumer, ConsumerEvent.GIVE_UP)
            else:
                consumer.lease_s = max(consumer.lease_s, self._heartbeats.held_s(sent_s, consumer.ttl_s))
                consumer.until_s = consumer.lease_s
                self._start_writes(grant, consumer, now_s, renew=False)
            self._advance(grant, now_s)

    # ---- what the driver reports

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
                self._start_writes(grant, consumer, now_s)
            elif error is not None:
                self._fail(grant, consumer, f"a write failed: {error}")
        if consumer.owes_stopped and not consumer.in_flight:
            consumer.owes_stopped = False
            self.actions.append(Send(consumer.peer, make_stopped(consumer.peer, grant.transfer)))
        self._advance(grant, now_s)
        return True

    def peer_lost(self, peer: Peer, now_s: float) -> None:
        """Its connection is gone. It may live and read on: pull grants wait for their lease. We write no more."""
        self._heartbeats.forget(peer.name)
        for grant in list(self._grants.values()):
            consumer = grant.consumers.get(peer.rank)
            if consumer is not None and consumer.peer == peer and consumer.push:
                if consumer.state is ConsumerState.ACTIVE:
                    self._end_consumer(grant, consumer, ConsumerEvent.LOSE)
                consumer.owes_stopped = False
                self._advance(grant, now_s)

    def tick(self, now_s: float) -> None:
        """Does what is due by now."""
        for transfer in self._timers.pop_due(now_s):
            grant = self._grants.get(transfer)
            if grant is not None:
                self._advance(grant, now_s)
        for peer, renew in self._heartbeats.tick(now_s):
            self.actions.append(Send(peer, renew))

    def next_deadline_s(self) -> float | None:
        """Returns when `tick` next has something to do."""
        return first_of(self._timers.next_s(), self._heartbeats.next_s())

    @property
    def num_open(self) -> int:
        """The number of offered transfers whose blocks are not free yet."""
        return len(self._grants) - self._num_awaited

    @property
    def has_final(self) -> bool:
        """True if a whole prompt is offered, and its blocks are not free yet."""
        return any(grant.state is GrantState.FINAL for grant in self._grants.values())

    # ---- inside

    def _admit(self, peer: Peer, name: str, ranks: int, now_s: float, *, answer: bool = True) -> Grant | None:
        """Returns the grant that this peer may take part in. If there is none, `answer` sends it the reason."""
        transfer = TransferId(name)
        grant = self._grants.get(transfer)
        reason = "unknown"
        if grant is None:
            if transfer in self._ended:
                reason = self._ended[transfer]
            elif self._draining:
                reason = "prefill is shutting down"
            elif self._num_awaited >= self._limits.max_open:
                reason = "prefill awaits too many transfers"
            else:
                grant = self._add(transfer, now_s + self._deadline_s)
        if grant is not None:
            if grant.owner is None and peer.rank < ranks:
                grant.owner, grant.ranks = (peer.engine, peer.incarnation), ranks
            if grant.owner != (peer.engine, peer.incarnation) or ranks != grant.ranks or peer.rank >= ranks:
                reason, grant = "another engine has claimed it", None
        if grant is None:
            self.num_ignored += 1
            if answer:
                self._refuse(peer, transfer, reason)
        return grant

    def _refuse(self, peer: Peer, transfer: str, reason: str) -> None:
        fail = make_fail(peer, transfer, f"prefill has nothing for it: {reason}", quiet=True)
        self.actions.append(Send(peer, fail))

    def _add(self, transfer: TransferId, unclaimed_until_s: float) -> Grant:
        grant = self._grants[transfer] = Grant(transfer, unclaimed_until_s)
        self._num_awaited += 1
        return grant

    def _move(self, grant: Grant, event: GrantEvent) -> None:
        self._num_awaited -= grant.state is GrantState.AWAITED
        GRANT.move(grant, event)

    def _join(self, grant: Grant, peer: Peer, *, push: bool) -> Consumer:
        consumer = grant.consumers[peer.rank] = Consumer(peer, push)
        return consumer

    def _end_consumer(self, grant: Grant, consumer: Consumer, event: ConsumerEvent) -> None:
        CONSUMER.move(consumer, event)
        consumer.todo.clear()
        if consumer.push:
            self._heartbeats.remove(consumer.peer, grant.transfer)

    def _fail(self, grant: Grant, consumer: Consumer, reason: str) -> None:
        """Sends the decode rank the reason. In pull it may be reading: it stays until it drops or its lease ends."""
        quiet = not consumer.in_flight
        if consumer.push:
            self._end_consumer(grant, consumer, ConsumerEvent.FAIL)
            consumer.owes_stopped = not quiet
        self.actions.append(Send(consumer.peer, make_fail(consumer.peer, grant.transfer, reason, quiet=quiet)))

    def _progress(self, grant: Grant, consumer: Consumer, now_s: float) -> None:
        """Brings an active consumer up to what is ready."""
        if grant.state is GrantState.AWAITED:
            return
        if reason := consumer.obstacle(grant, self._older_peers, whole_prefix=self._whole_prefix):
            self._fail(grant, consumer, reason)
            return
        if consumer.push:
            consumer.cut(grant, self._queries)
            self._start_writes(grant, consumer, now_s)
            return
        if not (grant.final or grant.ready.stop > grant.ready.start):
            return
        digest = self._digest(grant, consumer, grant.final)
        self.actions.append(Send(consumer.peer, make_ready(grant, consumer, self._lease.ttl_s, digest)))

    def _digest(self, grant: Grant, consumer: Consumer, last: bool) -> bytes:
        tokens = consumer.range(grant)
        if not last or grant.ready.start > tokens.start or not len(tokens):
            return b""
        return self._queries.digest(grant.transfer, consumer.peer, grant.tables, tokens)

    def _start_writes(self, grant: Grant, consumer: Consumer, now_s: float, *, renew: bool = True) -> None:
        """Push: starts the writes that end safely before the lease does. `renew`: asks for more if that is not all."""
        peer = consumer.peer
        while consumer.todo:
            part = consumer.todo[0]
            write_s = self._queries.write_s(peer, len(part.tokens))
            if write_s > self._heartbeats.held_s(0.0, consumer.ttl_s):
                self._fail(grant, consumer, f"a write may take {write_s:.1f} s, longer than the lease lasts")
                return
            if now_s + write_s > consumer.lease_s:
                if renew:
                    self._heartbeats.renew_now(peer, grant.transfer, now_s)
                return
            consumer.todo.popleft()
            self._num_posts += 1
            post = PostId(2 * self._num_posts)
            consumer.in_flight[post] = part
            self._posts[post] = (grant.transfer, peer.rank)
            digest = self._digest(grant, consumer, part.last)
            self.actions.append(make_write(grant, consumer, part, post, write_s, digest))

    # ---- time

    def _advance(self, grant: Grant, now_s: float) -> None:
        """Moves a grant on as far as events and time allow, and sets its next deadline."""
        due_s = grant.unclaimed_until_s if grant.unclaimed_until_s > now_s else _NEVER
        writing = live = False
        for consumer in grant.consumers.values():
            if consumer.state is ConsumerState.ACTIVE and now_s >= consumer.until_s:
                self.num_expired += 1
                self._end_consumer(grant, consumer, ConsumerEvent.LOSE)
            if consumer.state is ConsumerState.ACTIVE:
                live = True
                due_s = min(due_s, consumer.until_s)
            if consumer.in_flight:
                writing = True
                due_s = min(due_s, self._disconnect_late(consumer, now_s))
        if grant.state is GrantState.AWAITED:
            if now_s >= grant.unclaimed_until_s:
                self._forget_awaited(grant)
                return
        elif grant.state in (GrantState.FINAL, GrantState.WITHDRAWN):
            missing = grant.state is GrantState.FINAL and (not grant.ranks or len(grant.consumers) < grant.ranks)
            if not writing and not live and (not missing or now_s >= grant.unclaimed_until_s):
                self._release(grant, missing=missing)
                return
        if due_s < _NEVER:
            self._timers.set(grant.transfer, due_s)

    def _disconnect_late(self, consumer: Consumer, now_s: float) -> float:
        """Gives up the connection of a write that is in flight when the lease ends. Returns when to look again.

        Writes start only if they should end before that. Decode keeps its blocks for quarantine_s beyond the lease:
        the time that a transport has to let go of what is in flight.
        """
        if consumer.disconnected:
            return _NEVER
        if now_s >= consumer.lease_s:
            consumer.disconnected = True
            self.num_expired += 1
            self.actions.append(Disconnect(consumer.peer))
            return _NEVER
        return consumer.lease_s

    def _forget_awaited(self, grant: Grant) -> None:
        for consumer in grant.consumers.values():
            if consumer.state is ConsumerState.ACTIVE:
                self._end_consumer(grant, consumer, ConsumerEvent.FAIL)
                self._refuse(consumer.peer, grant.transfer, f"no such request came within {self._deadline_s:g} s")
        self._move(grant, GrantEvent.END)
        del self._grants[grant.transfer]
        self._end(grant.transfer, "it was never offered")

    def _release(self, grant: Grant, *, missing: bool) -> None:
        self._move(grant, GrantEvent.END)
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
        self._end(grant.transfer, grant.end_reason or ("it was taken" if taken else "its lease has ended"))

    def _end(self, transfer: TransferId, reason: str) -> None:
        """Remembers how a transfer ended, to answer late messages."""
        self._ended[transfer] = reason
        if len(self._ended) > self._limits.max_ended:
            self._ended.popitem(last=False)

    def peers_of(self, transfer: TransferId) -> list[PeerName]:
        """Returns the decode ranks that take part; for logs and tests."""
        grant = self._grants.get(transfer)
        return [] if grant is None else [consumer.peer.name for consumer in grant.consumers.values()]
