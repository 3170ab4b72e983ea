"""The values of facts: their types, when two are equal, and one way to write each effective value (R6).

A value that has several spellings (`bf16`, `torch.bfloat16`, `auto`) becomes one value here.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

from kvferry.errors import ConfigError

__all__ = [
    "STATELESS_METHODS",
    "FactValue",
    "canonical",
    "config_text",
    "dtype_name",
    "effective_dtype",
    "run_length",
    "short_digest",
    "speculative_method",
]

FactValue = str | int | float | bool | None | tuple[str | int, ...]
"""None means "not reported" and "none" alike: a peer that does not know a feature reports the same as one without
it."""

_DTYPES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e4m3": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
}

STATELESS_METHODS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods that draft from the text alone: they keep no KV and read no hidden state (R3, R7)."""


def canonical(value: FactValue) -> str:
    """Returns one spelling for each value, so that equal texts mean equal values. It never raises.

    `True` and `1` are different, and `1.0` equals `1`.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return repr(value)
        if value.is_integer() and abs(value) < 2**53:
            return str(int(value))
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def dtype_name(name: str) -> str:
    """Returns one name per dtype: `torch.bfloat16` and `bf16` are `bfloat16`, and `fp8` is `fp8_e4m3`.

    An unknown name is returned as it is.
    """
    plain = name.strip().lower().removeprefix("torch.")
    return _DTYPES.get(plain, plain)


def effective_dtype(name: str | None, inherited: str | None, what: str) -> str:
    """Resolves a dtype setting: `auto` and None inherit. Raises ConfigError if there is nothing to inherit."""
    if name is not None and name.strip().lower() != "auto":
        return dtype_name(name)
    if inherited is None or inherited.strip().lower() == "auto":
        raise ConfigError(
            f"{what}={name!r} means 'the same as the checkpoint', but the checkpoint's dtype is {inherited!r}: "
            "name the dtype, for example --dtype bfloat16"
        )
    return dtype_name(inherited)


def speculative_method(name: str | None) -> str | None:
    """Returns one name per method: every engine's `<model>_mtp` is `mtp`, and `off` and the empty string are None."""
    if name is None or name.strip().lower() in {"", "none", "off"}:
        return None
    plain = name.strip().lower()
    return "mtp" if plain.endswith("mtp") else plain


def run_length(kinds: Sequence[str]) -> str | None:
    """Returns `full full full window` as `full*3 window`, and None for an empty sequence."""
    runs: list[tuple[str, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return " ".join(kind if count == 1 else f"{kind}*{count}" for kind, count in runs) or None


def _plain(value: object) -> object:
    """Returns a config value in one spelling: whole floats as ints, tuples as lists, and keys as sorted text."""
    if isinstance(value, bool) or value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else repr(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return repr(value)


def config_text(value: object) -> str | None:
    """Returns a piece of a model's config as one line of JSON; None for None and for an empty mapping."""
    if value is None or (isinstance(value, Mapping) and not value):
        return None
    return json.dumps(_plain(value), ensure_ascii=True, separators=(",", ":"), sort_keys=True)


def short_digest(value: object) -> str:
    """Returns the first 16 hex digits of the SHA-256 of config_text(value)."""
    return hashlib.sha256((config_text(value) or "").encode()).hexdigest()[:16]
