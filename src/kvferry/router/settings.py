"""Every setting of the router."""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import ConfigError

__all__ = ["FirstToken", "PolicyName", "RouterSettings"]


class PolicyName(StrEnum):
    """How one of several workers is chosen; see policies."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    PREFIX_AWARE = "prefix_aware"


class FirstToken(StrEnum):
    """Whose first token a stream begins with."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """How the router treats its workers. Out of range: ConfigError with the name, the value and the range."""

    prefill_policy: PolicyName = PolicyName.LEAST_LOADED
    """How a prefill worker is chosen: round_robin, least_loaded, power_of_two, or prefix_aware."""

    decode_policy: PolicyName = PolicyName.LEAST_LOADED
    """How a decode worker is chosen."""

    local_below: str = "0"
    """A prompt of which fewer tokens than this are not in decode's cache is computed by decode: a number of tokens, or
    `auto` for what the router measures. 0: every prompt goes to prefill."""

    first_token: FirstToken = FirstToken.PREFILL
    """`prefill`: a stream begins as soon as prefill has its first token. `decode`: with decode's first bytes."""

    room_wait_s: float = 30.0
    """Where no decode worker has room for the prompt, a request waits for this long before it is refused with 503."""

    max_waiting: int = 1024
    """More requests than this do not wait for room: they are refused with 503 at once."""

    restart_wait_s: float = 10.0
    """Where every decode worker has gone a moment ago, as in a restart, a request waits until one is back: until so
    long after the last of them went, then it is refused with 503 and Retry-After. 0: it is refused at once."""

    connect_timeout_s: float = 2.0
    """A worker that takes no connection for this long is unreachable."""

    prefill_timeout_s: float = 300.0
    """Prefill must have answered after this long."""

    first_byte_timeout_s: float = 600.0
    """Decode must have begun its answer after this long; an answer that is not streamed begins when it is whole."""

    between_bytes_timeout_s: float = 120.0
    """Decode must not pause for longer in the middle of an answer."""

    health_every_s: float = 1.0
    """How often each worker is asked what it is and whether it is well."""

    health_timeout_s: float = 5.0
    """A worker that does not answer that for this long is down."""

    hung_after_s: float = 10.0
    """A worker that has answered no health check for this long since the first that failed is waited for no more: a
    request that waits as long already goes elsewhere, a stream ends with an error. One that answers them may take its
    time. 0: never."""

    breaker_failures: int = 3
    """So many failures in a row of a worker, or of a pair, open its circuit breaker."""

    breaker_open_s: float = 2.0
    """An open breaker lets nothing through for this long, then one request; each further failure doubles it."""

    breaker_longest_s: float = 30.0
    """It is doubled up to this."""

    release_timeout_s: float = 5.0
    """Prefill is told for this long that nobody will take a hand-off; then its lease ends it."""

    max_attempts: int = 4
    """At most this many workers of a role are tried for one request."""

    alarm_window_s: float = 60.0
    """How far back the decode-only alarm looks."""

    alarm_share: float = 0.5
    """The alarm rings when this share of the window's requests was not handed over, without anybody's choice."""

    registration_lease_s: float = 10.0
    """A worker that registered itself and does not do so again for this long is forgotten."""

    max_registered: int = 1024
    """More workers than this cannot register."""

    max_body_bytes: int = 32 << 20
    """A longer body is refused with 413."""

    def __post_init__(self) -> None:
        for name, field in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if isinstance(field.default, StrEnum):
                self._check_choice(name, value, type(field.default))
            elif name == "local_below":
                if value != "auto" and not (value.isascii() and value.isdigit() and len(value) < 10):
                    raise ConfigError(f"router.{name}={value!r} must be a number of tokens, or 'auto'")
            elif name in ("hung_after_s", "room_wait_s", "restart_wait_s", "max_waiting", "max_registered"):
                if not value >= 0:
                    raise ConfigError(f"router.{name}={value!r} must be 0 or above")
            elif not value > 0:
                raise ConfigError(f"router.{name}={value!r} must be above 0")
        if not self.alarm_share <= 1:
            raise ConfigError(f"router.alarm_share={self.alarm_share!r} must be above 0 and at most 1")

    @staticmethod
    def _check_choice(name: str, value: object, kind: type[StrEnum]) -> None:
        if not isinstance(value, kind):
            raise ConfigError(f"router.{name}={value!r} must be one of {', '.join(kind)}")

    @property
    def local_below_tokens(self) -> int | None:
        """`local_below` as a number; None: to be measured."""
        return None if self.local_below == "auto" else int(self.local_below)
