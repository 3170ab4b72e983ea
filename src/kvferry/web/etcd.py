"""As much of etcd v3 as a fleet needs, over its JSON gateway (`/v3/...`): no client library is wanted for six calls.

Keys of workers are `PREFIX/prefill/NAME` and `PREFIX/decode/NAME`, their values the worker's address. A worker puts its
key under a lease and keeps that alive; a router reads all keys and watches them. See etcd's API: "gRPC gateway".
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
"""A watch that says nothing for so long is ended, and all is read again: etcd's host may have gone without a word."""


class EtcdFailed(PeerError):
    """etcd did not answer, or not as etcd does."""


def check_etcd(url: str) -> str:
    """The address without a slash at its end. Raises ConfigError for what is none."""
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
    """One member of a cluster, or a proxy. On the event loop. Everything raises EtcdFailed where it does not answer."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = check_etcd(url)

    async def read(self, prefix: str) -> tuple[dict[str, str], int]:
        """All keys that begin so, with their values; and the revision of which that is true."""
        raw = await self._post("kv/range", {"key": _b64(prefix), "range_end": _b64(_end_of(prefix))})
        told = _decoded(raw, _Range)
        try:
            found = {_text(pair.key): _text(pair.value) for pair in told.kvs}
            return found, int(told.header.revision)
        except (ValueError, binascii.Error) as error:
            raise EtcdFailed(f"etcd at {self.url} answered what is no key: {error}") from error

    async def changes(self, prefix: str, from_revision: int) -> AsyncIterator[None]:
        """Once each time that keys which begin so have changed, from this revision on. Ends when etcd ends it, or has
        said nothing for a while: read again then."""
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
        """A new lease."""
        return _decoded(await self._post("lease/grant", {"TTL": str(ttl_s)}), _Lease).ID

    async def keep_alive(self, lease: str) -> bool:
        """One period more. False: the lease has ended."""
        told = _decoded(await self._post("lease/keepalive", {"ID": lease}), _KeepAlive).result
        return told.TTL.isdigit() and int(told.TTL) > 0

    async def put(self, key: str, value: str, lease: str) -> None:
        """Set a key, for as long as the lease lives."""
        await self._post("kv/put", {"key": _b64(key), "value": _b64(value), "lease": lease})

    async def revoke(self, lease: str) -> None:
        """End a lease, and its keys."""
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
    """The first key behind all that begin so: our prefixes end with a slash."""
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
