"""Find and Found: an engine asks another which part of a prompt's KV it holds (R39). On the side channel.

On the wire a message is the four bytes of MAGIC, followed by one msgpack map. Unknown names are skipped. Only engines
that have accepted each other, in protocol version FIND or later, ask or are answered. The grant that a Found announces
is an ordinary one, under the transfer id of the question.
"""

from typing import Annotated, TypeVar

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.wire.handoff_messages import MAX_ID_CHARS, MAX_REASON_CHARS
from kvferry.wire.prompt_digest import TOKEN_BYTES

__all__ = ["MAGIC", "MAX_FIND_TOKENS", "Find", "Found", "decode_find", "decode_found", "encode_find"]

MAGIC = b"KVQ\x01"
MAX_FIND_TOKENS = 1 << 20
_MAX_SALT_CHARS = 16384

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_FIND_TOKENS)]


class Find(msgspec.Struct, frozen=True, kw_only=True, tag="find", tag_field="type"):
    """How many of these tokens do you hold, from the first one on, and will you keep them for me?"""

    to: _Name
    """The incarnation that is asked. One that restarted under the same address holds nothing."""
    engine: _Name
    incarnation: _Name
    """Who asks."""
    transfer: _Id
    """The id of the grant that is asked for. The asker makes it, and no other grant has it."""
    packed: Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES * MAX_FIND_TOKENS)]
    """The token ids [0, n), as little-endian 32-bit integers."""
    salt: Annotated[str, msgspec.Meta(max_length=_MAX_SALT_CHARS)] = ""
    more_than: _Tokens = 0
    """The asker has as many itself: a grant of no more than these is of no use."""


class Found(msgspec.Struct, frozen=True, kw_only=True, tag="found", tag_field="type"):
    """The answer."""

    transfer: _Id
    num_tokens: _Tokens = 0
    """[0, num_tokens) is granted to the asker, under `transfer`, until the lease ends. 0: nothing is."""
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)] = ""
    """Why nothing is granted."""

    @classmethod
    def nothing(cls, transfer: str, reason: str) -> "Found":
        """Returns the answer of an engine that grants nothing."""
        return cls(transfer=transfer, reason=reason[:MAX_REASON_CHARS])


_Message = TypeVar("_Message", Find, Found)
_encoder = msgspec.msgpack.Encoder()
_find_decoder = msgspec.msgpack.Decoder(Find)
_found_decoder = msgspec.msgpack.Decoder(Found)


def encode_find(message: Find | Found) -> bytes:
    """Returns MAGIC and the message."""
    return MAGIC + _encoder.encode(message)


def decode_find(body: bytes) -> Find:
    """Decodes a question. Raises MalformedMessage, with the path of what is wrong."""
    find = _decode(body, _find_decoder)
    if len(find.packed) % TOKEN_BYTES or not find.packed:
        raise MalformedMessage(
            f"find: {len(find.packed)} bytes of token ids; {TOKEN_BYTES} per token, and at least one"
        )
    return find


def decode_found(body: bytes) -> Found:
    """Decodes an answer. Raises MalformedMessage, with the path of what is wrong."""
    return _decode(body, _found_decoder)


def _decode(body: bytes, decoder: "msgspec.msgpack.Decoder[_Message]") -> _Message:
    if body[: len(MAGIC)] != MAGIC:
        raise MalformedMessage(f"find: the message begins with {bytes(body[:8])!r} and not with {MAGIC!r}")
    try:
        return decoder.decode(memoryview(body)[len(MAGIC) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"find: {error}") from error
