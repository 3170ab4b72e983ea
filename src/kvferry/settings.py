"""Every setting of the hand-off, in one frozen class per part. docs/reference/settings.md is made from these classes.

Defaults are defined here and nowhere else. A value out of range raises ConfigError with its name, value and range.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.errors import ConfigError

__all__ = [
    "FailurePolicy",
    "FerrySettings",
    "FetchSettings",
    "LeaseSettings",
    "OlderPeers",
    "Role",
    "SideChannelSettings",
    "TransferMode",
    "TransferSettings",
    "Verify",
]


class Role(StrEnum):
    """Which part of the work an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class TransferMode(StrEnum):
    """Which side moves the bytes: decode reads them (pull), or prefill writes them (push). R12."""

    PULL = "pull"
    PUSH = "push"


class FailurePolicy(StrEnum):
    """What decode does with a request whose KV did not arrive. R29."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class Verify(StrEnum):
    """How much of the KV that landed is compared by digest with what prefill had."""

    ALL = "all"
    SAMPLE = "sample"
    OFF = "off"


class OlderPeers(StrEnum):
    """What happens to hand-offs with a peer that cannot say for which tokens they are. R51."""

    COUNT = "count"
    REFUSE = "refuse"


def _check(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be between {low:g} and {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """How long blocks stay reserved for a peer that shows no sign of life (R25, R28)."""

    ttl_s: float = 30.0
    """Seconds after which a grant ends, counted from the last sign of life of the peer that holds it."""

    renew_every_s: float = 5.0
    """Seconds between renewals of the grants that an engine holds. One message per peer renews all of them. Must be
    below `lease.ttl_s`."""

    drift: float = 0.01
    """The largest assumed difference between the speeds of two engines' clocks, as a fraction (0 to 0.2). The holder of
    a grant assumes that the grant ends earlier by this fraction."""

    quarantine_s: float = 10.0
    """Seconds for which blocks are not reused after a peer that may still write to them has vanished."""

    standstill_s: float = 120.0
    """Seconds for which blocks are not reused if the peer that may still write to them does not answer, but is not
    known to be dead. A stopped process that is resumed finishes a write to shared memory that it had begun. The wait
    ends early if the peer answers or is found to be dead."""

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
    """How KV moves from prefill to decode."""

    mode: TransferMode = TransferMode.PULL
    """Which side moves the bytes: with `pull` decode reads them, with `push` prefill writes them. Both sides must use
    the same mode (R13)."""

    transport: str = "nixl"
    """The transport: `nixl`, or `memory` if both engines run in one process."""

    deadline_s: float = 60.0
    """Seconds after which an unfinished hand-off fails, counted from when decode started it."""

    on_failure: FailurePolicy = FailurePolicy.RECOMPUTE
    """What decode does with a request whose KV did not arrive: with `recompute` it computes the prompt itself, with
    `fail` the client gets an error."""

    verify: Verify = Verify.SAMPLE
    """How much of the KV that landed is compared by digest with what prefill had: `all` of it, a small `sample`, or
    nothing (`off`)."""

    older_peers: OlderPeers = OlderPeers.COUNT
    """What to do with a peer of an older release, which cannot say for which tokens a hand-off is (protocol versions 1
    to 3): with `count` the number of tokens must be the expected one, and a different prompt of the same length is not
    noticed; with `refuse` nothing is handed over, and decode computes every prompt."""

    progress: bool = True
    """Whether prefill offers each chunk of the prompt as soon as it is computed. If off, it offers the whole prompt at
    the end."""

    first_token: bool = True
    """Whether prefill hands over the first token of the answer, too. If off, decode computes the prompt's last token
    again to sample it."""

    staging_bytes: int = 64 << 20
    """Bytes of registered memory in which short runs are packed into one long run; 0 turns staging off."""

    def __post_init__(self) -> None:
        _check("transfer.deadline_s", self.deadline_s, 0.01)
        _check("transfer.staging_bytes", self.staging_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannelSettings:
    """The side channel, on which engines shake hands."""

    host: str = "127.0.0.1"
    """The address to listen on and to advertise to peers. Any address other than loopback needs a key."""

    port: int = 0
    """The port to listen on; 0 takes a free one."""

    key_file: str | None = None
    """The file with the key that all engines share (made by `kvferry key new`). The environment variable
    KVFERRY_KEY_FILE sets it, too."""

    timeout_s: float = 5.0
    """Seconds to wait for a peer's answer to a handshake."""

    max_message_bytes: int = 16 << 20
    """The size in bytes of the longest message that is accepted. A longer one is refused before it is read."""

    max_peers: int = 4096
    """The number of peers that are remembered. Further peers are refused."""

    max_handshakes_per_s: float = 200.0
    """How many handshakes per second are answered for one address. Further ones are refused."""

    protocol_max: int | None = None
    """The newest protocol version to speak: a lower one makes this engine behave like an older release. None means the
    newest that this release knows."""

    def __post_init__(self) -> None:
        _check("side_channel.port", self.port, 0, 65535)
        _check("side_channel.timeout_s", self.timeout_s, 0.01)
        _check("side_channel.max_message_bytes", self.max_message_bytes, 4096)
        _check("side_channel.max_peers", self.max_peers, 1)
        _check("side_channel.max_handshakes_per_s", self.max_handshakes_per_s, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """How engines fetch the KV of prefixes from each other (R38 to R41)."""

    share: float = 0.25
    """The share of the cache that may be kept for other engines that fetch from it. Beyond it they are answered that
    nothing is found. 0: this engine gives nothing."""

    answer_s: float = 2.0
    """Seconds to wait for the answer of an engine that may hold a prefix. Without an answer the tokens are computed."""

    max_questions: int = 64
    """How many questions of one engine may wait for an answer. Further ones are answered that nothing is found."""

    max_tokens: int = 262_144
    """How many tokens of a prompt are asked for, and the most that are looked up for a question. An engine answers
    about the first ones of a longer prompt."""

    def __post_init__(self) -> None:
        _check("fetch.share", self.share, 0.0, 1.0)
        _check("fetch.answer_s", self.answer_s, 0.01)
        _check("fetch.max_questions", self.max_questions, 1)
        _check("fetch.max_tokens", self.max_tokens, 1, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class FerrySettings:
    """All settings of the hand-off."""

    transfer: TransferSettings = field(default_factory=TransferSettings)
    """How KV moves from prefill to decode."""

    lease: LeaseSettings = field(default_factory=LeaseSettings)
    """How long blocks stay reserved for a peer that shows no sign of life."""

    side_channel: SideChannelSettings = field(default_factory=SideChannelSettings)
    """The side channel, on which engines shake hands."""

    fetch: FetchSettings = field(default_factory=FetchSettings)
    """How engines fetch the KV of prefixes from each other."""

    strict: bool = False
    """Whether every factor of vLLM's compatibility hash must match, including those that kvferry can bridge (R2).
    Strict on one side is strict for the pair."""
