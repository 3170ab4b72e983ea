"""Finds transports by name. Each is imported when it is first asked for: `import kvferry` loads none."""

import importlib
from typing import Any

from kvferry.errors import ConfigError
from kvferry.ids import PeerName
from kvferry.transport.base import Transport

__all__ = ["TRANSPORTS", "make_transport"]

TRANSPORTS = {
    "nixl": "kvferry.transport.nixl.nixl:NixlTransport",
    "memory": "kvferry.transport.memory:MemoryTransport",
}
_INSTALL = {"nixl": "pip install 'kvferry[nixl]'"}


def make_transport(name: str, agent_name: PeerName, **options: Any) -> Transport:
    """Makes one rank's end of the transport called `name`. Options are those of its constructor.

    Raises ConfigError for a name that is not in TRANSPORTS, or whose package is not installed.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"transport {name!r} does not exist: choose one of {', '.join(sorted(TRANSPORTS))}")
    module_name, _, class_name = TRANSPORTS[name].partition(":")
    try:
        module = importlib.import_module(module_name)
        transport: Transport = getattr(module, class_name)(agent_name, **options)
    except ImportError as error:
        if name not in _INSTALL:
            raise
        raise ConfigError(
            f"transport {name!r} needs a package that cannot be loaded ({error}): {_INSTALL[name]}"
        ) from error
    return transport
