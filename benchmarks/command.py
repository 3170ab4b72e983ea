"""The command line that the benchmarks share: `python -m benchmarks.NAME`."""

import argparse
import sys
from collections.abc import Callable

from kvferry.cli.main import ExitCode
from kvferry.cli.support.parser import Parser
from kvferry.errors import FerryError, IncompatiblePeer, PeerLost

__all__ = ["main"]


def main(
    name: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], ExitCode],
    argv: list[str] | None = None,
    *,
    description: str | None = None,
) -> ExitCode:
    """Runs one benchmark and returns its exit status. An error is one line on stderr, as from the kvferry command."""
    parser = Parser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    try:
        return ExitCode(run(parser.parse(argv)))
    except FerryError as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        if isinstance(error, IncompatiblePeer):
            return ExitCode.INCOMPATIBLE
        return ExitCode.UNREACHABLE if isinstance(error, PeerLost) else ExitCode.ERROR
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
