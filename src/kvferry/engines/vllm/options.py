"""Reads `--kv-transfer-config` into kvferry's settings.

`kv_connector_extra_config` takes `mode` (pull, push), `strict`, `any_version`, and the parts of FerrySettings by name
(`transfer`, `lease`, `side_channel`), each as an object of settings or one by one as `lease.ttl_s`. Any other key is
refused, so that a misspelt setting does not silently become a default. vLLM's own `kv_load_failure_policy` decides
`on_failure`. `transfer.staging_bytes` is 16 MiB unless it is set.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.errors import ConfigError
from kvferry.settings import FailurePolicy, FerrySettings, Role

__all__ = ["Options", "read_options", "role_of"]

_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}
_PARTS = ("transfer", "lease", "side_channel")
_OURS = ("mode", "strict", "any_version", *_PARTS)
_WHERE = "kv_connector_extra_config"
STAGING_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of one engine, as its operator gave them."""

    ferry: FerrySettings
    role: Role
    any_version: bool = False


def role_of(kv_role: str | None) -> Role:
    """Returns kvferry's role for vLLM's `kv_role`. Raises ConfigError if it is missing or unknown."""
    if kv_role not in _ROLES:
        raise ConfigError(f"kv_role={kv_role!r} is not one of {', '.join(_ROLES)}")
    return _ROLES[kv_role]


def read_options(extra: Mapping[str, Any], *, kv_role: str | None, failure_policy: str) -> Options:
    """Reads and checks all options. Raises ConfigError with the name, the value and what is allowed."""
    parts = _parts_of(extra)
    transfer = parts["transfer"]
    if "mode" in extra:
        if "mode" in transfer:
            raise ConfigError(f"{_WHERE} holds both 'mode' and 'transfer.mode': leave one out")
        transfer["mode"] = extra["mode"]
    if "on_failure" in transfer:
        raise ConfigError(f"{_WHERE}.transfer.on_failure is vLLM's own setting: use kv_load_failure_policy")
    if failure_policy not in list(FailurePolicy):
        raise ConfigError(f"kv_load_failure_policy={failure_policy!r} is not one of {', '.join(FailurePolicy)}")
    transfer["on_failure"] = failure_policy
    # vLLM's decode samples from its own pass over the last prompt token; prefill's first token would be emitted twice.
    if transfer.setdefault("first_token", False):
        raise ConfigError(f"{_WHERE}.transfer.first_token=True: vLLM's decode cannot take prefill's first token")
    # Registered memory is resident memory. A pool of this size is small, and is still filled and sent in pieces that
    # are long for every wire.
    transfer.setdefault("staging_bytes", STAGING_BYTES)
    settings = FerrySettings()
    kinds = {name: type(getattr(settings, name)) for name in _PARTS}
    return Options(
        ferry=FerrySettings(
            **{name: _part(name, kinds[name], parts[name]) for name in _PARTS},
            strict=_flag(extra, "strict"),
        ),
        role=role_of(kv_role),
        any_version=_flag(extra, "any_version"),
    )


def _parts_of(extra: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the settings of each part, whichever way they were written."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in _PARTS}
    for key, value in extra.items():
        name, dot, setting = key.partition(".")
        if name not in _OURS or (dot and name not in _PARTS):
            raise ConfigError(f"{_WHERE} holds {key!r}, which kvferry does not know: it takes {', '.join(_OURS)}")
        if name not in _PARTS:
            continue
        given = {setting: value} if dot else value
        if not isinstance(given, Mapping):
            raise ConfigError(f"{_WHERE}.{name}={value!r} must be an object of settings")
        twice = sorted(set(given) & set(parts[name]))
        if twice:
            raise ConfigError(f"{_WHERE} holds {name}.{twice[0]} twice: leave one out")
        parts[name].update(given)
    return parts


def _part(name: str, kind: type[Any], raw: dict[str, Any]) -> Any:
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise ConfigError(f"{_WHERE}.{name} holds {unknown[0]!r}: it takes {', '.join(known)}")
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_WHERE}.{name}: {error}") from error


def _flag(extra: Mapping[str, Any], name: str) -> bool:
    value = extra.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{_WHERE}.{name}={value!r} must be true or false")
    return value
