"""The messages between a decode rank and a prefill rank during hand-offs (docs/reference/wire-handoff.md).

They are one tagged union in msgpack with named fields. Unknown fields are skipped, and decoding bounds every length and
number. A message that is longer than a transport's limit is sent in fragments. No message holds a point in time, only
the time that remains.

decode -> prefill   Claim, Register, Confirm, Drop, Revoke
prefill -> decode   Ready, Wrote, Fail, Stopped
holder <-> grantor  Renew, RenewAck
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.layout.blocks import BlockTable
from kvferry.wire.prompt_digest import StatedPrompt

__all__ = [
    "MAX_DIGEST_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_ID_CHARS",
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
"""A size that fits into one `Transport.send` with room to spare."""
MAX_MESSAGE_BYTES = 8 << 20
MAX_NOTE_BYTES = 4096
MAX_DIGEST_BYTES = 40 << 10
MAX_REASON_CHARS = 500
MAX_RENEWED = 256
"""The largest number of transfers in one Renew."""

MAX_ID_CHARS = 160
"""The longest transfer id, and the longest name of an engine."""
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Same = Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]
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
    """A BlockTable: its group, the position of its first token, and its block ids."""

    group: Annotated[int, msgspec.Meta(ge=0, lt=64)]
    first_token: _Tokens
    block_ids: _BlockIds


_Tables = Annotated[tuple[WireTable, ...], msgspec.Meta(max_length=64)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True, tag_field="type"):
    to: _Id
    """The incarnation that the message is for. One that restarted under the same address ignores it (I6)."""


class Claim(_Message, frozen=True, kw_only=True, gc=False, tag="claim"):
    """Pull: this decode rank will read `transfer`. It is sent again until it is answered; each one renews the grant."""

    transfer: _Id
    ranks: _Ranks
    """The number of decode ranks that will confirm."""
    start: _Tokens
    stop: _Tokens
    seq: _Seq
    """Returned as Ready.ack: decode counts its lease from when it sent the claim with this number."""
    prompt: StatedPrompt | None = None
    """The prompt that decode asks for; None before protocol version 4."""


class Register(_Message, frozen=True, kw_only=True, gc=False, tag="register"):
    """Push: prefill may write tokens [start, stop) into these blocks as soon as it holds a lease (by Renew)."""

    transfer: _Id
    ranks: _Ranks
    start: _Tokens
    stop: _Tokens
    tables: _Tables
    ttl_s: _Ttl
    prompt: StatedPrompt | None = None
    """The prompt that decode asks for; None before protocol version 4."""


class Confirm(_Message, frozen=True, kw_only=True, gc=False, tag="confirm"):
    """This decode rank has everything that it needed from this prefill rank, and will not read its blocks again."""

    transfer: _Id
    ranks: _Ranks


class Drop(_Message, frozen=True, kw_only=True, gc=False, tag="drop"):
    """Pull: this decode rank gives up; none of its reads is in flight."""

    transfer: _Id
    ranks: _Ranks
    reason: _Reason


class Revoke(_Message, frozen=True, kw_only=True, gc=False, tag="revoke"):
    """Push: prefill must stop writing. It answers Stopped (or Fail with `quiet`) when no write is in flight."""

    transfer: _Id
    ranks: _Ranks
    reason: _Reason


class Ready(_Message, frozen=True, kw_only=True, gc=False, tag="ready"):
    """Pull: grants blocks, and reports progress: [start, stop) is computed and may be read from these blocks."""

    transfer: _Id
    tables: _Tables
    start: _Tokens
    stop: _Tokens
    final: bool
    """True if nothing more will come: then [start, stop) is the exact range of the hand-off."""
    ttl_s: _Ttl
    ack: _Seq = 0
    digest: _Digest = b""
    note: _Note = b""
    same_tokens: _Same = -1
    """How many leading tokens of the two prompts are the same; `stop` is not above it. -1: they were not compared."""
    same_prompt: bool = False
    """True if the prompts are the same to the end of both: only then is `note` for decode's prompt."""


class Wrote(_Message, frozen=True, kw_only=True, gc=False, tag="wrote"):
    """Push: part `part` is in decode's memory. It is attached to the part's write, so it comes after the last byte."""

    transfer: _Id
    part: _Count
    parts: _Count = 0
    """In the last part, the number of parts; else 0. Decode is done when it has as many messages."""
    start: _Tokens = 0
    stop: _Tokens = 0
    """The tokens [start, stop) of this part; in the last part, the exact range of the hand-off."""
    owes: bool = True
    """False if this prefill rank has nothing that this decode rank needs; then there is no range."""
    num_bytes: _Count = 0
    num_runs: _Count = 0
    digest: _Digest = b""
    note: _Note = b""
    same_tokens: _Same = -1
    """As in Ready."""
    same_prompt: bool = False


