"""The names of things that cross a border, each its own type, so that they cannot be mixed up."""

import secrets
from typing import NewType

__all__ = ["new_incarnation", "peer_name"]


EngineId = NewType("EngineId", str)
"""Which engine: stable over restarts, chosen by the operator or made at random."""

Incarnation = NewType("Incarnation", str)
"""Which start of that engine: new at each start, random. Messages of an old incarnation change nothing."""

RequestId = NewType("RequestId", str)
"""One request inside one engine. Two engines name the same hand-off by the TransferId, not by this."""

TransferId = NewType("TransferId", str)
"""One dispatch of one request from a prefill to a decode engine. A retry has a new one."""

PeerName = NewType("PeerName", str)
"""One rank of one incarnation of one engine, as transports name it: see peer_name()."""


def peer_name(engine: EngineId, incarnation: Incarnation, rank: int) -> PeerName:
    """The name under which a transport knows one rank; it differs after a restart."""
    return PeerName(f"{engine}/{incarnation}/{rank}")


def new_incarnation() -> Incarnation:
    """An incarnation that no other start of any engine has."""
    return Incarnation(secrets.token_hex(8))
