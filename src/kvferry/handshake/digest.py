"""The compatibility digest (R1): SHA-256 over a canonical encoding of the facts that must match.

Two sides of one strictness have equal digests exactly when no fact between them is refused (roles apart: they
complete each other, and are compared beside it). A property test holds digest and verdict together.
"""

import hashlib

from kvferry.handshake.fact import FactKind
from kvferry.handshake.facts import Facts
from kvferry.handshake.values import canonical

__all__ = ["DIGEST_BYTES", "digest", "digest_text"]

DIGEST_BYTES = 32


def digest_text(facts: Facts, *, strict: bool = False) -> str:
    """What is hashed: a line `name=value` for each fact that must match, by name. What is not told has no line.

    It follows from the facts as they are told, classes included, and from nothing else: a peer of another release
    computes the same. Strict: every factor of R2, R3, R4 and R13 counts too, whatever its class.
    """
    told = sorted(facts.strict() if strict else facts, key=lambda fact: fact.name)
    return "".join(
        f"{canonical(fact.name)}={canonical(fact.value)}\n" for fact in told if fact.kind is FactKind.MUST_MATCH
    )


def digest(facts: Facts, *, strict: bool = False) -> bytes:
    """32 bytes."""
    return hashlib.sha256(digest_text(facts, strict=strict).encode()).digest()
