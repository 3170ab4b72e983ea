"""The flags of a worker, made from the settings classes: names, defaults and help stand there and nowhere else."""

import argparse
import ast
import dataclasses
import inspect
import math
import socket
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cli.support.parser import metavar_of
from kvferry.engines.mini.settings import DTYPES, KV_DTYPES, ON_RANK_DEATH, EngineSettings
from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.errors import ConfigError
from kvferry.settings import (
    FailurePolicy,
    FerrySettings,
    FetchSettings,
    LeaseSettings,
    OlderPeers,
    SideChannelSettings,
    TransferMode,
    TransferSettings,
    Verify,
)
from kvferry.transport.registry import TRANSPORTS

__all__ = [
    "FLAGS",
    "Flag",
    "add_name_flag",
    "add_worker_flags",
    "check_side_channel",
    "engine_settings",
    "ferry_settings",
    "field_docs",
    "served_names",
    "worker_argv",
]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: the class and field that it sets."""

    name: str
    part: type
    field: str
    parse: Callable[[str], Any]
    choices: Sequence[str] = ()

    @property
    def dest(self) -> str:
        """The name of the parsed value."""
        return self.name.replace("-", "_")

    @property
    def default(self) -> Any:
        """The default, from the settings class."""
        return next(one.default for one in dataclasses.fields(self.part) if one.name == self.field)


def _on_off(text: str) -> bool:
    return text == "on"


FLAGS = (
    Flag("dtype", EngineSettings, "dtype", str, DTYPES),
    Flag("kv-dtype", EngineSettings, "kv_dtype", str, KV_DTYPES),
    Flag("device", EngineSettings, "device", str),
    Flag("block-tokens", EngineSettings, "block_tokens", int),
    Flag("num-blocks", EngineSettings, "num_blocks", int),
    Flag("max-batch-tokens", EngineSettings, "max_batch_tokens", int),
    Flag("max-running", EngineSettings, "max_running", int),
    Flag("overtake", EngineSettings, "overtake_s", float),
    Flag("max-model-len", EngineSettings, "max_model_len", int),
    Flag("threads", EngineSettings, "threads", int),
    Flag("tp", EngineSettings, "tp", int),
    Flag("pp", EngineSettings, "pp", int),
    Flag("on-rank-death", EngineSettings, "on_rank_death", str, ON_RANK_DEATH),
    Flag("rank-timeout", EngineSettings, "rank_timeout_s", float),
    Flag("seed", EngineSettings, "seed", int),
    Flag("transfer-mode", TransferSettings, "mode", TransferMode, [str(one) for one in TransferMode]),
    Flag("transport", TransferSettings, "transport", str, sorted(TRANSPORTS)),
    Flag("transfer-deadline", TransferSettings, "deadline_s", float),
    Flag("on-failure", TransferSettings, "on_failure", FailurePolicy, [str(one) for one in FailurePolicy]),
    Flag("verify", TransferSettings, "verify", Verify, [str(one) for one in Verify]),
    Flag("older-peers", TransferSettings, "older_peers", OlderPeers, [str(one) for one in OlderPeers]),
    Flag("progress", TransferSettings, "progress", _on_off, ("on", "off")),
    Flag("first-token", TransferSettings, "first_token", _on_off, ("on", "off")),
    Flag("staging-bytes", TransferSettings, "staging_bytes", int),
    Flag("lease-ttl", LeaseSettings, "ttl_s", float),
    Flag("lease-renew-every", LeaseSettings, "renew_every_s", float),
    Flag("lease-drift", LeaseSettings, "drift", float),
    Flag("quarantine", LeaseSettings, "quarantine_s", float),
    Flag("standstill", LeaseSettings, "standstill_s", float),
    Flag("side-channel-host", SideChannelSettings, "host", str),
    Flag("side-channel-port", SideChannelSettings, "port", int),
    Flag("handshake-timeout", SideChannelSettings, "timeout_s", float),
    Flag("key-file", SideChannelSettings, "key_file", str),
    Flag("protocol-max", SideChannelSettings, "protocol_max", int),
    Flag("fetch-share", FetchSettings, "share", float),
    Flag("fetch-answer-within", FetchSettings, "answer_s", float),
)


def add_worker_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how the engine runs and how KV crosses."""
    engine = parser.add_argument_group("engine")
    ferry = parser.add_argument_group("hand-off")
    for flag in FLAGS:
        group = engine if flag.part is EngineSettings else ferry
        shown = {True: "on", False: "off"}.get(flag.default, flag.default) if flag.parse is _on_off else flag.default
        text = field_docs(flag.part)[flag.field].replace("%", "%%")
        help_text = f"{text} (default: {('None' if 'None' in text else 'none') if shown is None else shown})"
        metavar = metavar_of(flag.field, flag.parse if isinstance(flag.parse, type) else None)
        kind: dict[str, Any] = {"choices": flag.choices} if flag.choices else {"metavar": metavar}
        parse = str if flag.choices else flag.parse
        group.add_argument(f"--{flag.name}", type=parse, default=None, help=help_text, **kind)
    engine.add_argument(
        "--cache-gb", type=float, default=None, metavar="GIB",
        help=f"Memory of the KV cache, in GiB (default: {_cache_default():g})",
    )  # fmt: skip
    engine.add_argument(
        "--speculative-config", default=None, metavar="JSON",
        help="Drafts that the model verifies; the keys are those of docs/reference/settings.md (default: none)",
    )  # fmt: skip
    engine.add_argument("--no-prefix-caching", action="store_true", help="Compute every prompt from its first token.")
    ferry.add_argument("--strict", action="store_true", help=field_docs(FerrySettings)["strict"])


