"""A client for the part of etcd v3 that a fleet needs, over etcd's JSON gateway (`/v3/...`).

A worker's keys are `PREFIX/prefill/NAME` and `PREFIX/decode/NAME`; the value is its address. A worker puts its keys
under a lease and keeps that alive; a router reads all keys and watches them. Source: "gRPC gateway" in
etcd's documentation.
"""

import base64
import binascii
from collections.abc import AsyncIterator
from typing import Annotated, TypeVar

import aiohttp
import msgspec

from kvferry.errors import ConfigError, PeerError

__all__ = ["DEFAULT_PREFIX", "Etcd", "EtcdFailed", "check_etcd"]

T = TypeVar("T")
DEFAULT_PREFIX = "/kvferry/workers"
_MAX_ANSWER_BYTES = 4 << 20
_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_WATCH_QUIET_S = 60.0
"""A watch without events ends after this long, and all keys are read again: etcd's host may have vanished."""


class EtcdFailed(PeerError):
    """etcd did not answer, or its answer is not one that etcd sends."""


def check_etcd(url: str) -> str:
    """Returns the address without a trailing slash. Raises ConfigError if it is not an HTTP address."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--etcd {url!r} must begin with http:// or https://, as in http://127.0.0.1:2379")
    return url.rstrip("/")


class _Header(msgspec.Struct, frozen=True):
    revision: str = "0"


class _Pair(msgspec.Struct, frozen=True):
    key: str
    value: str = ""


class _Range(msgspec.Struct, frozen=True):
    header: _Header = _Header()
    kvs: tuple[_Pair, ...] = ()


class _Lease(msgspec.Struct, frozen=True):
    ID: str = "0"
    TTL: Annotated[str, msgspec.Meta(max_length=20)] = "0"


class _KeepAlive(msgspec.Struct, frozen=True):
    result: _Lease = _Lease()


class Etcd:
    """A connection to one cluster member or proxy. Used on the event loop. All methods may raise EtcdFailed."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = check_etcd(url)

    async def read(self, prefix: str) -> tuple[dict[str, str], int]:
        """Returns all keys with this prefix and their values, and the revision at which they were read."""
        raw = await self._post("kv/range", {"key": _b64(prefix), "range_end": _b64(_end_of(prefix))})
        reply = _decoded(raw, _Range)
        try:
            found = {_text(pair.key): _text(pair.value) for pair in reply.kvs}
            return found, int(reply.header.revision)
        except (ValueError, binascii.Error) as error:
            raise EtcdFailed(f"etcd at {self.url} returned a key or value that cannot be decoded: {error}") from error

    async def changes(self, prefix: str, from_revision: int) -> AsyncIterator[None]:
        """Yields once per change of keys with this prefix, from this revision on.

        Ends when etcd ends the watch, or after a while without events: read all keys again then.
        """
        ask = {
            "create_request": {
                "key": _b64(prefix),
                "range_end": _b64(_end_of(prefix)),
                "start_revision": str(from_revision),
            }
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_WATCH_QUIET_S)
        try:
            async with self._session.post(f"{self.url}/v3/watch", json=ask, timeout=timeout) as response:
                if response.status != 200:
                    raise EtcdFailed(f"etcd at {self.url} answered {response.status} to a watch")
                async for line in response.content:
                    if b'"events"' in line or b'"canceled":true' in line:
                        yield
        except aiohttp.SocketTimeoutError:
            return
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise EtcdFailed(f"etcd at {self.url}: {type(error).__name__}: {error}") from error

    async def grant(self, ttl_s: int) -> str:
        """Returns the id of a new lease."""
        return _decoded(await self._post("lease/grant", {"TTL": str(ttl_s)}), _Lease).ID

    async def keep_alive(self, lease: str) -> bool:
        """Renews a lease for one more period. Returns False if it has ended."""
        renewed = _decoded(await self._post("lease/keepalive", {"ID": lease}), _KeepAlive).result
        return renewed.TTL.isdigit() and int(renewed.TTL) > 0

    async def put(self, key: str, value: str, lease: str) -> None:
        """Sets a key that is deleted when the lease ends."""
        await self._post("kv/put", {"key": _b64(key), "value": _b64(value), "lease": lease})

    async def revoke(self, lease: str) -> None:
        """Ends a lease and deletes its keys."""
        await self._post("lease/revoke", {"ID": lease})

    async def _post(self, path: str, body: dict[str, str]) -> bytes:
        try:
            async with self._session.post(f"{self.url}/v3/{path}", json=body, timeout=_TIMEOUT) as response:
                raw = await response.content.read(_MAX_ANSWER_BYTES + 1)
                while chunk := await response.content.read(_MAX_ANSWER_BYTES):
                    raw += chunk
                    if len(raw) > _MAX_ANSWER_BYTES:
                        raise EtcdFailed(f"etcd at {self.url} answered more than {_MAX_ANSWER_BYTES} bytes")
                if response.status != 200:
                    raise EtcdFailed(f"etcd at {self.url} answered {response.status} to {path}: {raw[:200]!r}")
                return raw
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EtcdFailed(f"etcd at {self.url}: {type(error).__name__}: {error}") from error


def _end_of(prefix: str) -> str:
    """Returns the first key after all keys with this prefix, which ends with a slash."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(coded: str) -> str:
    return base64.b64decode(coded, validate=True).decode()


def _decoded(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EtcdFailed(f"etcd's answer cannot be read: {error}") from error
