"""The flags of a router, made from its settings class: names, defaults and help stand there and nowhere else."""

import argparse
import dataclasses
from collections.abc import Collection
from enum import StrEnum
from typing import Any

from kvferry.cli.support.parser import metavar_of
from kvferry.cli.support.worker_flags import field_docs
from kvferry.router.app import RouterFiles
from kvferry.router.settings import RouterSettings

__all__ = ["add_router_flags", "router_argv", "router_files", "router_flag", "router_flag_names", "router_settings"]

_FILES = {
    "fleet": "fleet-file",
    "api_keys": "api-key-file",
    "worker_key": "worker-key-file",
    "register_key": "register-key-file",
}


def router_flag(field: str) -> str:
    """Returns the flag, without dashes, that sets a field of RouterSettings."""
    return field.removesuffix("_s").replace("_", "-")


def add_router_flags(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Adds a flag for each file and each setting of the router, but not those named in `leave_out` (without dashes)."""
    group = parser.add_argument_group("router")
    texts = field_docs(RouterFiles)
    for name, flag in _FILES.items():
        if flag not in leave_out:
            group.add_argument(f"--{flag}", dest=f"file_{name}", metavar="FILE", help=f"{texts[name]} (default: none)")
    if "otlp" not in leave_out:
        group.add_argument(
            "--otlp", metavar="URL",
            help="send OpenTelemetry spans there, OTLP over HTTP, as in http://127.0.0.1:4318; needs kvferry[otel]; "
            "OTEL_TRACES_SAMPLER and the other variables of its SDK apply (default: none)",
        )  # fmt: skip
    texts = field_docs(RouterSettings)
    for field in dataclasses.fields(RouterSettings):
        if router_flag(field.name) in leave_out:
            continue
        kind = type(field.default)
        choices = list(kind) if issubclass(kind, StrEnum) else None
        group.add_argument(
            f"--{router_flag(field.name)}",
            dest=f"router_{field.name}", type=kind, default=field.default, choices=choices,
            metavar=None if choices else metavar_of(field.name, kind),
            help=f"{texts[field.name].replace('%', '%%')} (default: {field.default})",
        )  # fmt: skip


def router_flag_names() -> dict[str, str]:
    """Returns the flag of each setting of the router, by the name of the setting."""
    return {field.name: f"--{router_flag(field.name)}" for field in dataclasses.fields(RouterSettings)}


def router_settings(args: argparse.Namespace) -> RouterSettings:
    """Returns the settings that were given. Raises ConfigError for a value out of range."""
    given: dict[str, Any] = {field.name: getattr(args, f"router_{field.name}", field.default)
             for field in dataclasses.fields(RouterSettings)}  # fmt: skip
    return RouterSettings(**given)


def router_files(args: argparse.Namespace) -> RouterFiles:
    """Returns the files that were given."""
    return RouterFiles(**{name: getattr(args, f"file_{name}", None) for name in _FILES})


def router_argv(args: argparse.Namespace) -> list[str]:
    """Returns the same flags again, for a `kvferry route` process; only those that are not the default."""
    argv = []
    for name, flag in _FILES.items():
        if (path := getattr(args, f"file_{name}", None)) is not None:
            argv += [f"--{flag}", path]
    if args.otlp is not None:
        argv += ["--otlp", args.otlp]
    for field in dataclasses.fields(RouterSettings):
        value = getattr(args, f"router_{field.name}", field.default)
        if value != field.default:
            argv += [f"--{router_flag(field.name)}", str(value)]
    return argv
