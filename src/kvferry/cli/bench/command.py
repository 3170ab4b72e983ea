"""`kvferry bench NAME`: each benchmark is a module of its own; `all` runs the quick form of each in its own process.

A benchmark is a module of this package with add_arguments(parser), which adds a `--json` flag, and run(args). If it has
a tuple QUICK_ARGS, `all` adds that to its arguments.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

from kvferry.cli.main import ExitCode
from kvferry.cli.support.environment import environment
from kvferry.cli.support.parser import Parser
from kvferry.cli.support.terminal import Terminal

__all__ = ["BENCHMARKS", "add_arguments", "run"]

BENCHMARKS = {
    "engine": "tokens per second of the embedded engine, compared with transformers",
    "transfer": "GB/s of direct, staged and chosen transfers, compared with one long transfer and memcpy",
    "plan": "nanoseconds and bytes per run of the planner",
    "handoff": "what a hand-off costs, compared with one engine alone",
    "turns": "a conversation's times to first token, with and without fetching, and on one engine",
    "calibrate": "measures this machine once, so that direct or staged is chosen well",
}
ALL = "all"
_NOT_IN_ALL = {"calibrate"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the name; the words after it belong to that benchmark."""
    width = max(map(len, BENCHMARKS))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        [
            *(f"  {name:{width}}  {summary}" for name, summary in BENCHMARKS.items()),
            f"  {ALL:{width}}  the quick form of all but calibrate; writes a JSON file of each into --out DIR",
            "",
            "kvferry bench NAME --help lists its flags. Comparisons with other software are in the repository:",
            "python -m benchmarks.router, .vllm, .spec and .handshake.",
        ]
    )
    parser.add_argument(
        "name", choices=[*BENCHMARKS, ALL], metavar="benchmark", help="which benchmark; one of the above"
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its own options")


def run(args: argparse.Namespace) -> ExitCode:
    """Imports the benchmark and runs it with the rest of the words."""
    if args.name == ALL:
        return _run_all(args.rest)
    module = importlib.import_module(f"kvferry.cli.bench.{args.name}")
    parser = Parser(prog=f"kvferry bench {args.name}", description=_sentence(BENCHMARKS[args.name]))
    module.add_arguments(parser)
    return ExitCode(module.run(parser.parse(args.rest)))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _run_all(rest: list[str]) -> ExitCode:
    parser = Parser(prog="kvferry bench all", description="Runs the quick form of each benchmark.")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where files go (default: out)")
    parser.add_argument("--only", nargs="+", choices=[*BENCHMARKS], metavar="NAME", help="only these (default: all)")
    args = parser.parse(rest)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    terminal = Terminal(sys.stderr)
    for name in args.only or [name for name in BENCHMARKS if name not in _NOT_IN_ALL]:
        with terminal.waiting(f"bench {name}"):
            code, results = _run_one(name)
        if code != ExitCode.OK:
            failed.append(name)
        target = args.out / f"{name}.json"
        recorded = {"benchmark": name, "exit": code, "environment": environment(), "results": results}
        target.write_text(json.dumps(recorded, indent=1) + "\n")
        print(json.dumps({"benchmark": name, "exit": code, "results": len(results), "file": str(target)}), flush=True)
    if failed:
        terminal.error(f"bench all: failed: {', '.join(failed)}; the messages are above")
        return ExitCode.ERROR
    return ExitCode.OK


def _run_one(name: str) -> tuple[int, list[object]]:
    try:
        module = importlib.import_module(f"kvferry.cli.bench.{name}")
    except ImportError as error:
        print(f"kvferry bench {name}: {error}", file=sys.stderr)
        return ExitCode.ERROR, []
    quick: tuple[str, ...] = getattr(module, "QUICK_ARGS", ())
    # In its own process: no benchmark is disturbed by the memory or the threads that another one has left.
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "bench", name, "--json", *quick],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
