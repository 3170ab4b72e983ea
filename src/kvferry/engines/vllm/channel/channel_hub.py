"""What the scheduler's process has for the workers beside orders, and what makes it step although no request runs.

Peers come and go on the side channel's thread. They go to the workers by line, where every worker has one; else they
wait for the next step, for which the engine is woken. Orders of the engine's thread may go the same way (`send`): then
a transfer begins while the step that asked for it is still being made. What the workers tell by line waits here for the
engine's thread, and the engine is woken for it.
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
        """`wake`: see engines.vllm.wake. None: an idle engine hears of nothing until it steps."""
        self._wake = wake or (lambda: None)
        self._waiting: deque[PeerAccepted | PeerGone] = deque()
        self._lines: tuple[SchedulerChannel, ...] = ()
        self._sending = threading.Lock()
        self._news: deque[StepReport | PeerGone] = deque()

    def connect(self, addresses: Sequence[str]) -> None:
        """To every worker, or to none: peers that came by two ways would come in two orders."""
        lines: list[SchedulerChannel] = []
        try:
            lines.extend(SchedulerChannel(address, self._hear) for address in addresses)
        except OSError as error:
            logger.info("peers reach the workers with the engine's steps: no line to them cause=%s", error)
            for line in lines:
                line.close()
            return
        self._lines = tuple(lines)

    def send_peers(self, orders: StepOrders) -> None:
        """Send peers that came and went: every worker learns of them before any order that is made after this call."""
        with self._sending:
            if self._lines:
                self._send(orders)
                return
            self._waiting.extend((*orders.gone, *orders.accepted))
        self._wake()

    @property
    def connected(self) -> bool:
        """Every worker has a line: `send` reaches it."""
        return bool(self._lines)

    def send(self, orders: StepOrders) -> None:
        """By line, behind every peer that was told before."""
        assert self._lines, "there are lines to send by"
        with self._sending:
            self._send(orders)

    def _send(self, orders: StepOrders) -> None:
        for line in self._lines:
            line.send(orders)

    def take(self) -> tuple[tuple[PeerAccepted, ...], tuple[PeerGone, ...]]:
        """For the orders of a step that is being made now: who came, who left."""
        if not self._waiting:
            return (), ()
        mail = [self._waiting.popleft() for _ in range(len(self._waiting))]
        came = tuple(peer for peer in mail if isinstance(peer, PeerAccepted))
        return came, tuple(peer for peer in mail if isinstance(peer, PeerGone))

    def take_news(self) -> tuple[tuple[StepReport, ...], tuple[PeerGone, ...]]:
        """What the workers have told by line since the last call: reports, and peers that they found gone."""
        if not self._news:
            return (), ()
        news = [self._news.popleft() for _ in range(len(self._news))]
        reports = tuple(one for one in news if isinstance(one, StepReport))
        return reports, tuple(one for one in news if isinstance(one, PeerGone))

    @property
    def has_news(self) -> bool:
        """`take_news` has something."""
        return bool(self._news)

    @property
    def pending(self) -> bool:
        """A step is needed, for what waits here."""
        return bool(self._waiting)

    def close(self) -> None:
        """No socket, no thread remains. Idempotent."""
        for line in self._lines:
            line.close()

    def _hear(self, news: StepReport | PeerGone) -> None:
        self._news.append(news)
        self._wake()
