"""The loop of a rank's hand-offs: one thread between the state machines, the clock and the transport.

Life of a driver: made; `start` (registers the memory, starts the thread); then turns until `close`. The engine's thread
only appends to a queue (`submit`) and takes finished reports (`collect`). Everything else, also calls that block for a
whole copy, happens on the driver's thread: orders, messages, completions and deadlines go into the RankProtocol, and
its actions are carried out (carrier.py).
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from kvferry.clock import Clock, MonotonicClock
from kvferry.errors import FerryError, TransferError
from kvferry.handoff.driver.carrier import Carrier
from kvferry.handoff.driver.connections import Connections
from kvferry.handoff.driver.inbox import Inbox
from kvferry.handoff.driver.links import Link
from kvferry.handoff.driver.liveness import GONE_AFTER_S, Liveness
from kvferry.handoff.driver.mover import DirectMover, Mover
from kvferry.handoff.driver.own import Callbacks, OwnCache, OwnEngine
from kvferry.handoff.driver.peer_engines import PeerEngines
from kvferry.handoff.driver.poll_interval import longest_wait_s, look_every_s
from kvferry.handoff.driver.queries import LinkQueries
from kvferry.handoff.orders import PeerAccepted, PeerGone, StepOrders, StepReport, merged
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.handoff.verify import DramMemory
from kvferry.ids import PeerName
from kvferry.layout.description import CacheKind
from kvferry.settings import FerrySettings
from kvferry.stats import HandoffStats
from kvferry.transport.base import Received, Transport
from kvferry.wire.handoff_messages import Renew, RenewAck

__all__ = ["Driver"]

logger = logging.getLogger(__name__)

_NOTHING = StepReport()
_START_S, _CLOSE_S = 60.0, 15.0
_BUSY_S = 0.02
"""For this long after something happened, a driver that has to poll for the next message does so often."""


class Driver:
    """Carries one rank's hand-offs. `submit`, `collect` and `stats` may be called from any thread and never block."""

    def __init__(
        self,
        transport: Transport,
        own: OwnEngine,
        cache: OwnCache,
        settings: FerrySettings,
        *,
        mover: Mover | None = None,
        callbacks: Callbacks | None = None,
        clock: Clock | None = None,
        gone_after_s: float | None = None,
    ) -> None:
        self._transport = transport
        self._own = own
        self._cache = cache
        self._host = settings.side_channel.host
        self._clock = clock or MonotonicClock()
        self._mover = mover or DirectMover(transport)
        self._callbacks = callbacks or Callbacks()
        self._inbox = Inbox()
        self._peers = PeerEngines(own, cache.layout, transport.name)
        self._connections = Connections(transport, self._clock)
        self._protocol = self._make_protocol(settings)
        self._carrier = Carrier(self._protocol, transport, self._connections, self._inbox, self._mover, self._clock)
        self._gone_after_s = gone_after_s or max(GONE_AFTER_S, 2 * settings.lease.ttl_s)
        self._liveness = Liveness(self._gone_after_s, self._protocol.ping)
        self._orders: deque[StepOrders] = deque()
        self._reports: deque[StepReport] = deque()
        name = f"kvferry-{own.engine}-{cache.layout.rank.index}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready, self._stop = threading.Event(), threading.Event()
        self._start_error: FerryError | None = None
        self._metadata = b""
        self._stats = HandoffStats()
        self._busy_until_s = 0.0
        self._draining = False
        self._idle = True

    def _make_protocol(self, settings: FerrySettings) -> RankProtocol:
        layout, links = self._cache.layout, self._connections.links
        dram = DramMemory(layout)
        reader = self._cache.reader or (dram if dram.covers_all else None)
        to_decode, from_prefill = (
            LinkQueries(links, layout, reader, settings.transfer.verify, incoming=incoming)
            for incoming in (False, True)
        )
        whole_prefix = all(group.kind is CacheKind.FULL for group in layout.groups)
        return RankProtocol(
            settings,
            to_decode,
            from_prefill,
            self._own.incarnation,
            num_ranks=self._own.num_ranks,
            whole_prefix=whole_prefix,
        )

    # ---- any thread

    def start(self) -> None:
        """Registers the memory and starts the thread. Blocks until that is done. Raises what registration raised."""
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise TransferError(f"transport {self._transport.name!r} has not registered memory in {_START_S:g} s")
        if self._start_error is not None:
            raise self._start_error

    @property
    def metadata(self) -> bytes:
        """The transport's metadata, for the handshake; valid after `start`."""
        return self._metadata

    def submit(self, orders: StepOrders) -> None:
        """Queues orders of the scheduler half. Never blocks, never raises."""
        if orders:
            self._orders.append(orders)
            self._transport.wake()

    def collect(self) -> StepReport:
        """Returns what has ended since the last call."""
        if not self._reports:
            return _NOTHING
        return merged([self._reports.popleft() for _ in range(len(self._reports))])

    @property
    def has_report(self) -> bool:
        """True if `collect` has something."""
        return bool(self._reports)

    def stats(self) -> HandoffStats:
        """Returns counters since the start, as of a moment ago."""
        return self._stats

    def drain(self) -> None:
        """Take on nothing that is not open already. `drained` says when all has ended."""
        self._draining = True
        self._transport.wake()

    @property
    def drained(self) -> bool:
        """After `drain`: nothing is open any more, and every end was collected."""
        return self._draining and self._idle and not self._orders and not self._reports

    def close(self) -> None:
        """Ends every hand-off with a message to its peer, the thread and the transport. Idempotent; blocks briefly."""
        self._stop.set()
        self._transport.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                logger.warning("driver thread does not end thread=%s after_s=%g", self._thread.name, _CLOSE_S)
        self._transport.close()

    # ---- the driver's thread

    def _run(self) -> None:
        try:
            regions = (*self._cache.layout.regions, *self._cache.staging)
            self._transport.register(regions, tuple(self._cache.owners))
            self._metadata = self._transport.metadata()
            self._carrier.wake_address = self._transport.listen(self._host)
        except FerryError as error:
            self._start_error = error
            return
        finally:
            self._ready.set()
        while not self._stop.is_set():
            try:
                if not self._turn():
                    self._wait()
            except Exception:  # the thread must live: one hand-off's fault is not another's
                logger.exception("driver fault; the hand-offs concerned end by their deadlines")
                self._stop.wait(0.01)
        self._carrier.say_goodbye()
        self._mover.close()

    def _turn(self) -> bool:
        """One round. True: something happened, so more may be there."""
        protocol = self._protocol
        busy = self._take_in()
        now_s = self._clock.now_s()
        # After the messages: a lease that was granted a moment ago is one to write under.
        while self._orders:
            busy = True
            self._take_orders(self._orders.popleft(), now_s)
        if self._draining:
            protocol.prefill.drain(now_s)
        due_s = protocol.next_deadline_s()
        if due_s is not None and due_s <= now_s:
            busy = True
            protocol.tick(now_s)
        self._connections.retry(now_s)
        busy = self._find_gone(now_s) or busy
        if protocol.decode.landed:
            self._report()  # before anything is sent: the engine waits for it
        busy = self._carrier.act() or busy
        if busy:
            self._report()
            self._busy_until_s = now_s + _BUSY_S
        return busy

    def _take_in(self) -> bool:
        """Hands messages and completions to the machines. True: there were some."""
        polled = self._transport.poll()
        # A grantor counts from when it received: not from before a poll that may have taken long.
        now_s = self._clock.now_s()
        if self._draining and not self._orders:
            self._protocol.prefill.drain(
                now_s
            )  # what is claimed after `drain` is refused, unless an offer is on its way
        for received in polled.messages:
            self._receive(received, now_s)
        for completion in polled.completions:
            self._carrier.moved(self._mover.completed(completion))
        moved = self._mover.poll()
        for one in moved:
            self._carrier.moved(one)
        return bool(polled.messages or polled.completions or moved)

    def _receive(self, received: Received, now_s: float) -> None:
        message, name = self._inbox.decode(received), received.peer
        if message is None:
            return
        self._connections.message_came(name)
        if name in self._connections.links:
            self._liveness.message_came(name)
            if isinstance(message, Renew | RenewAck):
                self._connections.learn_wake_address(name, message.bell_port, message.bell)
        self._protocol.message(name, message, now_s)

    def _take_orders(self, orders: StepOrders, now_s: float) -> None:
        for gone in orders.gone:
            self._remove_peer(gone, now_s)
        for accepted in orders.accepted:
            self._accept_peer(accepted, now_s)
        self._protocol.orders(orders, now_s)

    def _accept_peer(self, accepted: PeerAccepted, now_s: float) -> None:
        if accepted.engine == self._own.engine:
            self._connections.add(self._peers.learn_own_layouts(accepted))
            return
        known = self._peers.find(accepted.engine)
        new = self._peers.accept(accepted)
        if new is None:
            return
        self._connections.add(new.links)
        self._protocol.peer_accepted(new.engine, new.incarnation, len(new.links), now_s, protocol=accepted.protocol)
        self._carrier.act()
        self._forget(() if known is None else known.links)
        logger.info("peer introduced peer=%s/%s ranks=%d", new.engine, new.incarnation, len(new.links))
        for link in new.links:
            self._connections.connect_now(link.name)
            self._liveness.add(link.name, now_s)

    def _remove_peer(self, gone: PeerGone, now_s: float) -> None:
        known = self._peers.remove(gone.engine, gone.incarnation)
        if known is None:
            return
        self._protocol.peer_gone(gone.engine, gone.incarnation, gone.reason, now_s)
        self._carrier.act()
        self._forget(known.links)
        logger.info("peer forgotten peer=%s/%s cause=%s", gone.engine, gone.incarnation, gone.reason)

    def _forget(self, links: Sequence[Link]) -> None:
        """Keeps nothing of these, after the protocol's Disconnects were carried out."""
        for link in links:
            self._connections.remove(link.name)
            self._inbox.forget(link.name)
            self._liveness.forget(link.name)

    def _find_gone(self, now_s: float) -> bool:
        """Forgets peers that are gone for good. True: some peer was due to be looked at."""
        if due := now_s >= self._liveness.next_s:
            reason = f"it gave no sign of life for {self._gone_after_s:g} s"
            self._lose_engines(self._liveness.tick(now_s), reason, now_s)
        if silent := self._protocol.take_silent():
            names = [peer.name for peer in silent]
            self._lose_engines(names, "it gave no sign of life for a hand-off", now_s)
        return due

    def _lose_engines(self, names: list[PeerName], reason: str, now_s: float) -> None:
        """These ranks are gone for good, each with its whole engine: no hand-off does without a rank."""
        for lost in self._peers.of(names):
            self._remove_peer(PeerGone(lost.engine, lost.incarnation, reason), now_s)
            self._callbacks.on_lost(lost.engine, lost.incarnation, reason)

    def _report(self) -> None:
        protocol = self._protocol
        if (report := protocol.take_report()) is not None:
            self._reports.append(report)
        self._idle = protocol.idle and not self._carrier.num_waiting
        self._stats = replace(protocol.stats(), refused_peers=self._peers.num_refused)
        self._callbacks.on_report()

    def _wait(self) -> None:
        """Sleeps while nothing can be missed: a submit wakes us, and so does a peer that can; else we look."""
        now_s, protocol = self._clock.now_s(), self._protocol
        receiving, idle = bool(protocol.decode.num_open), protocol.idle
        timeout_s = longest_wait_s(
            now_s, in_flight=self._carrier.busy, receiving=receiving, idle=idle, due_s=protocol.next_deadline_s()
        )
        look_s = look_every_s(
            reply_expected=now_s < self._busy_until_s and protocol.reply_expected,
            receiving=receiving,
            idle=idle,
            has_peers=bool(self._connections.links),
        )
        self._transport.wait(timeout_s, look_every_s=look_s)
