"""The scheduler's end of the channels to all workers: peers and orders go down, reports come up.

Peers are accepted, and found to be gone, on the side channel's thread. They reach the workers through the channels if
every worker has one; otherwise they wait for the next step, for which the engine is woken. Orders of the engine's
thread may go the same way (`send`): then a transfer begins while the step that ordered it is still being made. Reports
that arrive through the channels wait here for the engine's thread, which is woken for them.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvferry.connector.base import PeerAccepted, PeerGone, StepOrders, StepReport
from kvferry.engines.vllm.channel.worker_channel import SchedulerChannel

__all__ = ["ChannelHub"]

logger = logging.getLogger(__name__)


class ChannelHub:
    """One an engine. `send_peers` may be called from any thread, everything else on the engine's."""

    def __init__(self, wake: Callable[[], None] | None) -> None:
        """`wake` wakes an idle engine. If it is None, an idle engine learns of nothing until it steps."""
        self._wake = wake or (lambda: None)
        self._waiting: deque[PeerAccepted | PeerGone] = deque()
        self._channels: tuple[SchedulerChannel, ...] = ()
        self._sending = threading.Lock()
        self._reports: deque[StepReport | PeerGone] = deque()

    def connect(self, addresses: Sequence[str]) -> None:
        """Connects to every worker or to none: peers that travel on two ways would arrive in two orders."""
        channels: list[SchedulerChannel] = []
        try:
            channels.extend(SchedulerChannel(address, self._receive) for address in addresses)
        except OSError as error:
            logger.info("orders reach the workers only with the engine's steps: no channel to them cause=%s", error)
            for channel in channels:
                channel.close()
            return
        self._channels = tuple(channels)

    def send_peers(self, orders: StepOrders) -> None:
        """Send peers that came and went: every worker learns of them before any order that is made after this call."""
        with self._sending:
            if self._channels:
                self._send(orders)
                return
            self._waiting.extend((*orders.gone, *orders.accepted))
        self._wake()

    @property
    def connected(self) -> bool:
        """Whether every worker has a channel, so that `send` reaches it."""
        return bool(self._channels)

    def send(self, orders: StepOrders) -> None:
        """Sends orders through the channels, after every peer that was announced before."""
        assert self._channels, "send is called only while there are channels"
        with self._sending:
            self._send(orders)

    def _send(self, orders: StepOrders) -> None:
        for channel in self._channels:
            channel.send(orders)

    def take(self) -> tuple[tuple[PeerAccepted, ...], tuple[PeerGone, ...]]:
        """Returns who has come and gone since the last call, for the orders of a step that is being made now.

        Workers take those who have gone before those who have come. So one who came and has gone since is left out.
        """
        if not self._waiting:
            return (), ()
        came: dict[tuple[str, str], PeerAccepted] = {}
        gone: list[PeerGone] = []
        for _ in range(len(self._waiting)):
            peer = self._waiting.popleft()
            key = (peer.engine, peer.incarnation)
            if isinstance(peer, PeerAccepted):
                came[key] = peer
            else:
                came.pop(key, None)
                gone.append(peer)
        return tuple(came.values()), tuple(gone)

    def take_reports(self) -> tuple[tuple[StepReport, ...], tuple[PeerGone, ...]]:
        """Returns what has arrived through the channels since the last call: reports, and peers found to be gone."""
        if not self._reports:
            return (), ()
        received = [self._reports.popleft() for _ in range(len(self._reports))]
        reports = tuple(one for one in received if isinstance(one, StepReport))
        return reports, tuple(one for one in received if isinstance(one, PeerGone))

    @property
    def has_reports(self) -> bool:
        """Whether `take_reports` would return anything."""
        return bool(self._reports)

    @property
    def pending(self) -> bool:
        """Whether something waits here for a step."""
        return bool(self._waiting)

    def close(self) -> None:
        """Closes every socket and ends every thread. Idempotent."""
        for channel in self._channels:
            channel.close()

    def _receive(self, report: StepReport | PeerGone) -> None:
        self._reports.append(report)
        self._wake()
