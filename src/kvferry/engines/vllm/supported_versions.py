"""The vLLM releases that this connector supports. The caller passes the installed version."""

from kvferry.errors import ConfigError

__all__ = ["SUPPORTED", "check_version"]

SUPPORTED = ("0.32",)
"""The releases that the tests run with. vLLM changes the hooks of connectors from release to release."""


def check_version(version: str, *, anyway: bool = False) -> None:
    """Raises ConfigError for a vLLM release that was not tested, unless the operator takes the risk (`anyway`)."""
    if anyway or any(version == known or version.startswith(f"{known}.") for known in SUPPORTED):
        return
    raise ConfigError(
        f"vLLM {version!r} is not supported: this kvferry was tested with {', '.join(SUPPORTED)}, and the hooks of "
        'KV connectors change between releases. Install a supported one, or try it with {"any_version": true} in '
        "kv_connector_extra_config"
    )
