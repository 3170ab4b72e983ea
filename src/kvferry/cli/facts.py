"""`kvferry facts URL|MODEL`: saves what a worker states in a handshake, or would state, for compare and plan.

Of a URL everything is saved. Of a model it is what `kvferry serve` with the same flags would state, facts and layouts;
no weight is loaded.
"""

import argparse
import json
from pathlib import Path

import msgspec

from kvferry.cli.main import ExitCode
from kvferry.cli.support.worker_description import fetch, is_url, parse
from kvferry.cli.support.worker_flags import add_worker_flags, engine_settings, ferry_settings
from kvferry.errors import ConfigError
from kvferry.settings import Role

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the source, and the flags of `kvferry serve`."""
    parser.add_argument("source", metavar="URL|MODEL", help="a live worker, or a model as `kvferry serve` takes it")
    parser.add_argument("--role", choices=[str(role) for role in Role], default=str(Role.BOTH),
                        help="of a model: the role of the worker (default: both)")  # fmt: skip
    parser.add_argument("-o", "--out", metavar="FILE", help="write there (default: standard output)")
    parser.add_argument("--json", action="store_true", help="print one line (the default is indented)")
    add_worker_flags(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Prints or saves one JSON object."""
    described = _of_worker(args.source) if is_url(args.source) else _of_model(args)
    text = json.dumps(described) if args.json else json.dumps(described, indent=2)
    if args.out is None:
        print(text)
        return ExitCode.OK
    try:
        Path(args.out).write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {args.out!r}: {error.strerror}. Choose another path") from error
    return ExitCode.OK


def _of_worker(url: str) -> dict[str, object]:
    body = fetch(url)
    parse(url, body)
    return msgspec.json.decode(body, type=dict[str, object])


def _of_model(args: argparse.Namespace) -> dict[str, object]:
    # Imported late: the facts of a URL need no engine.
    from kvferry.cli.support.model_description import describe_model
    from kvferry.engines.mini.worker import WorkerSettings

    engine = engine_settings(args.source, args)
    return describe_model(WorkerSettings(engine=engine, ferry=ferry_settings(args), role=Role(args.role)))
