"""Keys of the HTTP interface: which clients may send requests, and which workers may register.

Keys are compared in constant time.
"""

import hmac
from collections.abc import Collection, Sequence
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvferry.errors import ConfigError
from kvferry.web.api_errors import ApiError

__all__ = ["bearer_of", "fits", "key_middleware", "read_keys"]

_MIN_CHARS = 8


def read_keys(path: str) -> tuple[str, ...]:
    """Reads a key file: one key per line; empty lines and lines that begin with # are skipped. Raises ConfigError."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"key file {path!r} cannot be read: {why}. Write one key per line, or make one: kvferry key new FILE"
        ) from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"key file {path!r} has no key: write one per line, or make one with `kvferry key new`")
    if any(len(key) < _MIN_CHARS or not (key.isascii() and key.isprintable()) or " " in key for key in keys):
        raise ConfigError(
            f"key file {path!r} has a key that is shorter than {_MIN_CHARS} characters, or is not printable ASCII "
            "without spaces: make one with `kvferry key new`"
        )
    return keys


def bearer_of(request: web.Request) -> str:
    """Returns the key that came with a request, or "" if there is none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def fits(key: str, keys: Sequence[str]) -> bool:
    """True if `key` is one of `keys`."""
    given = key.encode("utf-8", "replace")
    matches = [hmac.compare_digest(given, one.encode()) for one in keys]  # all of them: every key costs the same
    return any(matches)


def key_middleware(keys: Sequence[str], open_paths: Collection[str]) -> Middleware:
    """Returns a middleware that refuses requests without one of `keys`, as OpenAI does, except to `open_paths`."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in open_paths and not fits(bearer_of(request), keys):
            given = "Incorrect API key provided" if "Authorization" in request.headers else "No API key was sent"
            raise ApiError(
                401, f"{given}: send `Authorization: Bearer KEY` with a key of this router", code="invalid_api_key"
            )
        return await handler(request)

    return middleware
