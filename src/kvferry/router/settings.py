"""Every setting of the router."""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import ConfigError

__all__ = ["Fetch", "FirstToken", "PolicyName", "RouterSettings"]

_MAY_BE_ZERO = frozenset(
    {"hung_after_s", "room_turn_s", "room_wait_s", "restart_wait_s", "max_waiting", "max_registered", "drain_timeout_s"}
)


class PolicyName(StrEnum):
    """How one of several workers is chosen (router.fleet.policies)."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    PREFIX_AWARE = "prefix_aware"


class Fetch(StrEnum):
    """When workers are given sources to fetch from."""

    ALWAYS = "always"
    NEVER = "never"


class FirstToken(StrEnum):
    """Which worker's first token a stream begins with."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """How the router treats its workers. A value out of range raises ConfigError with its name and the range."""

    prefill_policy: PolicyName = PolicyName.LEAST_LOADED
    """How a prefill worker is chosen: `round_robin`, `least_loaded`, `power_of_two` or `prefix_aware`."""

    decode_policy: PolicyName = PolicyName.LEAST_LOADED
    """How a decode worker is chosen; the values are those of `prefill_policy`."""

    local_below: str = "0"
    """If decode's cache lacks fewer than this many tokens of a prompt, decode computes the prompt itself. With `auto`
    the router measures the threshold; with 0 every prompt goes to prefill."""

    fetch: Fetch = Fetch.NEVER
    """Whether a worker that computes a prompt is given the workers that hold its first tokens, to fetch their KV
    instead: `always`, or `never`. What a fetch costs is not measured yet, so it is off until you turn it on."""

    first_token: FirstToken = FirstToken.PREFILL
    """When a stream begins: with `prefill`, as soon as prefill has the first token; with `decode`, with decode's first
    bytes."""

    room_wait_s: float = 30.0
    """Seconds for which a request waits if no decode worker has room for its prompt and it has no turn (`room_turn_s`);
    then it gets 503."""

    room_turn_s: float = 2.0
    """Seconds after which a request that has found no room has its turn, the oldest first: it is sent to a decode
    worker all the same and waits there for the next room, one such request per worker. Smaller ones that find room
    still pass it in the router; in the worker they pass by its own rule (`--overtake`), which bounds the wait of both.
    With 0 a request without room has its turn at once."""

    max_waiting: int = 1024
    """The largest number of requests that wait for a decode worker; further ones get 503 at once."""

    restart_wait_s: float = 10.0
    """Seconds for which requests wait for a decode worker to come back, counted from when the last one went (as in a
    restart); then they get 503 with Retry-After. With 0 they get 503 at once."""

    connect_timeout_s: float = 2.0
    """Seconds after which a worker that has not accepted a connection is unreachable."""

    prefill_timeout_s: float = 300.0
    """Seconds within which prefill must have answered."""

    first_byte_timeout_s: float = 600.0
    """Seconds within which decode must have begun its answer. An answer that is not streamed begins when it is
    complete."""

    between_bytes_timeout_s: float = 120.0
    """The longest pause of decode in the middle of an answer, in seconds."""

    health_every_s: float = 1.0
    """Seconds between health checks, in which the router asks each worker what it is and whether it is well."""

    health_timeout_s: float = 5.0
    """Seconds after which a worker that has not answered a health check is down."""

    hung_after_s: float = 10.0
    """Seconds without an answer to any health check, counted from the first that failed, after which a worker counts as
    hung: requests that have waited for it at least this long go to another worker, and streams end with an error. A
    slow worker that answers health checks is not affected. 0 turns this off."""

    breaker_failures: int = 3
    """How many failures in a row of a worker, or of a pair, open its circuit breaker."""

    breaker_open_s: float = 2.0
    """Seconds for which an open circuit breaker lets nothing through; then it lets one request through. Each further
    failure doubles the time."""

    breaker_longest_s: float = 30.0
    """The longest time for which a circuit breaker stays open, in seconds."""

    release_timeout_s: float = 5.0
    """Seconds for which the router tries to tell prefill that no worker will fetch a hand-off. After that, the lease
    ends the hand-off."""

    max_attempts: int = 4
    """The largest number of workers of one role that are tried for one request."""

    alarm_window_s: float = 60.0
    """The number of seconds back over which the decode-only alarm counts requests."""

    alarm_share: float = 0.5
    """The decode-only alarm rings if at least this share of the requests in the window was served by decode alone
    without being routed so on purpose."""

    registration_lease_s: float = 10.0
    """Seconds after which a worker that registered itself is forgotten unless it registers again."""

    max_registered: int = 1024
    """The largest number of workers that can register."""

    drain_timeout_s: float = 30.0
    """Seconds for which the router, after SIGTERM, lets open requests end; then it cuts them with an error event (a
    stream) or 503. With 0 it cuts them at once."""

    max_body_bytes: int = 32 << 20
    """The size in bytes of the longest request body; a longer one gets 413."""

    def __post_init__(self) -> None:
        for name, field in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if isinstance(field.default, StrEnum):
                self._check_choice(name, value, type(field.default))
            elif name == "local_below":
                if value != "auto" and not (value.isascii() and value.isdigit() and len(value) < 10):
                    raise ConfigError(f"router.{name}={value!r} must be a number of tokens, or 'auto'")
            elif name in _MAY_BE_ZERO:
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
        """`local_below` as a number, or None if it is measured."""
        return None if self.local_below == "auto" else int(self.local_below)
