"""The payload of a handshake: what a peer needs to know about an engine and each of its ranks.

It is decoded only after the envelope was accepted (R8), in the version that both sides agreed on (wire.versions). Each
rank's layout stays bytes until wire.layout_codec checks it.

* Version 1 is a map; each rank is a map that names its transport. There are no capabilities.
* Version 2 is a map with other names. The transport is named once, a rank is the array [layout, metadata], and the
  capabilities and the address of the sender's side channel are added.
"""

from typing import Annotated

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.settings import Role
from kvferry.wire.versions import PROTOCOL_MAX

__all__ = ["MAX_RANKS", "Hello", "RankHello", "decode_hello", "encode_hello"]

MAX_RANKS = 4096
_MAX_CAPABILITIES = 64

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Host = Annotated[str, msgspec.Meta(max_length=256)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class RankHello(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its cache layout (wire.layout_codec), its transport, and what that transport needs to connect."""

    layout: bytes
    transport: str
    transport_metadata: bytes


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, with all its ranks in the order of Rank.index."""

    engine: _Id
    incarnation: _Id
    role: Role
    ranks: tuple[RankHello, ...]
    capabilities: tuple[str, ...] = ()
    """The names of what the sender can do but not every release can. What both sides name may be used; unknown names
    are skipped. A version 1 peer names none."""
    host: str = ""
    """The host on which the sender's own side channel listens; "" if it is not reported (version 1)."""
    port: int = 0


class _RankV1(msgspec.Struct, frozen=True, kw_only=True):
    layout: bytes
    transport: _Word
    transport_metadata: bytes


class _HelloV1(msgspec.Struct, frozen=True, kw_only=True):
    engine: _Id
    incarnation: _Id
    role: Role
    ranks: tuple[_RankV1, ...]


class _RankV2(msgspec.Struct, frozen=True, array_like=True):
    layout: bytes
    metadata: bytes


class _HelloV2(msgspec.Struct, frozen=True, kw_only=True):
    engine: _Id
    incarnation: _Id
    role: Role
    transport: _Word
    shards: tuple[_RankV2, ...]
    capabilities: Annotated[tuple[_Word, ...], msgspec.Meta(max_length=_MAX_CAPABILITIES)] = ()
    host: _Host = ""
    port: _Port = 0


_encoder = msgspec.msgpack.Encoder()
_decoder_v1 = msgspec.msgpack.Decoder(_HelloV1)
_decoder_v2 = msgspec.msgpack.Decoder(_HelloV2)


def encode_hello(hello: Hello, protocol: int = PROTOCOL_MAX) -> bytes:
    """Returns the payload as msgpack, in the schema of that protocol version (2 and later ones have the same).

    Version 1 leaves out what its schema cannot express.
    """
    if protocol == 1:
        ranks = tuple(
            _RankV1(layout=rank.layout, transport=rank.transport, transport_metadata=rank.transport_metadata)
            for rank in hello.ranks
        )
        return _encoder.encode(
            _HelloV1(engine=hello.engine, incarnation=hello.incarnation, role=hello.role, ranks=ranks)
        )
    assert 1 < protocol <= PROTOCOL_MAX, "callers negotiate a version that we speak"
    transports = {rank.transport for rank in hello.ranks}
    assert len(transports) == 1, "the ranks of an engine use one transport"
    return _encoder.encode(
        _HelloV2(
            engine=hello.engine,
            incarnation=hello.incarnation,
            role=hello.role,
            transport=transports.pop(),
            shards=tuple(_RankV2(rank.layout, rank.transport_metadata) for rank in hello.ranks),
            capabilities=hello.capabilities,
            host=hello.host,
            port=hello.port,
        )
    )


def decode_hello(body: bytes, protocol: int = PROTOCOL_MAX) -> Hello:
    """Decodes a payload of that protocol version. Raises MalformedMessage with the path of what is wrong."""
    assert 1 <= protocol <= PROTOCOL_MAX, "callers negotiate a version that we speak"
    try:
        hello = _from_v1(_decoder_v1.decode(body)) if protocol == 1 else _from_v2(_decoder_v2.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"handshake payload, version {protocol}: {error}") from error
    if not 1 <= len(hello.ranks) <= MAX_RANKS:
        raise MalformedMessage(f"handshake payload: {len(hello.ranks)} ranks; between 1 and {MAX_RANKS} are allowed")
    if len({rank.transport for rank in hello.ranks}) != 1:
        raise MalformedMessage("handshake payload: its ranks use several transports; they must use the same one")
    return hello


def _from_v1(payload: _HelloV1) -> Hello:
    ranks = tuple(
        RankHello(layout=rank.layout, transport=rank.transport, transport_metadata=rank.transport_metadata)
        for rank in payload.ranks
    )
    return Hello(engine=payload.engine, incarnation=payload.incarnation, role=payload.role, ranks=ranks)


def _from_v2(payload: _HelloV2) -> Hello:
    ranks = tuple(
        RankHello(layout=rank.layout, transport=payload.transport, transport_metadata=rank.metadata)
        for rank in payload.shards
    )
    return Hello(
        engine=payload.engine,
        incarnation=payload.incarnation,
        role=payload.role,
        ranks=ranks,
        capabilities=payload.capabilities,
        host=payload.host,
        port=payload.port,
    )
