"""The handshake message: a frozen envelope around an opaque payload (R8).

The envelope's schema never changes, whatever the protocol version: a peer of any release can read who the sender is,
which versions it speaks, and every fact. The payload (wire.hello) is decoded only after the facts were compared and a
version was agreed on. An envelope decodes into bounded plain values; the handshake room decides what they mean.

On the wire it is the four bytes of MAGIC, followed by one msgpack map with the names below. Unknown names are skipped.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from kvferry.errors import MalformedMessage

__all__ = [
    "MAGIC",
    "MAX_ENVELOPE_FACTS",
    "MAX_REASON_CHARS",
    "Envelope",
    "Kind",
    "WireFact",
    "decode_envelope",
    "encode_envelope",
]

MAGIC = b"KVF\x01"
"""The first bytes of every handshake message. They never change."""

MAX_ENVELOPE_FACTS = 256
MAX_REASON_CHARS = 16384

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Items = Annotated[tuple[_Text | int, ...], msgspec.Meta(max_length=4096)]


class Kind(StrEnum):
    """The kind of a message."""

    ASK = "ask"
    """Asks whether the two engines may pair. The payload is in version `protocol`."""
    ACCEPT = "accept"
    """They may. The payload is in version `protocol`, which both speak from now on."""
    AGAIN = "again"
    """They may, but the payload is in a version that the answerer does not speak: ask again in version `protocol`."""
    REFUSE = "refuse"
    """They may not; `reason` says why. The asker backs off."""
    BUSY = "busy"
    """The answerer has no time; `reason` says why. Nothing was compared: ask again later."""


class WireFact(msgspec.Struct, frozen=True, array_like=True):
    """A fact in a message: its name, its class (always `must match`, `bridged` or `informative`), and its value."""

    name: _Name
    kind: _Name
    value: _Text | int | float | bool | _Items | None


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The envelope. Never add, change or remove a field: changes belong in the payload, with a new protocol version."""

    kind: Kind
    engine: _Id
    incarnation: _Id
    protocol_min: _Version
    protocol_max: _Version
    protocol: _Version
    """The version of the payload; 0 if there is none."""
    digest: Annotated[bytes, msgspec.Meta(max_length=32)]
    """The digest of the facts (handshake.digest); empty if there are no facts (BUSY)."""
    facts: Annotated[tuple[WireFact, ...], msgspec.Meta(max_length=MAX_ENVELOPE_FACTS)]
    payload: bytes = b""
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)] = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    """Returns MAGIC and the encoded envelope."""
    return MAGIC + _encoder.encode(envelope)


def decode_envelope(body: bytes) -> Envelope:
    """Decodes an envelope. Raises MalformedMessage, with the path of what is wrong, for anything else."""
    if body[: len(MAGIC)] != MAGIC:
        raise MalformedMessage(
            f"not a kvferry handshake: the message begins with {bytes(body[:8])!r} and not with {MAGIC!r}. "
            "Is another program connected to the side-channel port?"
        )
    try:
        return _decoder.decode(memoryview(body)[len(MAGIC) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"handshake envelope: {error}") from error
