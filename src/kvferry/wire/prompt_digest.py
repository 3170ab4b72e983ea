"""Which tokens a hand-off is for (R51): digests of prefixes of a prompt, and how much two prompts have in common.

The digest of n tokens is BLAKE2b with 16 bytes over their ids as little-endian 32-bit integers. The salt, if there is
one, is an input of the hash, so that equal tokens under different salts have no prefix in common. A digest of n tokens
says nothing about what follows, so it depends on neither engine's block size, and two sides can compare any prefix
that both can name.

Decode states digests of its prompt (StatedPrompt). Prefill has its own tokens, so it can compute the digest of any
prefix to compare with.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

__all__ = ["DIGEST_BYTES", "MAX_LINKS_BYTES", "MAX_MARKS", "UNIT_TOKENS", "Agreement", "Prompt", "StatedPrompt"]

UNIT_TOKENS = 64
"""The number of tokens between two links."""
DIGEST_BYTES = 16
MAX_LINKS_BYTES = 1 << 20
MAX_MARKS = 4
_TOKEN_BYTES = 4
_PERSON = b"kvferry prompt 1"

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Unit = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Links = Annotated[bytes, msgspec.Meta(max_length=MAX_LINKS_BYTES)]


class StatedPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What decode says of its prompt in a Claim or a Register. Numbers and lengths are bounded; the rest is hostile."""

    num_tokens: _Count
    marks: Annotated[tuple[tuple[_Count, _Digest], ...], msgspec.Meta(max_length=MAX_MARKS)]
    """Numbers of leading tokens, with the digest of each: the whole prompt, and the length of prefill's if known."""
    unit_tokens: _Unit = UNIT_TOKENS
    links: _Links = b""
    """The digests of the first `unit_tokens`, of twice as many, and so on, one after the other. Left out when the
    parameters of the request already say that prefill's prompt is the same."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two prompts are the same."""

    num_tokens: int
    """This many leading tokens are the same."""
    whole: bool
    """The prompts are the same, to the end of both."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one prompt, packed, and the digest of all of them."""

    packed: bytes
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, token_ids: Sequence[int], salt: str = "") -> "Prompt":
        """Packs the tokens. `salt` is everything else that their KV depends on; "" for nothing."""
        packed = _pack(token_ids)
        salted = hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest() if salt else b""
        return cls(packed, salted, _hash(packed, salted))

    @property
    def num_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.packed) // _TOKEN_BYTES

    def prefix_digest(self, num_tokens: int) -> bytes:
        """Returns the digest of the first `num_tokens`."""
        return _hash(memoryview(self.packed)[: num_tokens * _TOKEN_BYTES], self.salt)

    def stated(self, others_tokens: int | None = None, *, links: bool = True, unit: int = UNIT_TOKENS) -> StatedPrompt:
        """Returns what decode says of the prompt. `others_tokens` is the length of prefill's prompt, if it is known."""
        marks = [(self.num_tokens, self.digest)]
        if others_tokens is not None and 0 < others_tokens < self.num_tokens:
            marks.append((others_tokens, self.prefix_digest(others_tokens)))
        return StatedPrompt(self.num_tokens, tuple(marks), unit, self._links(unit) if links else b"")

    def _links(self, unit: int) -> bytes:
        step = unit * _TOKEN_BYTES
        count = min(len(self.packed) // step, MAX_LINKS_BYTES // DIGEST_BYTES)
        packed, state = memoryview(self.packed), _state(b"", self.salt)
        links = []
        for start in range(0, count * step, step):
            state.update(packed[start : start + step])
            links.append(state.copy().digest())
        return b"".join(links)

    def agreement(self, stated: StatedPrompt) -> Agreement:
        """Returns how far this prompt is the one that `stated` describes.

        The number is exact if one of the prompts begins with all of the other and its length is among the marks; else
        it is rounded down to a multiple of `unit_tokens`. Costs a few hashes over the prompt, whatever a peer sends.
        """
        if (self.num_tokens, self.digest) in stated.marks:
            return Agreement(self.num_tokens, stated.num_tokens == self.num_tokens)
        equal = [
            num_tokens
            for num_tokens, digest in stated.marks
            if num_tokens < self.num_tokens and self.prefix_digest(num_tokens) == digest
        ]
        return Agreement(max(self._linked_tokens(stated), *equal, 0), whole=False)

    def _linked_tokens(self, stated: StatedPrompt) -> int:
        """Returns the longest prefix that the links prove: they are equal up to there, and differ from there on."""
        unit = stated.unit_tokens
        low, high = 0, min(len(stated.links) // DIGEST_BYTES, self.num_tokens // unit)
        while low < high:
            middle = (low + high + 1) // 2
            link = stated.links[(middle - 1) * DIGEST_BYTES : middle * DIGEST_BYTES]
            if self.prefix_digest(middle * unit) == link:
                low = middle
            else:
                high = middle - 1
        return low * unit


def _pack(token_ids: Sequence[int]) -> bytes:
    form = f"<{len(token_ids)}i"  # a third of the time that array.array takes
    try:
        return struct.pack(form, *token_ids)
    except struct.error:  # no tokenizer has such ids; an engine that lets them pass must not fail here
        return struct.pack(form, *(token & 0x7FFFFFFF for token in token_ids))


def _state(body: bytes | memoryview, salt: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES, salt=salt, person=_PERSON)


def _hash(body: bytes | memoryview, salt: bytes) -> bytes:
    return _state(body, salt).digest()
