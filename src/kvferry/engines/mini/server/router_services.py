"""What a worker does for routers besides answering: it reports cached blocks, meets peers early, and registers."""

import asyncio
import base64
import logging
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from kvferry.web.api_errors import ApiError

__all__ = ["HASH_BYTES", "MeetBody", "Registrar", "packed_hashes", "prompt_blocks"]

logger = logging.getLogger(__name__)

HASH_BYTES = 8
"""The length of each packed hash: routers only choose workers by them."""
_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_RETRY_S = 1.0
_MAX_PORT = 65535


class MeetBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/kvferry/meet: shake hands with this engine now, before a request names it."""

    engine: str
    host: str
    port: int
    incarnation: str | None = None

    def check(self) -> None:
        """Raises ApiError (400) if a field is out of range."""
        if not 0 < self.port <= _MAX_PORT:
            raise ApiError(400, f"port={self.port!r}: send 1 to {_MAX_PORT}", param="port")
        for name in ("engine", "host"):
            if not 0 < len(value := getattr(self, name)) <= 253:
                raise ApiError(400, f"{name}={value[:40]!r}: send 1 to 253 characters", param=name)


def packed_hashes(hashes: Sequence[bytes]) -> bytes:
    """Returns the first HASH_BYTES of each hash, concatenated."""
    return b"".join(key[:HASH_BYTES] for key in hashes)


def prompt_blocks(hashes: Sequence[bytes]) -> str:
    """Returns the packed hashes of a prompt's whole blocks, in base64."""
    return base64.b64encode(packed_hashes(hashes)).decode()


class Registrar:
    """Keeps a worker registered with its routers: renews each lease, and says when the worker leaves."""

    def __init__(self, routers: Sequence[str], url: str, role: str, key: str | None) -> None:
        """`url`: where routers and other workers reach this one. `key`: the content of --register-key-file."""
        self._routers = [router.rstrip("/") for router in routers]
        self._body = {"url": url, "role": role}
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Starts registering, without waiting for it. A router that does not answer is tried again."""
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        self._tasks = [asyncio.create_task(self._keep(router)) for router in self._routers]

    async def stop(self) -> None:
        """Tells routers that this worker leaves, and stops. Idempotent; does not raise if a router does not answer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await asyncio.gather(*(self._send(router, {**self._body, "leaving": True}) for router in self._routers))
            await self._session.close()
            self._session = None

    async def _keep(self, router: str) -> None:
        last_problem = ""
        while True:
            lease_s, problem = await self._send(router, self._body)
            if problem and problem != last_problem:
                logger.warning("registration failed router=%s cause=%s", router, problem)
            elif not problem and (last_problem or lease_s):
                logger.debug("registered router=%s lease_s=%g", router, lease_s)
            last_problem = problem
            await asyncio.sleep(max(0.1, lease_s / 3) if lease_s else _RETRY_S)

    async def _send(self, router: str, body: dict[str, Any]) -> tuple[float, str]:
        """Sends a registration. Returns the lease in seconds, and the problem if there was one."""
        assert self._session is not None, "start() opens the session"
        try:
            async with self._session.post(
                f"{router}/v1/kvferry/register", json=body, headers=self._headers
            ) as response:
                raw = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return 0.0, f"{type(error).__name__}: {error}"
        if response.status != 200:
            return 0.0, f"status {response.status}: {raw[:300]!r}"
        try:
            return msgspec.json.decode(raw, type=_Lease).lease_s, ""
        except msgspec.MsgspecError as error:
            return 0.0, f"its answer cannot be read: {error}"


class _Lease(msgspec.Struct, frozen=True):
    lease_s: float
