"""The versions of the protocol (R9, R11).

Raise PROTOCOL_MAX, with a line of history, if you change the wire schema (payload or hand-off messages), the meaning of
a parameter, the transfer protocol, the cache layout, or how blocks are organised. The envelope never changes.
"""

from dataclasses import dataclass

from kvferry.errors import ConfigError

__all__ = [
    "BINDING",
    "DOORBELL",
    "FIND",
    "HISTORY",
    "PROTOCOL_MAX",
    "PROTOCOL_MIN",
    "ProtocolRange",
    "common_protocol",
    "protocol_range",
]

HISTORY: dict[int, str] = {
    1: "payload: ranks are maps with a transport name each; there are no capabilities",
    2: "payload: ranks are arrays and the transport is named once; capabilities and the side-channel address are added",
    3: "hand-off messages: renewals and their acknowledgements may name their sender's doorbell",
    4: "hand-off messages: claims and registrations state the prompt, and grants and writes say how far it is the same",
    5: "side channel: Find and Found, by which an engine asks another for KV that it holds; engines of one role pair",
}
"""Maps each version to what it changed, one line per version. The meaning of a line never changes."""

DOORBELL = 3
"""The first version in which renewals name doorbells."""

BINDING = 4
"""The first version in which hand-offs are bound to their tokens (R51)."""

FIND = 5
"""The first version in which engines ask each other for KV that they hold (R39)."""

PROTOCOL_MIN = min(HISTORY)
"""The oldest version that this code still speaks."""

PROTOCOL_MAX = max(HISTORY)
"""The newest version that this code speaks."""


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The versions that one side speaks, both ends included. Raises ConfigError for a version that we cannot speak."""

    oldest: int = PROTOCOL_MIN
    newest: int = PROTOCOL_MAX

    def __post_init__(self) -> None:
        if not PROTOCOL_MIN <= self.oldest <= self.newest <= PROTOCOL_MAX:
            raise ConfigError(
                f"protocol versions {self.oldest!r} to {self.newest!r} were requested; this kvferry speaks "
                f"{PROTOCOL_MIN} to {PROTOCOL_MAX}: set --protocol-max (side_channel.protocol_max) to one of these, or "
                "leave it out"
            )


def protocol_range(newest: int | None) -> ProtocolRange:
    """Returns all versions that we speak, up to `newest` (side_channel.protocol_max), or all if that is None."""
    return ProtocolRange() if newest is None else ProtocolRange(min(PROTOCOL_MIN, newest), newest)


def common_protocol(ours: ProtocolRange, their_oldest: int, their_newest: int) -> int | None:
    """Returns the highest version that both speak, or None. The peer's numbers may be anything."""
    highest = min(ours.newest, their_newest)
    return highest if highest >= max(ours.oldest, their_oldest) else None
