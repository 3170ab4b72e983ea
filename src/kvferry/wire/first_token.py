"""The first token of the answer, which prefill sampled at the end of the prompt, as part of a hand-off.

In pull mode it goes through the router, in HandoffParams. In push mode decode is already waiting, so it comes with the
final message of the hand-off, as an opaque note.
"""

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.wire.params import HandoffParams

__all__ = ["FirstToken", "decode_first_token", "encode_first_token", "first_token_of"]


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token id, and its log probabilities if the request asked for them: `top` as (token id, log probability)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


_decoder = msgspec.msgpack.Decoder(FirstToken)


def encode_first_token(first: FirstToken) -> bytes:
    """Returns the token as msgpack."""
    return msgspec.msgpack.encode(first)


def decode_first_token(note: bytes) -> FirstToken:
    """Decodes a note. Raises MalformedMessage, as the note comes from a peer."""
    try:
        return _decoder.decode(note)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"first token of a hand-off: {error}") from error


def first_token_of(params: HandoffParams) -> FirstToken | None:
    """Returns the token that the router carried, or None."""
    if params.first_token is None:
        return None
    top = tuple((token, logprob) for token, logprob in params.first_top_logprobs or ())
    return FirstToken(token=params.first_token, logprob=params.first_logprob, top=top)
