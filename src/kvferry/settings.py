"""Every setting of the hand-off, one frozen class per part; the docs page is made from these classes.

Defaults live here and nowhere else. A value out of range raises ConfigError with the name, the value and the range.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.errors import ConfigError

__all__ = [
    "FailurePolicy",
    "FerrySettings",
    "LeaseSettings",
    "Role",
    "SideChannelSettings",
    "TransferMode",
    "TransferSettings",
    "Verify",
]


class Role(StrEnum):
    """What an engine does for others."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class TransferMode(StrEnum):
    """Who moves the bytes: the reader (pull) or the owner (push). R12."""

    PULL = "pull"
    PUSH = "push"


class FailurePolicy(StrEnum):
    """What decode does with a request whose KV did not arrive. R29."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class Verify(StrEnum):
    """How much of the KV that landed is compared with what prefill had, by digest."""

    ALL = "all"
    SAMPLE = "sample"
    OFF = "off"


def _check(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be between {low:g} and {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """How long a grant on blocks lives without a sign of life from the peer. R25, R28."""

    ttl_s: float = 30.0
    """A grant ends this long after the last sign of life from its holder."""

    renew_every_s: float = 5.0
    """How often a holder says that it still wants its grants; one message a peer, however many grants."""

    drift: float = 0.01
    """How much faster or slower a peer's clock may run than ours, as a fraction; holders count that much less."""

    quarantine_s: float = 10.0
    """How long blocks that a vanished peer may still write to are kept from everyone before they are reclaimed."""

    standstill_s: float = 120.0
    """The same for a writer that does not answer and is not known to be dead: over shared memory nothing stops a write
    that it had begun when it was stopped, should it be woken. It ends as soon as the writer answers, or is found
    dead."""

    def __post_init__(self) -> None:
        _check("lease.ttl_s", self.ttl_s, 0.01)
        _check("lease.drift", self.drift, 0.0, 0.2)
        _check("lease.quarantine_s", self.quarantine_s, 0.0)
        _check("lease.standstill_s", self.standstill_s, 0.0)
        if not 0 < self.renew_every_s < self.ttl_s:
            raise ConfigError(
                f"lease.renew_every_s={self.renew_every_s!r} must be above 0 and below lease.ttl_s={self.ttl_s!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """How bytes move."""

    mode: TransferMode = TransferMode.PULL
    """`pull`: decode reads. `push`: prefill writes. Both sides must say the same. R13."""

    transport: str = "nixl"
    """The name of the transport: `nixl`, or `memory` within one process."""

    deadline_s: float = 60.0
    """A hand-off that has not ended this long after decode began it is failed, whatever it waits for."""

    on_failure: FailurePolicy = FailurePolicy.RECOMPUTE
    """`recompute`: decode computes the prompt itself. `fail`: the client gets an error."""

    verify: Verify = Verify.SAMPLE
    """Compare a digest of `all` bytes that landed, of a small `sample`, or nothing (`off`)."""

    progress: bool = True
    """Prefill offers each chunk as soon as it is computed; off: only the whole prompt, when it is done."""

    first_token: bool = True
    """Prefill hands its first token over too; off: decode computes the prompt's last token again to choose it."""

    staging_bytes: int = 64 << 20
    """Registered memory for packing short runs into one long one; 0 turns staging off."""

    def __post_init__(self) -> None:
        _check("transfer.deadline_s", self.deadline_s, 0.01)
        _check("transfer.staging_bytes", self.staging_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannelSettings:
    """Where peers shake hands."""

    host: str = "127.0.0.1"
    """The address to listen on and to advertise. Any but loopback needs a key."""

    port: int = 0
    """The port to listen on; 0 takes a free one."""

    key_file: str | None = None
    """The file with the key that all engines share (`kvferry key new`); or set KVFERRY_KEY_FILE."""

    timeout_s: float = 5.0
    """How long to wait for a peer's answer to a handshake."""

    max_message_bytes: int = 16 << 20
    """A longer message is refused before it is read."""

    max_peers: int = 4096
    """More peers than this are refused."""

    max_handshakes_per_s: float = 200.0
    """More handshakes than this in a second, from one address, are refused."""

    protocol_max: int | None = None
    """Speak no newer protocol version than this, as an older release does; None: the newest that there is."""

    def __post_init__(self) -> None:
        _check("side_channel.port", self.port, 0, 65535)
        _check("side_channel.timeout_s", self.timeout_s, 0.01)
        _check("side_channel.max_message_bytes", self.max_message_bytes, 4096)
        _check("side_channel.max_peers", self.max_peers, 1)
        _check("side_channel.max_handshakes_per_s", self.max_handshakes_per_s, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FerrySettings:
    """All of it."""

    transfer: TransferSettings = field(default_factory=TransferSettings)
    """How bytes move."""

    lease: LeaseSettings = field(default_factory=LeaseSettings)
    """How long grants live."""

    side_channel: SideChannelSettings = field(default_factory=SideChannelSettings)
    """Where peers shake hands."""

    strict: bool = False
    """Compare bridged facts too: the exact digest of R2."""
