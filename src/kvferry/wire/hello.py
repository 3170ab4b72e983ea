"""The payload of a handshake: who an engine is, and what each of its ranks needs a peer to know.

Decoded only after the envelope was accepted (R8). Each rank's layout stays bytes until wire.layout_codec has checked it.
"""

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.settings import Role

__all__ = ["MAX_RANKS", "Hello", "RankHello", "decode_hello", "encode_hello"]

MAX_RANKS = 4096


class RankHello(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its cache layout (wire.layout_codec), its transport, and what that transport needs to connect."""

    layout: bytes
    transport: str
    transport_metadata: bytes


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, all its ranks in the order of their Rank.index."""

    engine: str
    incarnation: str
    role: Role
    ranks: tuple[RankHello, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Hello)


def encode_hello(hello: Hello) -> bytes:
    """As msgpack."""
    return _encoder.encode(hello)


def decode_hello(body: bytes) -> Hello:
    """Raises MalformedMessage with the path of what is wrong."""
    try:
        hello = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"handshake payload: {error}") from error
    if not 1 <= len(hello.ranks) <= MAX_RANKS:
        raise MalformedMessage(f"handshake payload: {len(hello.ranks)} ranks; between 1 and {MAX_RANKS} are allowed")
    return hello
