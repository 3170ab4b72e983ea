"""The kvferry command.

A command is a module in this package with SUMMARY, add_arguments(parser) and run(args) -> ExitCode. It is imported only
when it is called. Results go to stdout, progress and errors to stderr. An error is one line with its remedy; -v adds
the traceback.
"""

import argparse
import importlib
import logging
import os
import sys
from enum import IntEnum
from types import ModuleType

from kvferry import __version__
from kvferry.errors import FerryError, IncompatiblePeer, PeerLost

__all__ = ["COMMANDS", "ExitCode", "main"]


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
    "demo": "a real model, prefilled on one worker and decoded on another",
    "doctor": "make a real hand-off between two processes, or check a fleet: say which step fails",
    "env": "print what a bug report needs",
    "facts": "save what a worker says of itself in a handshake",
    "compare": "may these two workers share a cache, and if not, why",
    "plan": "what would be copied between two layouts",
    "key": "make the key that engines share",
    "sim": "simulated hand-offs with faults, from a seed",
    "bench": "measure: engine, transfer, plan, handoff, calibrate",
}


def _module(command: str) -> ModuleType:
    """The module of a command. `bench` is a package, and its module is `bench.command`."""
    return importlib.import_module("kvferry.cli.bench.command" if command == "bench" else f"kvferry.cli.{command}")


def _parser(name: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvferry", description="Carry KV caches from prefill to decode workers.")
    parser.add_argument("--version", action="version", version=f"kvferry {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="debug logs, and tracebacks of errors")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command, summary in COMMANDS.items():
        sub = commands.add_parser(command, help=summary, description=summary)
        sub.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if command == name:
            _module(command).add_arguments(sub)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    named = next((word for word in argv if not word.startswith("-")), None)
    args = _parser(named).parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else os.environ.get("KVFERRY_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname).1s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        return int(_module(args.command).run(args))
    except FerryError as error:
        if args.verbose:
            raise
        print(f"kvferry {args.command}: {error}", file=sys.stderr)
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
