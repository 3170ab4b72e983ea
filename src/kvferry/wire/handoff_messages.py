"""Messages between a decode rank and a prefill rank during hand-offs. The page is docs/reference/wire-handoff.md.

One tagged union in msgpack, named fields, unknown fields skipped, every length and number bounded while decoding.
Messages longer than a transport's limit travel as fragments. No message holds a time: what is sent is what remains.

decode -> prefill   Claim, Register, Confirm, Drop, Revoke
prefill -> decode   Ready, Wrote, Fail, Stopped
holder <-> grantor  Renew, RenewAck
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable

__all__ = [
    "MAX_DIGEST_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_NOTE_BYTES",
    "MAX_REASON_CHARS",
    "MAX_RENEWED",
    "Claim",
    "Confirm",
    "Drop",
    "Fail",
    "Fragment",
    "Message",
    "Ready",
    "Reassembly",
    "Register",
    "Renew",
    "RenewAck",
    "Revoke",
    "Stopped",
    "WireTable",
    "Wrote",
    "decode_message",
    "encode_message",
    "frames",
    "from_wire",
    "readdressed",
    "to_wire",
    "with_bell",
    "with_size",
]

MAX_FRAME_BYTES = 60 << 10
"""What fits into one `Transport.send` with room to spare."""
MAX_MESSAGE_BYTES = 8 << 20
MAX_NOTE_BYTES = 4096
MAX_DIGEST_BYTES = 40 << 10
MAX_REASON_CHARS = 500
MAX_RENEWED = 256
"""Transfers in one Renew."""

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=160)]
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_Seq = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
_Ttl = Annotated[float, msgspec.Meta(gt=0, le=86400.0)]
_Note = Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE_BYTES)]
_Digest = Annotated[bytes, msgspec.Meta(max_length=MAX_DIGEST_BYTES)]
_BlockIds = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...], msgspec.Meta(max_length=1 << 20)]
_BellPort = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Bell = Annotated[bytes, msgspec.Meta(max_length=16)]
_Renewed = Annotated[tuple[_Id, ...], msgspec.Meta(max_length=MAX_RENEWED)]


class WireTable(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A BlockTable: group, position of the first token, block ids."""

    group: Annotated[int, msgspec.Meta(ge=0, lt=64)]
    first_token: _Tokens
    block_ids: _BlockIds


_Tables = Annotated[tuple[WireTable, ...], msgspec.Meta(max_length=64)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True, tag_field="type"):
    to: _Id
    """The incarnation that is meant: one that restarted under the same address ignores the message (I6)."""


class Claim(_Message, frozen=True, kw_only=True, gc=False, tag="claim"):
    """Pull: this decode rank will read `transfer`. Sent again until it is answered; each one renews the grant."""

    transfer: _Id
    ranks: _Ranks
    """How many decode ranks will confirm."""
    start: _Tokens
    stop: _Tokens
    seq: _Seq
    """Echoed as Ready.ack: decode counts its lease from when it sent this claim."""


class Register(_Message, frozen=True, kw_only=True, gc=False, tag="register"):
    """Push: prefill may write tokens [start, stop) into these blocks, once it holds a lease (by Renew)."""

    transfer: _Id
    ranks: _Ranks
    start: _Tokens
    stop: _Tokens
    tables: _Tables
    ttl_s: _Ttl


class Confirm(_Message, frozen=True, kw_only=True, gc=False, tag="confirm"):
    """This decode rank has all that it wanted of this prefill rank and will touch nothing of it any more."""

    transfer: _Id
    ranks: _Ranks


class Drop(_Message, frozen=True, kw_only=True, gc=False, tag="drop"):
    """Pull: this decode rank gives up; none of its reads is in flight."""

    transfer: _Id
    ranks: _Ranks
    reason: _Reason


class Revoke(_Message, frozen=True, kw_only=True, gc=False, tag="revoke"):
    """Push: stop writing. Answered by Stopped (or Fail with `quiet`) when no write is in flight."""

    transfer: _Id
    ranks: _Ranks
    reason: _Reason


class Ready(_Message, frozen=True, kw_only=True, gc=False, tag="ready"):
    """Pull: the grant, and each step of progress: [start, stop) is computed and may be read from these blocks."""

    transfer: _Id
    tables: _Tables
    start: _Tokens
    stop: _Tokens
    final: bool
    """Nothing more will come: [start, stop) is the exact range."""
    ttl_s: _Ttl
    ack: _Seq = 0
    digest: _Digest = b""
    note: _Note = b""


class Wrote(_Message, frozen=True, kw_only=True, gc=False, tag="wrote"):
    """Push: part `part` is in your memory. Attached to the part's write, so that it comes after its last byte."""

    transfer: _Id
    part: _Count
    parts: _Count = 0
    """On the last part: how many parts there are. Decode is done when it has as many messages."""
    start: _Tokens = 0
    stop: _Tokens = 0
    """Not the last part: the tokens it holds. The last part: prefill's exact range."""
    owes: bool = True
    """False: this prefill rank has nothing that this decode rank needs; no range is stated."""
    num_bytes: _Count = 0
    num_runs: _Count = 0
    digest: _Digest = b""
    note: _Note = b""


class Fail(_Message, frozen=True, kw_only=True, gc=False, tag="fail"):
    """Prefill cannot hand over: unknown, ended, withdrawn, or a write failed."""

    transfer: _Id
    reason: _Reason
    quiet: bool
    """No write of ours is in flight and none will start. False: Stopped follows."""


