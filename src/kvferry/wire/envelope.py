"""The handshake message: a frozen envelope around an opaque payload (R8).

The envelope's schema never changes, whatever the protocol's version: a peer of any release can read who speaks, which
versions it speaks, and every fact. Only after the facts were compared and a version was agreed on is the payload
decoded (wire.hello). An envelope decodes into bounded plain values; what they mean is decided by handshake.

On the wire: the four bytes of MAGIC, then one msgpack map with the names below. Unknown names are skipped.
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
"""Never changes: with other first bytes it is not a message of ours."""

MAX_ENVELOPE_FACTS = 256
MAX_REASON_CHARS = 16384

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Items = Annotated[tuple[_Text | int, ...], msgspec.Meta(max_length=4096)]


class Kind(StrEnum):
    """What an envelope says."""

    ASK = "ask"
    """May we pair? The payload is in version `protocol`."""
    ACCEPT = "accept"
    """We may. The payload is in version `protocol`, which both speak from now on."""
    AGAIN = "again"
    """We may, but not with a payload of that version: ask again with one of version `protocol`."""
    REFUSE = "refuse"
    """We may not; `reason` says why. The asker backs off."""
    BUSY = "busy"
    """Not now; `reason` says why. Nothing was compared: ask again later."""


class WireFact(msgspec.Struct, frozen=True, array_like=True):
    """A fact as it travels: name, class (`must match`, `bridged` or `informative`, for ever), value."""

    name: _Name
    kind: _Name
    value: _Text | int | float | bool | _Items | None


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen for ever. Never add, change or take away a field: that is what protocol versions are for."""

    kind: Kind
    engine: _Id
    incarnation: _Id
    protocol_min: _Version
    protocol_max: _Version
    protocol: _Version
    """Of the payload; 0 where there is none."""
    digest: Annotated[bytes, msgspec.Meta(max_length=32)]
    """handshake.digest of the facts; empty where no facts are told (BUSY)."""
    facts: Annotated[tuple[WireFact, ...], msgspec.Meta(max_length=MAX_ENVELOPE_FACTS)]
    payload: bytes = b""
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)] = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    """With MAGIC in front."""
    return MAGIC + _encoder.encode(envelope)


def decode_envelope(body: bytes) -> Envelope:
    """Raises MalformedMessage, with the path of what is wrong, for anything that is not an envelope."""
    if body[: len(MAGIC)] != MAGIC:
        raise MalformedMessage(
            f"not a kvferry handshake: it begins with {bytes(body[:8])!r} and should begin with {MAGIC!r}. "
            "Is something else speaking to the side-channel port?"
        )
    try:
        return _decoder.decode(memoryview(body)[len(MAGIC) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"handshake envelope: {error}") from error
