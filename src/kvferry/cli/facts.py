"""`kvferry facts URL|MODEL`: what a worker says of itself, or would say, to be compared later.

From a URL everything is saved, layouts too. From a model it is what `kvferry serve` with the same flags would tell; the
model is not loaded.
"""

import argparse
import json
from pathlib import Path

import msgspec

from kvferry.cli.main import ExitCode
from kvferry.cli.support.worker_description import fetch, is_url, parse_told
from kvferry.cli.support.worker_flags import add_worker_flags, engine_settings, ferry_settings
from kvferry.errors import ConfigError
from kvferry.handshake.facts import Facts
from kvferry.settings import Role

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where from, and the flags of `kvferry serve`."""
    parser.add_argument("source", metavar="URL|MODEL", help="a live worker, or a model as `kvferry serve` takes it")
    parser.add_argument("--role", choices=[str(role) for role in Role], default=str(Role.BOTH),
                        help="of a model: what it would do for others (default: both)")  # fmt: skip
    parser.add_argument("-o", "--out", metavar="FILE", help="write there; default: standard output")
    parser.add_argument("--json", action="store_true", help="one line (the default is indented)")
    add_worker_flags(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Print, or save, one JSON object."""
    told = _of_worker(args.source) if is_url(args.source) else _of_model(args)
    text = json.dumps(told) if args.json else json.dumps(told, indent=2)
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
    parse_told(url, body)
    return msgspec.json.decode(body, type=dict[str, object])


def _of_model(args: argparse.Namespace) -> dict[str, object]:
    # Imported late: facts of a URL need no engine.
    from kvferry.engines.mini.models.catalog import model_directory, read_config
    from kvferry.engines.mini.models.loading import kv_format
    from kvferry.engines.mini.ranks.sizing import check_parallel
    from kvferry.engines.mini.worker import WorkerSettings, describe

    settings = WorkerSettings(
        engine=engine_settings(args.source, args), ferry=ferry_settings(args), role=Role(args.role)
    )
    directory = model_directory(args.source)
    config = read_config(directory)
    check_parallel(config, settings.engine)
    kv = kv_format(settings.engine, config, directory)
    engine = describe(settings, config, directory, settings.engine.dtype, kv)
    return {
        "engine": "-",
        "incarnation": "-",
        "role": args.role,
        "mode": str(settings.ferry.transfer.mode),
        "facts": Facts.from_engine(engine).to_json(),
    }
