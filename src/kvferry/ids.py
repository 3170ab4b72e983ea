"""The ids that engines and rooms exchange. Each has a type of its own, so that they cannot be mixed up."""

import secrets
from typing import NewType

__all__ = ["new_incarnation", "peer_name"]


EngineId = NewType("EngineId", str)
"""Names an engine. It is chosen by the operator or made at random, and survives restarts."""

Incarnation = NewType("Incarnation", str)
"""Names one start of an engine. It is random and new at each start. Messages of an old incarnation change nothing."""

RequestId = NewType("RequestId", str)
"""Names a request inside one engine. Between engines, a hand-off is named by its TransferId instead."""

TransferId = NewType("TransferId", str)
"""Names one dispatch of one request from a prefill to a decode engine. A retry gets a new one."""

PeerName = NewType("PeerName", str)
"""Names one rank of one incarnation of one engine in a transport. peer_name() makes it."""


def peer_name(engine: EngineId, incarnation: Incarnation, rank: int) -> PeerName:
    """Returns the name under which a transport knows a rank. It is different after a restart."""
    return PeerName(f"{engine}/{incarnation}/{rank}")


def new_incarnation() -> Incarnation:
    """An incarnation that no other start of any engine has."""
    return Incarnation(secrets.token_hex(8))
