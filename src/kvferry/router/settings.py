"""Every setting of the router."""

from dataclasses import dataclass

from kvferry.errors import ConfigError

__all__ = ["RouterSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """How the router treats its workers. Out of range: ConfigError with the name, the value and the range."""

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

    release_timeout_s: float = 5.0
    """Prefill is told for this long that nobody will take a hand-off; then its lease ends it."""

    max_attempts: int = 4
    """At most this many workers of a role are tried for one request."""

    max_body_bytes: int = 32 << 20
    """A longer body is refused with 413."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name == "hung_after_s":
                if not value >= 0:
                    raise ConfigError(f"router.{name}={value!r} must be 0 or above")
            elif not value > 0:
                raise ConfigError(f"router.{name}={value!r} must be above 0")