def add_name_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the names of the model in the API."""
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME",
        help="the names of the model in the API; an answer has the name that its request gave, and else the first "
        "(default: one, from the path)",
    )  # fmt: skip


def served_names(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the names of the model in the API, each once, or the one that its path gives. Raises ConfigError."""
    given: list[str] = args.served_model_name or [Path(args.model).name.removesuffix(".gguf")]
    if not all(given):
        raise ConfigError("--served-model-name '' is no name: give one, or leave the flag out")
    return tuple(dict.fromkeys(given))


def _cache_default() -> float:
    return EngineSettings().cache_bytes / _GIB


def _given(args: argparse.Namespace, part: type) -> dict[str, Any]:
    values = [(flag, getattr(args, flag.dest)) for flag in FLAGS if flag.part is part]
    return {flag.field: flag.parse(value) for flag, value in values if value is not None}


def engine_settings(model: str, args: argparse.Namespace) -> EngineSettings:
    """Returns the settings of the engine. Raises ConfigError for a value out of range."""
    given = _given(args, EngineSettings)
    if args.cache_gb is not None:
        if not 0 < args.cache_gb < math.inf:
            raise ConfigError(f"--cache-gb {args.cache_gb:g} must be above 0, and finite. Raise it, or leave it out.")
        given["cache_bytes"] = int(args.cache_gb * _GIB)
    if args.speculative_config is not None:
        given["speculation"] = SpeculationSettings.from_json(args.speculative_config)
    return EngineSettings(model=model, prefix_caching=not args.no_prefix_caching, **given)


def ferry_settings(args: argparse.Namespace) -> FerrySettings:
    """Returns the settings of the hand-off. Raises ConfigError for a value out of range."""
    return FerrySettings(
        transfer=TransferSettings(**_given(args, TransferSettings)),
        lease=LeaseSettings(**_given(args, LeaseSettings)),
        side_channel=SideChannelSettings(**_given(args, SideChannelSettings)),
        fetch=FetchSettings(**_given(args, FetchSettings)),
        strict=args.strict,
    )


def check_side_channel(settings: SideChannelSettings) -> None:
    """Raises ConfigError for a missing or wrong key, or an unusable address, before a model is loaded."""
    from kvferry.sidechannel.shared_key import load_key, require_key  # late: --help needs no zmq

    require_key(load_key(settings), settings.host, "listen there")
    if settings.host in ("0.0.0.0", "::", ""):
        raise ConfigError(
            f"--side-channel-host {settings.host!r} is every address of this machine, and peers would be "
            "given it to connect to: give the one address at which they reach it, such as --side-channel-host 10.0.0.5"
        )
    where = f"--side-channel-host {settings.host!r} --side-channel-port {settings.port!r}"
    if not 0 <= settings.port <= 65535:
        raise ConfigError(f"cannot listen on {where}: give a port from 0 to 65535; 0 takes a free one")
    try:
        family, kind, number, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen on {where}: {reason}. Give an address of this machine, and a free port or 0"
        ) from error


def worker_argv(args: argparse.Namespace) -> list[str]:
    """Returns the same flags again, for a child process."""
    argv = []
    for flag in FLAGS:
        value = getattr(args, flag.dest)
        if value is not None:
            argv += [f"--{flag.name}", str(value)]
    if args.cache_gb is not None:
        argv += ["--cache-gb", str(args.cache_gb)]
    if args.speculative_config is not None:
        argv += ["--speculative-config", args.speculative_config]
    return argv + [f"--{name}" for name in ("no-prefix-caching", "strict") if getattr(args, name.replace("-", "_"))]


def field_docs(settings: type) -> dict[str, str]:
    """Returns the text beneath each field of a settings class, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(settings)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef), "a settings class is a class"
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[field.target.id] = " ".join(str(text.value.value).replace("`", "").split())
    return docs
