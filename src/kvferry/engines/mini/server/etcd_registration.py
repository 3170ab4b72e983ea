"""Keeps a worker's keys in etcd, under a lease that is renewed as long as the worker runs."""

import asyncio
import logging

import aiohttp

from kvferry.web.etcd import DEFAULT_PREFIX, Etcd, EtcdFailed

__all__ = ["EtcdRegistrar"]

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_RIVAL_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class EtcdRegistrar:
    """Puts the key `PREFIX/ROLE/NAME` for each role of a worker and keeps it. Used on the event loop."""

    def __init__(self, etcd_url: str, url: str, role: str, name: str, *, ttl_s: int = 10) -> None:
        """`url`: where routers and other workers reach this one. `ttl_s`: its keys vanish this long after it has
        died."""
        roles = ("prefill", "decode") if role == "both" else (role,)
        self._keys = [f"{DEFAULT_PREFIX}/{one}/{name}" for one in roles]
        self._etcd_url = etcd_url
        self._url = url
        self._ttl_s = ttl_s
        self._lease = ""
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts registering, without waiting for it. If etcd does not answer, it is tried again."""
        self._session = aiohttp.ClientSession()
        self._task = asyncio.create_task(self._keep(Etcd(self._session, self._etcd_url)))

    async def stop(self) -> None:
        """Deletes the keys and stops. Idempotent; does not raise if etcd does not answer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._session is not None:
            try:
                if self._lease:
                    await Etcd(self._session, self._etcd_url).revoke(self._lease)
            except EtcdFailed as error:
                logger.warning("etcd keys are left to expire with their lease cause=%s", error)
            await self._session.close()
            self._session = None

    async def _keep(self, etcd: Etcd) -> None:
        problem, is_put = "", False
        while True:
            try:
                if not is_put or not await etcd.keep_alive(self._lease):
                    is_put = False  # a lease without its keys would be kept alive for nothing
                    await self._check_rivals(etcd)
                    self._lease = await etcd.grant(self._ttl_s)
                    for key in self._keys:
                        await etcd.put(key, self._url, self._lease)
                    is_put = True
                    logger.info("registered etcd=%s keys=%s", self._etcd_url, ",".join(self._keys))
                problem = ""
            except EtcdFailed as error:
                if str(error) != problem:
                    logger.warning("registration failed etcd=%s cause=%s", self._etcd_url, error)
                problem = str(error)
            await asyncio.sleep(self._ttl_s / 3 if not problem else _RETRY_S)

    async def _check_rivals(self, etcd: Etcd) -> None:
        """Raises EtcdFailed if a living worker at another address holds one of our keys: two engines have one id.

        The key of a worker that has died stays until its lease ends; it is replaced at once.
        """
        found, _ = await etcd.read(f"{DEFAULT_PREFIX}/")
        for key in self._keys:
            other = found.get(key, self._url)
            if other != self._url and await self._answers(other):
                raise EtcdFailed(
                    f"two engines have the id {key.rpartition('/')[2]!r}: the one at {other} holds the key {key}, and "
                    f"this one is at {self._url}. Give each its own --engine-id"
                )

    async def _answers(self, url: str) -> bool:
        assert self._session is not None, "start() opens the session"
        try:
            async with self._session.get(f"{url}/v1/kvferry", timeout=_RIVAL_TIMEOUT) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return False
