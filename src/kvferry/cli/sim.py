"""`kvferry sim`: simulates hand-offs with faults, from a seed."""

import argparse
import json
import os
import secrets
import sys

from kvferry.cli.main import ExitCode
from kvferry.cli.support.terminal import Terminal, plural
from kvferry.errors import ConfigError
from kvferry.testing.simulator.mutants import MUTANTS
from kvferry.testing.simulator.run import Found, SimResult, prepare_of, simulate
from kvferry.testing.simulator.scenario import make_scenario
from kvferry.testing.simulator.shrink import shrink, trace_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--runs",
        type=int,
        default=100_000,
        metavar="N",
        help="simulate at least this many hand-offs; they come in worlds of about 2,000, and a world is "
        "always played to its end (default: 100000)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed, from 0 to 2**31 - 1 (default: a fresh one, which is printed)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of processes (default: one per core, here %(default)s)",
    )
    parser.add_argument(
        "--mutant",
        metavar="NAME",
        help=f"break the protocol on purpose; all, or one of: {', '.join(MUTANTS)} (default: none)",
    )
    parser.add_argument(
        "--world", type=int, metavar="SEED", help="play one world, as a violation names it, and print its trace"
    )
    parser.add_argument("--no-shrink", action="store_true", help="show a violation as it was found")
    parser.add_argument("--json", action="store_true", help="print one object per line")


def run(args: argparse.Namespace) -> ExitCode:
    """Simulates. ERROR when an invariant does not hold, or when a mutant is not caught."""
    if args.runs < 1 or args.jobs < 1:
        raise ConfigError(f"--runs={args.runs!r} and --jobs={args.jobs!r} must be at least 1")
    if args.seed is not None and not 0 <= args.seed < 1 << 31:
        raise ConfigError(f"--seed={args.seed!r} must be between 0 and {(1 << 31) - 1}")
    if args.world is not None:
        return _one_world(args)
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr)
    names = list(MUTANTS) if args.mutant == "all" else [args.mutant]
    good = True
    for name in names:
        with Terminal(sys.stderr).counting("hand-offs") as progress:
            result = simulate(args.runs, seed, jobs=args.jobs, mutant=name, progress=progress)
        _report(result, as_json=args.json)
        good = good and bool(result.found) is (name is not None)
        if result.found and name is None:
            _show(result.found[0], name, smaller=not args.no_shrink)
    return ExitCode.OK if good else ExitCode.ERROR


def _report(result: SimResult, *, as_json: bool) -> None:
    if as_json:
        row = {
            "seed": result.seed,
            "handoffs": result.handoffs,
            "violations": len(result.found),
            "mutant": result.mutant,
            "seconds": round(result.seconds, 3),
        }
        print(json.dumps(row), flush=True)
        return
    name = f"mutant {result.mutant}: " if result.mutant else ""
    found = "no invariant violated"
    if result.found:
        first = result.found[0]
        found = f"{plural(len(result.found), 'violation')}, the first in world {first.world_seed}: {first.what}"
    print(
        f"{name}{result.handoffs:,} hand-offs ({result.landed:,} landed, {result.events:,} events) from seed "
        f"{result.seed} in {result.seconds:.1f} s, {result.cpu_s:.1f} s of CPU: {found}",
        flush=True,
    )


def _show(found: Found, mutant: str | None, *, smaller: bool) -> None:
    prepare = prepare_of(mutant)
    scenario = make_scenario(found.world_seed)
    if smaller:
        print(f"world {found.world_seed}: looking for a shorter trace", file=sys.stderr)
        scenario = shrink(scenario, found.invariant, prepare)
    print(f"{scenario}", file=sys.stderr)
    for line in trace_of(scenario, prepare):
        print(line, file=sys.stderr)
    print(
        f"repeat it: kvferry sim --world {found.world_seed}{f' --mutant {mutant}' if mutant else ''}", file=sys.stderr
    )


def _one_world(args: argparse.Namespace) -> ExitCode:
    prepare = prepare_of(args.mutant)
    scenario = make_scenario(args.world)
    lines = trace_of(scenario, prepare)
    print(scenario)
    for line in lines:
        print(line)
    return ExitCode.OK
