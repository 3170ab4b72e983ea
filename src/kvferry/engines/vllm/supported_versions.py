"""Which vLLM this connector knows. Pure: the caller says which one is there."""

from kvferry.errors import ConfigError

__all__ = ["SUPPORTED", "check_version"]

SUPPORTED = ("0.32",)
"""Releases that the tests run with. The hooks of connectors change from release to release."""


def check_version(version: str, *, anyway: bool = False) -> None:
    """Raise ConfigError for a vLLM that was not tested. `anyway`: the operator takes the risk."""
    if anyway or any(version == known or version.startswith(f"{known}.") for known in SUPPORTED):
        return
    raise ConfigError(
        f"vLLM {version!r} is not supported: this kvferry was tested with {', '.join(SUPPORTED)}, and the hooks of "
        'KV connectors change between releases. Install a supported one, or try it with {"any_version": true} in '
        "kv_connector_extra_config"
    )
