"""Adds the flags to type to messages that name settings, as `lease.ttl_s`: the settings are also used without a CLI."""

import re

from kvferry.cli.support.router_flags import router_flag_names
from kvferry.cli.support.worker_flags import FLAGS
from kvferry.engines.mini.settings import EngineSettings
from kvferry.settings import FetchSettings, LeaseSettings, SideChannelSettings, TransferSettings

__all__ = ["with_flags"]

_PREFIXES = {
    EngineSettings: "",
    TransferSettings: "transfer.",
    LeaseSettings: "lease.",
    FetchSettings: "fetch.",
    SideChannelSettings: "side_channel.",
}
_NAME = re.compile(r"(?<![\w.])(?:(?:transfer|lease|side_channel|router)\.)?[a-z][a-z0-9_]*(?==)")


def with_flags(message: str, command: str) -> str:
    """Returns the message, followed by the flags of the command that set what it names, if it does not name them."""
    flags = [flag for name in dict.fromkeys(_NAME.findall(message)) if (flag := _flag_of(name, command))]
    missing = [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", message)]
    return f"{message.rstrip('.')} ({', '.join(missing)})" if missing else message


def _flag_of(name: str, command: str) -> str | None:
    if name.startswith("router."):
        return router_flag_names().get(name.removeprefix("router.")) if command in ("route", "up") else None
    if command == "route":
        return None
    return next((f"--{flag.name}" for flag in FLAGS if f"{_PREFIXES[flag.part]}{flag.field}" == name), None)
