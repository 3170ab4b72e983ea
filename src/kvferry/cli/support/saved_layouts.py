"""One side of a pair, from a file or from a live worker: its ranks' layouts."""

import base64
import binascii
from pathlib import Path

import msgspec

from kvferry.cli.support.worker_description import fetch, is_url
from kvferry.errors import ConfigError, MalformedMessage
from kvferry.layout.description import CacheLayout
from kvferry.wire.hello import decode_hello
from kvferry.wire.layout_codec import decode_layout, load_layouts

__all__ = ["load_side"]


class _Described(msgspec.Struct, frozen=True):
    """GET /v1/kvferry, and the files that `kvferry facts` saves, as far as they are read here."""

    hello: str


def load_side(name: str) -> tuple[CacheLayout, ...]:
    """All ranks of one engine: from http(s)://worker, a layout file, or what `kvferry facts` saved.

    Raises ConfigError (no such file), PeerLost (no answer), MalformedMessage (not what it should be).
    """
    if is_url(name):
        return _from_hello(name, fetch(name))
    path = Path(name)
    if path.suffix == ".json":
        try:
            body = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {name!r}: {error.strerror}") from error
        if b'"kvferry_layouts"' not in body:
            return _from_hello(name, body)
    return load_layouts(path)


def _from_hello(name: str, body: bytes) -> tuple[CacheLayout, ...]:
    try:
        if b'"hello"' not in body and b'"facts"' in body:
            raise MalformedMessage(
                f"{name!r} has facts, and no layout: save it from a running worker, kvferry facts URL -o FILE"
            )
        hello = base64.b64decode(msgspec.json.decode(body, type=_Described).hello, validate=True)
    except (msgspec.MsgspecError, binascii.Error, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"{name!r} is neither a layout file nor the description of a worker: {error}") from error
    return tuple(decode_layout(rank.layout) for rank in decode_hello(hello).ranks)
