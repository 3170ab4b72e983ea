"""`kvferry key new FILE`: makes the key that all engines of a fleet share on their side channels."""

import argparse
import sys
from pathlib import Path

from kvferry.cli.main import ExitCode
from kvferry.sidechannel.shared_key import new_key

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the one action that there is so far."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    new = actions.add_parser("new", help="make a new key", description="Make a new key, in a file for its owner only.")
    new.add_argument("file", metavar="FILE", help="the file to write; it must not exist yet")


def run(args: argparse.Namespace) -> ExitCode:
    """Writes the file, and says what to do with it."""
    new_key(Path(args.file))
    print(
        f"kvferry key: wrote {args.file}. Copy it to every machine of the fleet, and start each engine with "
        f"--key-file {args.file} (or KVFERRY_KEY_FILE={args.file})",
        file=sys.stderr,
    )
    return ExitCode.OK