class Fail(_Message, frozen=True, kw_only=True, gc=False, tag="fail"):
    """Prefill cannot hand over: the transfer is unknown, ended or withdrawn, or a write failed."""

    transfer: _Id
    reason: _Reason
    quiet: bool
    """True if no write of prefill is in flight and none will start; if False, Stopped follows."""


class Stopped(_Message, frozen=True, kw_only=True, gc=False, tag="stopped"):
    """Push: no write of prefill is in flight and none will start, so decode may reuse the blocks."""

    transfer: _Id


class Renew(_Message, frozen=True, kw_only=True, gc=False, tag="renew"):
    """The holder still wants these grants. One message per peer rank renews all of them."""

    seq: _Seq
    from_decode: bool
    transfers: _Renewed
    bell_port: _BellPort = 0
    """The sender's doorbell: after a message to the sender, send `bell` as a datagram to this port, at the host of the
    sender's side channel. 0 means that there is none."""
    bell: _Bell = b""


class RenewAck(_Message, frozen=True, kw_only=True, gc=False, tag="renewed"):
    """All transfers of the Renew with this `seq` are extended, except the ended ones."""

    seq: _Seq
    to_decode: bool
    ended: _Renewed = ()
    bell_port: _BellPort = 0
    """The sender's doorbell, as in Renew."""
    bell: _Bell = b""


class Fragment(_Message, frozen=True, kw_only=True, gc=False, tag="part"):
    """A slice of a message that is too long for one frame. Slices come in order; a gap drops the message."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    count: Annotated[int, msgspec.Meta(ge=2, le=4096)]
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME_BYTES)]


Message: TypeAlias = Claim | Register | Confirm | Drop | Revoke | Ready | Wrote | Fail | Stopped | Renew | RenewAck
_Frame: TypeAlias = Message | Fragment

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Frame] = msgspec.msgpack.Decoder(_Frame)


def to_wire(tables: Sequence[BlockTable]) -> tuple[WireTable, ...]:
    """Returns block tables as they are sent."""
    return tuple([WireTable(t.group, t.first_token, tuple(t.block_ids)) for t in tables])


def from_wire(tables: Sequence[WireTable]) -> tuple[BlockTable, ...]:
    """Returns a peer's block tables. Their ids are bounded, but only the planner checks them against the layout."""
    return tuple([BlockTable(t.group, t.first_token, t.block_ids) for t in tables])


def with_size(message: Wrote, num_bytes: int, num_runs: int) -> Wrote:
    """Returns the message with the size of its part, which is known only after planning."""
    return msgspec.structs.replace(message, num_bytes=num_bytes, num_runs=num_runs)


def with_bell(message: Renew | RenewAck, port: int, bell: bytes) -> Renew | RenewAck:
    """Returns the message with its sender's doorbell."""
    return msgspec.structs.replace(message, bell_port=port, bell=bell)


def readdressed(message: Message, to: str) -> Message:
    """Returns the same message for another incarnation; tests forge messages with it."""
    return msgspec.structs.replace(message, to=to)


def encode_message(message: _Frame) -> bytes:
    """Returns a frame as msgpack."""
    return _encoder.encode(message)


def decode_message(body: bytes) -> _Frame:
    """Decodes one frame from a peer. Raises MalformedMessage with the path of what is wrong."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"hand-off message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        message = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"hand-off message: {error}") from error
    if isinstance(message, Claim | Register | Ready | Wrote) and message.start > message.stop:
        raise MalformedMessage(
            f"hand-off message: tokens [{message.start}, {message.stop}) of {message.transfer!r}; start must not be "
            "above stop"
        )
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
    """Yields the message in pieces that a transport accepts, which is nearly always one."""
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
    """Joins one peer's fragments. It holds one unfinished message of at most MAX_MESSAGE_BYTES."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._count = 0
        self._num_bytes = 0

    def add(self, fragment: Fragment) -> Message | None:
        """Adds a fragment, and returns the message after its last one. Raises MalformedMessage for a gap or excess."""
        if fragment.index == 0:
            self._pieces, self._count, self._num_bytes = [], fragment.count, 0
        expected = len(self._pieces)
        self._num_bytes += len(fragment.body)
        if fragment.index != expected or fragment.count != self._count or self._num_bytes > MAX_MESSAGE_BYTES:
            held, self._pieces, self._count = self._num_bytes, [], 0
            raise MalformedMessage(
                f"hand-off message: fragment {fragment.index} of {fragment.count}; expected fragment {expected}, "
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
