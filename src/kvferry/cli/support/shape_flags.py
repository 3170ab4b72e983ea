"""Flags that give a model the shape of a worker, for each of two sides: `--tp 1,3` is --tp 1 for A and --tp 3 for B."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvferry.cli.support.worker_flags import FLAGS, Flag
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError

__all__ = ["add_shape_flags", "shapes"]

_NAMES = ("tp", "pp", "block-tokens", "num-blocks", "max-model-len", "dtype", "kv-dtype")
_FLAGS = tuple(flag for flag in FLAGS if flag.name in _NAMES)


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; they change nothing for a side that is a URL or a file."""
    group = parser.add_argument_group(
        "shapes", "For a side that is a model: one value for both sides, or A's and B's with a comma between them."
    )
    for flag in _FLAGS:
        default = "auto" if flag.default is None else flag.default
        group.add_argument(f"--{flag.name}", metavar="A,B", help=f"as for kvferry serve (default: {default})")


def shapes(args: argparse.Namespace) -> tuple[Callable[[str], EngineSettings], Callable[[str], EngineSettings]]:
    """Returns, for A and for B, what makes settings from a model's name. Raises ConfigError for a wrong value."""
    both: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for flag in _FLAGS:
        text = getattr(args, flag.dest)
        if text is None:
            continue
        values = text.split(",")
        if len(values) > 2:
            raise ConfigError(f"--{flag.name} {text}: give one value, or one for each of the two sides, as 1,2")
        for side, value in zip(both, (values[0], values[-1]), strict=True):
            side[flag.field] = _parse(flag, value)
    return _maker(both[0]), _maker(both[1])


def _maker(given: dict[str, Any]) -> Callable[[str], EngineSettings]:
    return lambda model: replace(EngineSettings(model=model), **given)


def _parse(flag: Flag, text: str) -> Any:
    if flag.choices and text not in flag.choices:
        raise ConfigError(f"--{flag.name} {text!r}: choose from {', '.join(flag.choices)}")
    try:
        return flag.parse(text)
    except ValueError:
        raise ConfigError(f"--{flag.name} {text!r} is not a number") from None
