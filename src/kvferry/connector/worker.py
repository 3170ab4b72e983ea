"""The worker half: hands orders to the driver thread, brings back what has ended. Never raises, never blocks."""

import logging

from kvferry.handoff.driver import Driver
from kvferry.handoff.orders import StepOrders, StepReport
from kvferry.stats import HandoffStats

__all__ = ["HandoffWorker"]

logger = logging.getLogger(__name__)


class HandoffWorker:
    """One rank's worker half. See connector.base.WorkerHalf for the contract of each hook."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def start_step(self, orders: StepOrders) -> None:
        """Queue the orders for the driver thread."""
        if orders:
            self._driver.submit(orders)

    def end_step(self) -> StepReport:
        """What has ended since the last call."""
        return self._driver.collect()

    def stats(self) -> HandoffStats:
        """Counters since the start."""
        return self._driver.stats()

    def close(self) -> None:
        """End the driver thread, then the transport; nothing of them remains."""
        self._driver.close()
