"""The kvferry command.

A command is a module of this package with add_arguments(parser) and run(args) -> ExitCode. It is imported only when it
is called. Results go to stdout, progress and errors to stderr. An error is one line with its remedy; -v adds the
traceback.
"""

import argparse
import importlib
import logging
import os
import sys
from enum import IntEnum
from types import ModuleType

from kvferry import __version__
from kvferry.cli.support.parser import Parser
from kvferry.errors import ConfigError, FerryError, IncompatiblePeer, PeerLost

__all__ = ["COMMANDS", "LOG_LEVELS", "ExitCode", "main", "make_parser"]


class ExitCode(IntEnum):
    """What the exit status means, for scripts."""

    OK = 0
    ERROR = 1
    USAGE = 2
    INCOMPATIBLE = 3
    UNREACHABLE = 4
    BAD_TRANSFER = 5
    INTERRUPTED = 130


COMMANDS = {
    "serve": "run one worker: prefill, decode or both",
    "route": "run the router in front of prefill and decode workers",
    "up": "start and supervise workers and a router",
    "demo": "hand over a real prompt between two processes, and check the tokens against one engine alone",
    "doctor": "hand KV over between two processes or machines, step by step, or check a fleet",
    "env": "print what a bug report needs",
    "facts": "save the facts that a worker states in its handshake",
    "compare": "say whether two workers can share a cache, and if not, why",
    "plan": "show what would be copied between two layouts",
    "key": "make the key that the engines of a fleet share",
    "sim": "simulate hand-offs with faults, from a seed",
    "bench": "measure: engine, transfer, plan, handoff, turns, calibrate, or all of them",
}
LOG_LEVELS = ("debug", "info", "warning", "error")
_WITH_SETTINGS = ("serve", "route", "up", "demo", "facts", "plan", "compare")
_QUIET = {"up": "warning", "demo": "warning"}
"""Commands that supervise others, and log less than "info" unless they are asked to."""

_MODULES = {"bench": "bench.command", "doctor": "doctor.doctor"}
"""Maps a command that is a package to its module."""


def _module(command: str) -> ModuleType:
    """Returns the module of a command."""
    return importlib.import_module(f"kvferry.cli.{_MODULES.get(command, command)}")


def make_parser(name: str | None) -> Parser:
    """Returns the parser of the whole command line; of the commands only the one of this name has its flags."""
    parser = Parser(prog="kvferry", description="Carries KV caches from prefill to decode workers.")
    parser.add_argument("--version", action="version", version=f"kvferry {__version__}")
    _add_log_flags(parser)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command, summary in COMMANDS.items():
        sub = commands.add_parser(command, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if command == name:
            _module(command).add_arguments(sub)
        _add_log_flags(sub, default=argparse.SUPPRESS)
    return parser


def _add_log_flags(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    quiet = default == argparse.SUPPRESS
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        default=default if quiet else False,
        help="log at level debug, and show the traceback of an error",
    )
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default=default,
        help="what is logged (default: the variable KVFERRY_LOG, else info; warning for up)",
    )


def _start_logging(args: argparse.Namespace) -> None:
    """Starts logging to stderr, and leaves the level in `args.log_level` for commands that start others."""
    level = "debug" if args.verbose else args.log_level or os.environ.get("KVFERRY_LOG", "").lower()
    args.log_level = level if level in LOG_LEVELS else _QUIET.get(args.command, "info")
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname).1s %(name)s %(message)s", stream=sys.stderr
    )


def _explained(error: FerryError, command: str) -> str:
    """Returns the message of an error; if it names a setting, with the flag that sets it."""
    if command not in _WITH_SETTINGS or not isinstance(error, ConfigError):
        return str(error)
    from kvferry.cli.support.remedies import with_flags  # late: only commands with settings need their classes

    return with_flags(str(error), command)


def main(argv: list[str] | None = None) -> int:
    """Runs one command, and returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser(next((word for word in argv if word in COMMANDS), None)).parse(argv)
    _start_logging(args)
    try:
        return int(_module(args.command).run(args))
    except FerryError as error:
        if args.verbose:
            raise
        print(f"kvferry {args.command}: {_explained(error, args.command)}", file=sys.stderr)
        if isinstance(error, IncompatiblePeer):
            return ExitCode.INCOMPATIBLE
        return ExitCode.UNREACHABLE if isinstance(error, PeerLost) else ExitCode.ERROR
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
