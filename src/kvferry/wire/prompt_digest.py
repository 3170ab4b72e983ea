"""Which tokens a hand-off is for (R51): digests of prefixes of a prompt, and how much two prompts have in common.

The digest of n tokens is the first 16 bytes of a SHA-256 over a fixed text, what else the KV depends on (the salt), and
the ids as little-endian 32-bit integers. Equal tokens under different salts have no prefix in common. A digest of n
tokens says nothing about what follows, so it depends on neither engine's block size, and two sides can compare any
prefix that both can name. SHA-256, because processors compute it themselves: in half the time of BLAKE2b.

Decode states digests of its prompt (StatedPrompt). Prefill has its own tokens, so it can compute the digest of any
prefix to compare with.

A prompt is packed once and hashed once, and an engine may use the packed tokens for its own hashes: at 8,000 tokens
packing takes twice as long as hashing.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

__all__ = [
    "DIGEST_BYTES",
    "MAX_LINKS",
    "MAX_LINKS_BYTES",
    "MAX_MARKS",
    "TOKEN_BYTES",
    "UNIT_TOKENS",
    "Agreement",
    "Prompt",
    "StatedPrompt",
    "pack_tokens",
]

UNIT_TOKENS = 64
"""The least number of tokens between two links. It doubles until there are no more than MAX_LINKS of them."""
MAX_LINKS = 16
DIGEST_BYTES = 16
TOKEN_BYTES = 4
MAX_LINKS_BYTES = 1 << 20
"""A peer may state more links than we do, up to this length."""
MAX_MARKS = 4
_MAX_UNIT = 1 << 20
_START = hashlib.sha256(b"kvferry prompt 1")
_NO_SALT = bytes(DIGEST_BYTES)

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Unit = Annotated[int, msgspec.Meta(ge=1, le=_MAX_UNIT)]
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


@dataclass(slots=True)
class Prompt:
    """The tokens of one prompt, packed, and the digest of all of them, which is computed when it is first needed.

    Threads may share it: two that need the digest at the same time compute the same one.
    """

    packed: bytes
    """The token ids, as `pack_tokens` returns them."""
    salt: bytes = _NO_SALT
    salt_text: str = field(default="", compare=False)
    """The salt itself, for an engine whose block hashes need it."""
    _digest: bytes = field(default=b"", compare=False, repr=False)

    @classmethod
    def of(cls, token_ids: Sequence[int], salt: str = "", packed: bytes = b"") -> "Prompt":
        """Packs the tokens, if the caller has not `packed` them. `salt` is everything else that their KV depends on; ""
        for nothing."""
        salted = hashlib.sha256(salt.encode()).digest()[:DIGEST_BYTES] if salt else _NO_SALT
        return cls(packed or pack_tokens(token_ids), salted, salt)

    @property
    def num_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.packed) // TOKEN_BYTES

    @property
    def digest(self) -> bytes:
        """The digest of the whole prompt."""
        if not self._digest:
            self._digest = self._hash(self.packed)
        return self._digest

    def prefix_digest(self, num_tokens: int) -> bytes:
        """Returns the digest of the first `num_tokens`."""
        return self._hash(memoryview(self.packed)[: num_tokens * TOKEN_BYTES])

    def _hash(self, body: bytes | memoryview) -> bytes:
        state = _START.copy()
        state.update(self.salt)
        state.update(body)
        return state.digest()[:DIGEST_BYTES]

    def stated(self, others_tokens: int | None = None, *, links: bool = True, unit: int | None = None) -> StatedPrompt:
        """Returns what decode says of the prompt. `others_tokens` is the length of prefill's prompt, if it is known.

        `unit` is the number of tokens between two links; None chooses it.
        """
        unit = _unit_for(self.num_tokens) if unit is None else unit
        joined = self._links(unit) if links else b""
        marks = [(self.num_tokens, self.digest)]
        if others_tokens is not None and 0 < others_tokens < self.num_tokens:
            marks.append((others_tokens, self.prefix_digest(others_tokens)))
        return StatedPrompt(self.num_tokens, tuple(marks), unit, joined)

    def _links(self, unit: int) -> bytes:
        """Returns the links, and keeps the digest of the whole prompt, which comes out of the same pass."""
        step = unit * TOKEN_BYTES
        end = min(len(self.packed) // step, MAX_LINKS_BYTES // DIGEST_BYTES) * step
        packed, state = memoryview(self.packed), _START.copy()
        state.update(self.salt)
        links = []
        for start in range(0, end, step):
            state.update(packed[start : start + step])
            links.append(state.copy().digest()[:DIGEST_BYTES])
        state.update(packed[end:])
        self._digest = state.digest()[:DIGEST_BYTES]
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


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Returns token ids as little-endian 32-bit integers."""
    form = struct.Struct(f"<{len(token_ids)}I")  # a third of the time that array or numpy takes, and less than with "i"
    try:
        return form.pack(*token_ids)
    except struct.error:  # no tokenizer has such ids; an engine that lets them pass must not fail here
        return form.pack(*(token & 0x7FFFFFFF for token in token_ids))


def _unit_for(num_tokens: int) -> int:
    unit = UNIT_TOKENS
    while num_tokens // unit > MAX_LINKS and unit < _MAX_UNIT:
        unit *= 2
    return unit
