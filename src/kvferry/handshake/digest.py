"""The compatibility digest (R1): SHA-256 over a canonical encoding of the facts that must match.

Each side sends the digest of its own facts, and the other side recomputes it from the facts that it received: this
detects a message that was changed on the way. The digests of two sides are not compared. If both are equally strict and
have equal digests, no fact is refused between them, apart from their roles. The reverse does not hold: a fact that one
role may lack (FactSpec.may_lack) makes the digests differ, although the pair fits.
"""

import hashlib

from kvferry.handshake.fact import FactKind
from kvferry.handshake.facts import Facts
from kvferry.handshake.values import canonical

__all__ = ["DIGEST_BYTES", "digest", "digest_text"]

DIGEST_BYTES = 32


def digest_text(facts: Facts, *, strict: bool = False) -> str:
    """Returns the text that is hashed: one line `name=value` per fact that must match, sorted by name.

    Facts that are not reported have no line. The text depends only on the facts as reported, classes included, so a
    peer of another release computes the same. With `strict`, every factor of R2, R3, R4 and R13 counts, whatever its
    class.
    """
    ordered = sorted(facts.strict() if strict else facts, key=lambda fact: fact.name)
    return "".join(
        f"{canonical(fact.name)}={canonical(fact.value)}\n" for fact in ordered if fact.kind is FactKind.MUST_MATCH
    )


def digest(facts: Facts, *, strict: bool = False) -> bytes:
    """Returns the 32 bytes of the digest."""
    return hashlib.sha256(digest_text(facts, strict=strict).encode()).digest()
