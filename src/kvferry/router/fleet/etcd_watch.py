"""Keeps a fleet in line with etcd: a worker is in the fleet as long as its key is there.

While etcd does not answer, the fleet stays as it is: a router that has workers does not need etcd to serve. Anyone who
can write there decides where prompts go, like anyone who can write the fleet file.
"""

import asyncio
import logging

import aiohttp

from kvferry.errors import ConfigError
from kvferry.router.fleet.worker import Source
from kvferry.router.fleet.workers import Fleet
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role
from kvferry.web.etcd import DEFAULT_PREFIX, Etcd, EtcdFailed

__all__ = ["EtcdFleet"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_ROLES = (Role.PREFILL, Role.DECODE)


class EtcdFleet:
    """Follows the keys below a prefix. There is at most one per router; it runs on the event loop."""

    def __init__(self, url: str, fleet: Fleet, settings: RouterSettings, prefix: str = DEFAULT_PREFIX) -> None:
        self._url = url
        self._prefix = prefix.rstrip("/") + "/"
        self._fleet = fleet
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._ignored: set[str] = set()

    async def start(self) -> None:
        """Reads all keys, then follows their changes. If etcd does not answer yet, the reading is repeated later, and
        nothing waits for it."""
        self._session = aiohttp.ClientSession()  # not the router's, which sends the workers' key
        etcd = Etcd(self._session, self._url)
        try:
            self._apply((await etcd.read(self._prefix))[0])
        except EtcdFailed as error:
            logger.warning("etcd does not answer yet cause=%s", error)
        self._task = asyncio.create_task(self._follow(etcd))

    async def stop(self) -> None:
        """Stops following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _follow(self, etcd: Etcd) -> None:
        pause_s, logged = _FIRST_PAUSE_S, ""
        while True:
            try:
                found, revision = await etcd.read(self._prefix)
                self._apply(found)
                pause_s, logged = _FIRST_PAUSE_S, ""
                async for _ in etcd.changes(self._prefix, revision + 1):
                    self._apply((await etcd.read(self._prefix))[0])
            except EtcdFailed as error:
                if str(error) != logged:
                    logger.warning("etcd is lost, the fleet stays as it is cause=%s", error)
                logged = str(error)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def _apply(self, found: dict[str, str]) -> None:
        wanted: set[tuple[str, Role]] = set()
        for key, url in sorted(found.items())[: self._settings.max_registered]:
            role = next((role for role in _ROLES if key.startswith(f"{self._prefix}{role}/")), None)
            try:
                if role is None:
                    raise ConfigError(f"a key is {self._prefix}prefill/NAME or {self._prefix}decode/NAME")
                self._fleet.add(url, role, Source.ETCD)
            except ConfigError as error:
                if key not in self._ignored:
                    logger.warning("etcd key ignored key=%r cause=%s", key[:200], error)
                self._ignored.add(key)
                continue
            wanted.add((url.rstrip("/"), role))
        self._ignored &= set(found)
        for worker in self._fleet.workers:
            if worker.source is Source.ETCD and (worker.url, worker.assigned_role) not in wanted:
                self._fleet.remove(worker, "its key in etcd is gone")
