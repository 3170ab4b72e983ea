"""One thread a worker, between the state machines, the clock and the transport.

The engine's thread only appends to a queue (submit) and takes finished reports (collect). Everything else, also calls
that block for a whole copy, happens here: orders, messages, completions and deadlines go into the RankProtocol; its
actions are carried out, sends before posts, and one post per turn, so that a long copy delays no heartbeat more than
it must.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvferry.clock import Clock, MonotonicClock
from kvferry.errors import FerryError, MalformedMessage, PeerError, PeerLost, TransferError
from kvferry.handoff.actions import Disconnect, Peer, Post, PostId, Send
from kvferry.handoff.driver.links import Link, layouts_of, make_links
from kvferry.handoff.driver.liveness import GONE_AFTER_S, Liveness
from kvferry.handoff.driver.mover import DirectMover, Moved, Mover
from kvferry.handoff.driver.poll_interval import pause_s
from kvferry.handoff.driver.queries import LinkQueries
from kvferry.handoff.orders import PeerAccepted, PeerGone, StepOrders, StepReport, merged
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.handoff.verify import CacheMemory, DramMemory
from kvferry.ids import EngineId, Incarnation, PeerName
from kvferry.layout.description import CacheKind, CacheLayout, Region
from kvferry.settings import FerrySettings
from kvferry.stats import HandoffStats
from kvferry.transport.base import Received, Transport
from kvferry.transport.nixl.doorbell import Doorbell
from kvferry.wire.handoff_messages import Fragment, Reassembly, Renew, RenewAck, decode_message, frames, with_bell
from kvferry.wire.hello import decode_hello

__all__ = ["Driver"]

logger = logging.getLogger(__name__)

_NOTHING = StepReport()
_RETRY_S, _MAX_RETRY_S = 1.0, 30.0
"""A lost peer is connected again after 1 s, 2 s, 4 s ... up to this, for as long as it was not introduced anew."""
_START_S, _CLOSE_S = 60.0, 15.0


@dataclass(slots=True)
class _Engine:
    introduce: PeerAccepted
    links: list[Link]


class Driver:
    """Carries one rank's hand-offs. `submit`, `collect` and `stats` may be called from any thread and never block.

    `memory_owners` keep the cache's memory alive until `close`. `more_regions` are registered behind the layout's: the
    mover's staging memory. A prefill engine of several ranks needs the layouts of all of them, to push and to verify:
    `engine_layouts`, in the order of their Rank.index, or later an Introduce of our own engine.

    `on_lost` hears, on the driver's thread, of incarnations that were found gone and are forgotten: nothing was heard
    of them for `gone_after_s`, or during a whole lease of a hand-off. `on_report` is told, on that thread too, that
    there may be something to collect, or news in `stats`. Neither may block or raise.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        layout: CacheLayout,
        memory_owners: Sequence[object],
        engine: EngineId,
        incarnation: Incarnation,
        rank: int,
        num_ranks: int,
        settings: FerrySettings,
        clock: Clock | None = None,
        engine_layouts: Sequence[CacheLayout] = (),
        mover: Mover | None = None,
        memory: CacheMemory | None = None,
        more_regions: Sequence[Region] = (),
        on_lost: Callable[[EngineId, Incarnation, str], None] | None = None,
        gone_after_s: float | None = None,
        on_report: Callable[[], None] | None = None,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._owners = tuple(memory_owners)
        self._regions = (*layout.regions, *more_regions)
        self._me = (engine, incarnation)
        self._num_ranks = num_ranks
        own_layouts = tuple(engine_layouts) or (layout,)
        self._own_layouts = own_layouts if len(own_layouts) == num_ranks else ()
        self._clock = clock if clock is not None else MonotonicClock()
        self._mover = mover if mover is not None else DirectMover(transport)
        self._links: dict[PeerName, Link] = {}
        self._engines: dict[EngineId, _Engine] = {}
        dram = DramMemory(layout)
        readable = memory if memory is not None else dram if dram.covers_all else None
        ports = {
            inward: LinkQueries(self._links, layout, readable, settings.transfer.verify, inward=inward)
            for inward in (False, True)
        }
        self._core = RankProtocol(
            settings,
            ports[False],
            ports[True],
            incarnation,
            num_ranks=num_ranks,
            whole_prefix=all(group.kind is CacheKind.FULL for group in layout.groups),
        )
        self._on_lost, self._on_report = on_lost, on_report or (lambda: None)
        self._gone_after_s = gone_after_s or max(GONE_AFTER_S, 2 * settings.lease.ttl_s)
        self._presence = Liveness(self._gone_after_s, self._core.ping)
        self._orders: deque[StepOrders] = deque()
        self._reports: deque[StepReport] = deque()
        self._bell, self._host = Doorbell(), settings.side_channel.host
        self._writing: dict[PostId, PeerName] = {}
        """Posts behind whose last byte a message goes."""
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._drain = False
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{engine}-{rank}", daemon=True)
        self._start_error: FerryError | None = None
        self._metadata = b""
        self._connected: set[PeerName] = set()
        self._away: dict[PeerName, tuple[float, float]] = {}
        self._posts: deque[Post] = deque()
        self._pieces: dict[PeerName, Reassembly] = {}
        self._busy_until_s = 0.0
        self._stats = HandoffStats()
        self._refused_peers = self._malformed = 0
        self._idle = True

    # ---- any thread

    def start(self) -> None:
        """Register the memory and start the thread. Blocks until that is done. Raises what registration raised."""
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
        """Queue what the scheduler half says. Never blocks, never raises."""
        if orders:
            self._orders.append(orders)
            self._bell.wake()

    def collect(self) -> StepReport:
        """What has ended since the last call."""
        if not self._reports:
            return _NOTHING
        return merged([self._reports.popleft() for _ in range(len(self._reports))])

    @property
    def has_report(self) -> bool:
        """`collect` has something."""
        return bool(self._reports)

    def stats(self) -> HandoffStats:
        """Counters since the start, as of a moment ago."""
        return self._stats

    def drain(self) -> None:
        """Take on nothing that is not open already. `drained` says when all has ended."""
        self._drain = True
        self._bell.wake()

    @property
    def drained(self) -> bool:
        """After `drain`: nothing is open any more, and every end was collected."""
        return self._drain and self._idle and not self._orders and not self._reports

    def close(self) -> None:
        """End every hand-off, tell the peers, stop the thread, close the transport. Idempotent; blocks for moments."""
        self._stop.set()
        self._bell.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                logger.warning("driver thread does not end thread=%s after_s=%g", self._thread.name, _CLOSE_S)
        self._transport.close()
        self._bell.close()

    # ---- the driver's thread

    def _run(self) -> None:
        try:
            self._transport.register(self._regions, self._owners)
            self._metadata = self._transport.metadata()
            self._bell.open(self._host)
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
        self._say_goodbye()
        self._mover.close()

    def _turn(self) -> bool:
        """One round. True: something happened, so more may be there."""
        core, busy = self._core, False
        polled = self._transport.poll()
        # A grantor counts from when it received: not from before a poll that may have taken long.
        now_s = self._clock.now_s()
        for received in polled.messages:
            busy = True
            self._receive(received, now_s)
        for completion in polled.completions:
            busy = True
            # The time of the poll is after the transfer's end: a lease that is valid now was valid then.
            self._ended(self._mover.completed(completion), self._clock.now_s())
        for moved in self._mover.poll():
            busy = True
            self._ended(moved, self._clock.now_s())
        now_s = self._clock.now_s()
        # Behind the messages: a lease that was granted a moment ago is one to write under.
        while self._orders:
            busy = True
            self._take_orders(self._orders.popleft(), now_s)
        if self._drain:
            core.prefill.drain(now_s)
        due_s = core.next_deadline_s()
        if due_s is not None and due_s <= now_s:
            busy = True
            core.tick(now_s)
        self._come_back(now_s)
        if now_s >= self._presence.next_s:
            busy = True
            self._miss(self._presence.tick(now_s), f"nothing was heard of it for {self._gone_after_s:g} s", now_s)
        if silent := core.take_silent():
            self._miss([peer.name for peer in silent], "it gave no sign of life for a hand-off", now_s)
        if core.decode.landed:
            self._report()  # before anything is sent: the engine waits for it
        busy = self._act() or busy
        if busy:
            self._report()
            self._busy_until_s = now_s + 0.02
        return busy

    def _take_orders(self, orders: StepOrders, now_s: float) -> None:
        for depart in orders.gone:
            self._depart(depart, now_s)
        for introduce in orders.accepted:
            self._introduce(introduce, now_s)
        self._core.orders(orders, now_s)

    def _introduce(self, introduce: PeerAccepted, now_s: float) -> None:
        if introduce.engine == self._me[0]:
            self._learn_own_layouts(introduce)
            return
        known = self._engines.get(introduce.engine)
        if known is not None and known.introduce.incarnation == introduce.incarnation:
            return
        links = self._make_links(introduce)
        if links is None:
            return
        self._engines[introduce.engine] = _Engine(introduce, links)
        for link in links:
            self._links[link.name] = link
        self._core.peer_accepted(introduce.engine, introduce.incarnation, len(links), now_s)
        self._act()
        self._forget(() if known is None else known.links)
        logger.info("peer introduced peer=%s/%s ranks=%d", introduce.engine, introduce.incarnation, len(links))
        # At once, not at the first message: a transport keeps the messages of a peer until we connect to it.
        for link in links:
            self._reconnect(link, now_s)
            self._presence.meet(link.name, now_s)

    def _depart(self, depart: PeerGone, now_s: float) -> None:
        known = self._engines.get(depart.engine)
        if known is None or known.introduce.incarnation != depart.incarnation:
            return
        del self._engines[depart.engine]
        self._core.peer_gone(depart.engine, depart.incarnation, depart.reason, now_s)
        self._act()
        self._forget(known.links)
        logger.info("peer forgotten peer=%s/%s cause=%s", depart.engine, depart.incarnation, depart.reason)

    def _forget(self, links: Sequence[Link]) -> None:
        """Nothing is kept of these, once the core's Disconnects were carried out."""
        for link in links:
            del self._links[link.name]
            self._pieces.pop(link.name, None)
            self._away.pop(link.name, None)
            self._presence.forget(link.name)
            self._bell.forget(link.name)

    def _miss(self, names: Sequence[PeerName], why: str, now_s: float) -> None:
        """These are gone for good, each with its whole engine: no hand-off does without a rank."""
        for engine in [one for one in self._engines.values() if any(link.name in names for link in one.links)]:
            depart = PeerGone(engine.introduce.engine, engine.introduce.incarnation, why)
            self._depart(depart, now_s)
            if self._on_lost is not None:
                self._on_lost(depart.engine, depart.incarnation, why)

    def _make_links(self, introduce: PeerAccepted) -> list[Link] | None:
        try:
            hello, links = make_links(
                introduce.hello,
                own_layout=self._layout,
                own_layouts=self._own_layouts,
                transport=self._transport.name,
            )
            if (hello.engine, hello.incarnation) != (introduce.engine, introduce.incarnation):
                raise MalformedMessage(f"the hello of {introduce.engine!r} is {hello.engine!r}, or another start of it")
        except PeerError as error:
            self._refused_peers += 1
            logger.warning("peer refused peer=%s cause=%s", introduce.engine, error)
            return None
        return links

    def _learn_own_layouts(self, introduce: PeerAccepted) -> None:
        """Our own engine's hello: from now on we know what our sibling ranks have, and so what we owe to whom."""
        if introduce.incarnation != self._me[1] or self._own_layouts:
            return
        try:
            self._own_layouts = layouts_of(decode_hello(introduce.hello))
        except PeerError as error:
            logger.warning("own hello cannot be read cause=%s", error)
            return
        if len(self._own_layouts) != self._num_ranks:
            logger.warning("own hello has %d ranks, the engine has %d", len(self._own_layouts), self._num_ranks)
            self._own_layouts = ()
        for engine in self._engines.values():
            engine.links = self._make_links(engine.introduce) or engine.links
            self._links.update({link.name: link for link in engine.links})

    def _receive(self, received: Received, now_s: float) -> None:
        try:
            message = decode_message(received.body)
            if isinstance(message, Fragment):
                whole = self._pieces.setdefault(received.peer, Reassembly()).add(message)
                if whole is None:
                    return
                message = whole
        except MalformedMessage as error:
            self._malformed += 1
            level = logging.WARNING if self._malformed <= 10 else logging.DEBUG
            logger.log(level, "message ignored peer=%s cause=%s", received.peer, error)
            return
        self._away.pop(received.peer, None)
        self._bell.arrived()
        if (link := self._links.get(received.peer)) is not None:
            self._presence.heard(received.peer)
            if isinstance(message, Renew | RenewAck):
                self._bell.learn(link.name, link.host, message.bell_port, message.bell)
        self._core.message(received.peer, message, now_s)

    def _ended(self, moved: Moved | None, now_s: float) -> None:
        if moved is not None:
            if (peer := self._writing.pop(moved.post, None)) is not None:
                self._bell.ring(peer)
            self._core.completed(moved.post, moved.error, now_s, num_bytes=moved.num_bytes, num_runs=moved.num_runs)

    def _act(self) -> bool:
        """Carry out actions: everything short, and one post."""
        did = False
        while True:
            actions = self._core.take_actions()
            if not actions:
                break
            did = True
            for action in actions:
                if isinstance(action, Post):
                    self._posts.append(action)
                elif isinstance(action, Send):
                    self._send(action)
                else:
                    self._disconnect(action)
        if self._posts:
            did = True
            self._post(self._posts.popleft())
        return did

    def _send(self, action: Send) -> None:
        peer, message = action.peer, action.message
        if isinstance(message, Renew | RenewAck) and not message.seq and self._bell.port:
            message = with_bell(message, self._bell.port, self._bell.token)  # the first thing that each tells the other
        try:
            if self._connect(peer):
                for frame in frames(message):
                    self._transport.send(peer.name, frame)
                self._bell.ring(peer.name)
        except (PeerLost, TransferError) as error:
            self._lost(peer, str(error), dead=isinstance(error, PeerLost))

    def _connect(self, peer: Peer) -> bool:
        """False: it was lost a moment ago; what is sent to it goes nowhere, as it would then."""
        if peer.name in self._connected:
            return True
        now_s = self._clock.now_s()
        link = self._links.get(peer.name)
        if link is None or now_s < self._away.get(peer.name, (now_s, 0.0))[0]:
            return False
        self._transport.connect(peer.name, link.metadata, link.regions)
        self._connected.add(peer.name)
        return True

    def _reconnect(self, link: Link, now_s: float) -> None:
        try:
            self._transport.connect(link.name, link.metadata, link.regions)
            self._connected.add(link.name)
        except (PeerLost, TransferError) as error:
            logger.info("peer not connected peer=%s cause=%s", link.name, error)
            self._stay_away(link.name, now_s)

    def _stay_away(self, name: PeerName, now_s: float) -> None:
        pause_s = min(_MAX_RETRY_S, 2 * self._away.get(name, (0.0, _RETRY_S / 2))[1])
        self._away[name] = (now_s + pause_s, pause_s)

    def _come_back(self, now_s: float) -> None:
        """Connect again to lost peers that are still current: they may live, and their messages wait for us."""
        for name, (at_s, _) in list(self._away.items()):
            if now_s >= at_s and name not in self._connected:
                self._stay_away(name, now_s)
                self._reconnect(self._links[name], now_s)

    def _lost(self, peer: Peer, why: str, *, dead: bool) -> None:
        now_s = self._clock.now_s()
        self._stay_away(peer.name, now_s)
        logger.info("peer lost peer=%s cause=%s", peer.name, why)
        self._core.peer_lost(peer.name, why, now_s, dead=dead)

    def _disconnect(self, action: Disconnect) -> None:
        if action.peer.name in self._links and action.peer.name not in self._away:
            self._stay_away(action.peer.name, self._clock.now_s())
        if action.peer.name in self._connected:
            self._connected.discard(action.peer.name)
            self._transport.disconnect(action.peer.name)
        self._pieces.pop(action.peer.name, None)

    def _post(self, post: Post) -> None:
        peer = post.peer
        try:
            connected = self._connect(peer)
        except (PeerLost, TransferError) as error:
            self._core.completed(post.post, str(error), self._clock.now_s())
            self._lost(peer, str(error), dead=isinstance(error, PeerLost))
            return
        now_s = self._clock.now_s()
        if not connected:
            self._core.completed(post.post, f"peer {peer.name!r} is gone", now_s)
            return
        if now_s > post.not_after_s:
            self._core.completed(post.post, None, now_s, started=False)
            return
        if post.message is not None:
            self._writing[post.post] = peer.name
        moved = self._mover.start(post, self._links[peer.name])
        if moved is not None:
            self._ended(moved, self._clock.now_s())
            if moved.lost:
                self._lost(peer, moved.error or "gone", dead=True)

    def _report(self) -> None:
        core = self._core
        if (report := core.take_report()) is not None:
            self._reports.append(report)
        self._idle = core.idle and not self._posts
        self._stats = replace(core.stats(), refused_peers=self._refused_peers)
        self._on_report()

    def _wait(self) -> None:
        """Sleep while nothing can be missed. A submit wakes us, and so does a peer that rings; else we look."""
        now_s, core, bell = self._clock.now_s(), self._core, self._bell
        longest_s = pause_s(
            now_s,
            in_flight=bool(self._mover.num_in_flight or self._posts),
            expecting=bell.expecting(now_s),
            all_ring=bell.all_ring(len(self._links)),
            awaited=now_s < self._busy_until_s and core.reply_expected,
            receiving=bool(core.decode.num_open),
            idle=core.idle,
            has_peers=bool(self._links),
            due_s=core.next_deadline_s(),
        )
        bell.wait(longest_s, self._clock)

    def _say_goodbye(self) -> None:
        try:
            self._core.shut_down(self._clock.now_s())
            for action in self._core.take_actions():
                if isinstance(action, Send) and action.peer.name in self._connected:
                    self._send(action)
            # One look more, so that what was sent leaves.
            self._transport.poll()
        except FerryError as error:
            logger.debug("goodbye not said cause=%s", error)