class Stopped(_Message, frozen=True, kw_only=True, gc=False, tag="stopped"):
    """Push: no write of ours is in flight, none will start: the blocks are yours."""

    transfer: _Id


class Renew(_Message, frozen=True, kw_only=True, gc=False, tag="renew"):
    """The holder still wants these grants. One a peer rank, however many grants."""

    seq: _Seq
    from_decode: bool
    transfers: _Renewed
    bell_port: _BellPort = 0
    """Where to send `bell` as a datagram when you have sent a message, at the host of our side channel; 0: nowhere."""
    bell: _Bell = b""


class RenewAck(_Message, frozen=True, kw_only=True, gc=False, tag="renewed"):
    """All transfers of that Renew are extended, but for the ended ones."""

    seq: _Seq
    to_decode: bool
    ended: _Renewed = ()
    bell_port: _BellPort = 0
    """See Renew."""
    bell: _Bell = b""


class Fragment(_Message, frozen=True, kw_only=True, gc=False, tag="part"):
    """A slice of a message that is too long for one frame. In order; a gap drops the message."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    count: Annotated[int, msgspec.Meta(ge=2, le=4096)]
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME_BYTES)]


Message: TypeAlias = Claim | Register | Confirm | Drop | Revoke | Ready | Wrote | Fail | Stopped | Renew | RenewAck
_Frame: TypeAlias = Message | Fragment

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Frame] = msgspec.msgpack.Decoder(_Frame)


def to_wire(tables: Sequence[BlockTable]) -> tuple[WireTable, ...]:
    """Block tables as they travel."""
    return tuple([WireTable(t.group, t.first_token, tuple(t.block_ids)) for t in tables])


def from_wire(tables: Sequence[WireTable]) -> tuple[BlockTable, ...]:
    """The tables of a peer. Ids are bounded, but not yet compared with the peer's layout: the planner does that."""
    return tuple([BlockTable(t.group, t.first_token, t.block_ids) for t in tables])


def with_size(message: Wrote, num_bytes: int, num_runs: int) -> Wrote:
    """The same, with what the part took; known only when it was planned."""
    return msgspec.structs.replace(message, num_bytes=num_bytes, num_runs=num_runs)


def with_bell(message: Renew | RenewAck, port: int, bell: bytes) -> Renew | RenewAck:
    """The same, with where its sender can be rung."""
    return msgspec.structs.replace(message, bell_port=port, bell=bell)


def readdressed(message: Message, to: str) -> Message:
    """The same message to another incarnation: for tests that forge."""
    return msgspec.structs.replace(message, to=to)


def encode_message(message: _Frame) -> bytes:
    """As msgpack."""
    return _encoder.encode(message)


def decode_message(body: bytes) -> _Frame:
    """One frame from a peer. Raises MalformedMessage with the path of what is wrong."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"hand-off message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        message = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"hand-off message: {error}") from error
    if isinstance(message, Claim | Register | Ready | Wrote) and message.start > message.stop:
        raise MalformedMessage(f"hand-off message: tokens [{message.start}, {message.stop}) of {message.transfer!r}")
    if isinstance(message, Register | Ready):
        groups = [table.group for table in message.tables]
        if len(set(groups)) != len(groups):
            raise MalformedMessage(f"hand-off message: two block tables for one group of {message.transfer!r}")
    if isinstance(message, Wrote) and message.parts and message.part >= message.parts:
        raise MalformedMessage(f"hand-off message: part {message.part} of {message.parts} of {message.transfer!r}")
    if isinstance(message, Fragment) and message.index >= message.count:
        raise MalformedMessage(f"hand-off message: fragment {message.index} of {message.count}")
    return message


def frames(message: Message) -> Iterator[bytes]:
    """The message in pieces that a transport takes; nearly always one."""
    body = _encoder.encode(message)
    if len(body) <= MAX_FRAME_BYTES:
        yield body
        return
    size = MAX_FRAME_BYTES - 256
    count = -(-len(body) // size)
    for index in range(count):
        piece = body[index * size : (index + 1) * size]
        yield _encoder.encode(Fragment(to=message.to, index=index, count=count, body=piece))


class Reassembly:
    """Joins one peer's fragments. Holds one unfinished message of at most MAX_MESSAGE_BYTES."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._count = 0
        self._num_bytes = 0

    def add(self, fragment: Fragment) -> Message | None:
        """The whole message after its last fragment. Raises MalformedMessage for a gap or a message too long."""
        if fragment.index == 0:
            self._pieces, self._count, self._num_bytes = [], fragment.count, 0
        expected = len(self._pieces)
        self._num_bytes += len(fragment.body)
        if fragment.index != expected or fragment.count != self._count or self._num_bytes > MAX_MESSAGE_BYTES:
            held, self._pieces, self._count = self._num_bytes, [], 0
            raise MalformedMessage(
                f"hand-off message: fragment {fragment.index} of {fragment.count} where {expected} was next, "
                f"with {held} bytes so far"
            )
        self._pieces.append(fragment.body)
        if len(self._pieces) < self._count:
            return None
        body, self._pieces, self._count = b"".join(self._pieces), [], 0
        message = decode_message(body)
        if isinstance(message, Fragment):
            raise MalformedMessage("hand-off message: a fragment of a fragment")
        return message
