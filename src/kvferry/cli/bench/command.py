"""kvferry bench NAME: each benchmark is a module of its own; `all` runs the quick form of each, one process each.

A benchmark is a module of this package with add_arguments(parser), which has a `--json` flag, and run(args). A
tuple QUICK_ARGS, if it has one, is what `all` adds to its arguments.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

from kvferry.cli.main import ExitCode
from kvferry.cli.support.environment import environment

__all__ = ["BENCHMARKS", "add_arguments", "run"]

SUMMARY = "measure: engine, transfer, plan, handoff, calibrate"
BENCHMARKS = {
    "engine": "tokens a second of the embedded engine, beside transformers",
    "transfer": "GB/s of direct, staged and chosen transfers, beside one long one and memcpy",
    "plan": "nanoseconds and bytes a run of the planner",
    "handoff": "what a hand-off costs beside one engine alone",
    "calibrate": "measure this machine once, so that direct or staged is chosen well",
}
ALL = "all"
_NOT_IN_ALL = {"calibrate"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name; what follows it belongs to that benchmark."""
    width = max(map(len, BENCHMARKS))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        [
            *(f"  {name:{width}}  {summary}" for name, summary in BENCHMARKS.items()),
            f"  {ALL:{width}}  the quick form of each; --out DIR takes a JSON file of each",
            "",
            "kvferry bench NAME --help says more.",
        ]
    )
    parser.add_argument("name", choices=[*BENCHMARKS, ALL], metavar="NAME", help="which benchmark")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its own options")


def run(args: argparse.Namespace) -> ExitCode:
    """Import the benchmark and run it with the rest of the arguments."""
    if args.name == ALL:
        return _run_all(args.rest)
    module = importlib.import_module(f"kvferry.cli.bench.{args.name}")
    parser = argparse.ArgumentParser(prog=f"kvferry bench {args.name}", description=BENCHMARKS[args.name])
    module.add_arguments(parser)
    return ExitCode(module.run(parser.parse_args(args.rest)))


def _run_all(rest: list[str]) -> ExitCode:
    parser = argparse.ArgumentParser(prog="kvferry bench all", description="the quick form of each benchmark")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where the files go")
    parser.add_argument("--only", nargs="+", choices=[*BENCHMARKS], metavar="NAME", help="only these")
    args = parser.parse_args(rest)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.only or [name for name in BENCHMARKS if name not in _NOT_IN_ALL]:
        print(f"bench {name} ...", file=sys.stderr, flush=True)
        code, results = _run_one(name)
        if code != ExitCode.OK:
            failed.append(name)
        target = args.out / f"{name}.json"
        recorded = {"benchmark": name, "exit": code, "environment": environment(), "results": results}
        target.write_text(json.dumps(recorded, indent=1) + "\n")
        print(json.dumps({"benchmark": name, "exit": code, "results": len(results), "file": str(target)}), flush=True)
    if failed:
        print(f"kvferry bench: failed: {', '.join(failed)}; see the messages above", file=sys.stderr)
        return ExitCode.ERROR
    return ExitCode.OK


def _run_one(name: str) -> tuple[int, list[object]]:
    try:
        module = importlib.import_module(f"kvferry.cli.bench.{name}")
    except ImportError as error:
        print(f"kvferry bench {name}: {error}", file=sys.stderr)
        return ExitCode.ERROR, []
    quick: tuple[str, ...] = getattr(module, "QUICK_ARGS", ())
    # A process of its own: no benchmark measures with what another one has left in memory, or in its threads.
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "bench", name, "--json", *quick],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
