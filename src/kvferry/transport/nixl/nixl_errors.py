"""Maps NIXL's exceptions to ours, by who must act. They end here: no other module knows a NIXL class."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nixl

from kvferry.errors import ConfigError, FerryError, PeerLost, TransferError

__all__ = ["MEANING", "bindings", "mapped"]

# The plain extension module below the `nixl` package: its Python layer fixes the progress thread's delay at 0, which
# burns a core, and unpickles what peers send, which we must not.
bindings: Any = nixl._bindings

MEANING: dict[str, type[FerryError]] = {
    "nixlRemoteDisconnectError": PeerLost,
    "nixlNotFoundError": PeerLost,  # of an agent or of its memory: gone since we connected
    "nixlBackendError": TransferError,
    "nixlCancelledError": TransferError,
    "nixlInvalidParamError": TransferError,
    "nixlMismatchError": TransferError,
    "nixlNoTelemetryError": TransferError,
    "nixlNotAllowedError": TransferError,
    "nixlNotPostedError": TransferError,
    "nixlNotSupportedError": ConfigError,
    "nixlRepostActiveError": TransferError,
    "nixlUnknownError": TransferError,
}
"""Each exception of the extension module. A test fails when the library has one that is not here."""


# Exceptions of the extension module derive from Exception; its C++ also throws plain RuntimeErrors.
_FOREIGN: tuple[type[Exception], ...] = (RuntimeError, *(getattr(bindings, name) for name in MEANING))


@contextmanager
def mapped(doing: str) -> Iterator[None]:
    """Turns NIXL's exceptions into ours. `doing` completes "NIXL cannot ..."."""
    try:
        yield
    except _FOREIGN as error:
        ours = MEANING.get(type(error).__name__, TransferError)
        raise ours(f"NIXL cannot {doing}: {error}") from error
