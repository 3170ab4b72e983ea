"""One side of a pair, from a file or from a live worker: its ranks' layouts."""

import base64
import binascii
import urllib.error
import urllib.request
from pathlib import Path

import msgspec

from kvferry.errors import ConfigError, MalformedMessage, PeerLost
from kvferry.layout.description import CacheLayout
from kvferry.wire.hello import decode_hello
from kvferry.wire.layout_codec import decode_layout, load_layouts

__all__ = ["load_side"]

TIMEOUT_S = 5.0
MAX_BYTES = 64 << 20


class _Described(msgspec.Struct, frozen=True):
    """GET /v1/kvferry, and the files that `kvferry facts` saves, as far as they are read here."""

    hello: str


def load_side(name: str) -> tuple[CacheLayout, ...]:
    """All ranks of one engine: from http(s)://worker, a layout file, or what `kvferry facts` saved.

    Raises ConfigError (no such file), PeerLost (no answer), MalformedMessage (not what it should be).
    """
    if name.startswith(("http://", "https://")):
        return _from_hello(name, _fetch(name.rstrip("/") + "/v1/kvferry"))
    path = Path(name)
    if path.suffix == ".json":
        try:
            body = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {name!r}: {error.strerror}") from error
        if b'"kvferry_layouts"' not in body:
            return _from_hello(name, body)
    return load_layouts(path)


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise PeerLost(f"{url!r} does not answer: {error}. Is it the URL of a kvferry worker?") from error
    if len(body) > MAX_BYTES:
        raise MalformedMessage(f"{url!r} answers with more than {MAX_BYTES} bytes")
    return body


def _from_hello(name: str, body: bytes) -> tuple[CacheLayout, ...]:
    try:
        hello = base64.b64decode(msgspec.json.decode(body, type=_Described).hello, validate=True)
    except (msgspec.MsgspecError, binascii.Error, UnicodeDecodeError) as error:
        raise MalformedMessage(f"{name!r} is neither a layout file nor the description of a worker: {error}") from error
    return tuple(decode_layout(rank.layout) for rank in decode_hello(hello).ranks)
