"""`kvferry bench engine`: tokens per second of the embedded engine, of transformers and, if it is there, of vLLM.

Each engine and dtype runs in a process of its own, one after the other, with the same model, prompts and threads.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.cli.bench import engine_one
from kvferry.cli.main import ExitCode
from kvferry.cli.support.environment import environment
from kvferry.errors import ConfigError

__all__ = ["QUICK_ARGS", "add_arguments", "run"]

QUICK_ARGS = ("--repeats", "1", "--new-tokens", "24")
DEFAULT_VLLM = Path(".venv-vllm/bin/python")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--model", default="smollm2", help="model, as for `kvferry serve` (default: smollm2)")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=[*engine_one.ENGINES],
        help="engines to measure (default: all that are installed)",
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"],
                        help="dtypes to measure (default: both)")  # fmt: skip
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="requests at once (default: 1 8 32)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=256, metavar="TOKENS", help="length of a prompt (default: 256)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=48, metavar="TOKENS", help="length of an answer (default: 48)"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="repetitions; the best counts (default: 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N",
                        help="threads of each engine (default: all cores)")  # fmt: skip
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH", help=f"a Python that has vLLM (default: {DEFAULT_VLLM})"
    )
    parser.add_argument("--vllm-eager", action="store_true", help="run vLLM without torch.compile; it starts sooner")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write engine.json there, with its environment (default: none)"
    )
    parser.add_argument("--json", action="store_true", help="print one object per line")


def run(args: argparse.Namespace) -> ExitCode:
    """Runs all of them, one after the other."""
    from kvferry.engines.mini.models.catalog import model_directory

    if args.new_tokens < 2 or args.repeats < 1 or args.prompt_tokens < 1 or min(args.batches) < 1:
        raise ConfigError("--new-tokens must be 2 or more, and --repeats, --prompt-tokens and --batches 1 or more")
    directory = model_directory(args.model)
    pythons = _pythons(args)
    results, failed = [], []
    if not args.json:
        print(f"{'engine':14}{'dtype':10}{'batch':>6}{'prefill tok/s':>16}{'decode tok/s':>15}")
    for dtype in args.dtypes:
        for engine, python in pythons.items():
            try:
                for result in _measure(args, engine, python, dtype, directory):
                    results.append(result)
                    _show(result, as_json=args.json)
            except subprocess.CalledProcessError as error:
                failed.append(f"{engine} {dtype}")
                print(
                    f"kvferry bench engine: {engine} {dtype} ended with exit status {error.returncode}; its messages "
                    "are above, and the other engines go on",
                    file=sys.stderr,
                )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        recorded = {"benchmark": "engine", "environment": environment(), "failed": failed, "results": results}
        (args.out / "engine.json").write_text(json.dumps(recorded, indent=1) + "\n")
    return ExitCode.ERROR if failed else ExitCode.OK


def _pythons(args: argparse.Namespace) -> dict[str, str]:
    """Returns the Python that runs each engine."""
    found = {"mini": sys.executable, "transformers": sys.executable}
    vllm = args.vllm_python or (DEFAULT_VLLM if DEFAULT_VLLM.exists() else None)
    if vllm is not None:
        if not vllm.exists():
            raise ConfigError(
                f"--vllm-python={str(vllm)!r} does not exist. Give the Python of an environment that has vLLM."
            )
        found["vllm"] = str(vllm)
    wanted = args.engines or [*found]
    if "vllm" in wanted and "vllm" not in found:
        raise ConfigError(
            "--engines vllm: no Python with vLLM was found. Give one with --vllm-python, or run make setup-vllm."
        )
    return {engine: found[engine] for engine in wanted}


def _measure(
    args: argparse.Namespace, engine: str, python: str, dtype: str, directory: Path
) -> Iterator[dict[str, Any]]:
    command = [python, engine_one.__file__, engine, "--model", str(directory), "--dtype", dtype]
    for name in ("threads", "prompt_tokens", "new_tokens", "repeats"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--batches", *map(str, args.batches), *(["--vllm-eager"] if args.vllm_eager else [])]
    # vLLM takes its number of threads from here; for the others only libraries see it while they start.
    variables = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None, "stdout is a pipe"
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    print(
        f"{result['engine']:14}{result['dtype']:10}{result['batch']:>6}"
        f"{result['prefill_tok_s']:>16,.0f}{result['decode_tok_s']:>15,.1f}",
        flush=True,
    )
