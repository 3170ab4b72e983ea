"""`python -m benchmarks.vllm`: kvferry and the connector that vLLM has, in one run, in turn, as ratios of the two.

Both connectors serve the same model from the same vLLM at the same time, each with a prefill and a decode worker; every
request goes to one, then to the other. There are three ways: pull, push after prefill, and push with decode first. The
built-in connector stalls on few cores for reasons that have nothing to do with handing over; these are removed (see
tests/harness/vllm_peer.py), and `--stock` shows the figures with them. For kvferry only vLLM's own spinning on
sched_yield is removed, which is removed for both.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import main
from benchmarks.vllm.measures import (
    Fleet,
    Sample,
    grant_cores,
    hand_over,
    idle_cores,
    prompt_of,
    scatter,
    step_times,
    throughput,
    waiting_cores,
)
from kvferry.cli.main import ExitCode
from kvferry.errors import ConfigError, FerryError
from tests.harness.vllm_models import KV_HEAVY, make_model
from tests.harness.vllm_servers import base_environment
from tests.harness.vllm_zygote import Zygote

__all__ = ["MEASURES", "QUICK_ARGS", "add_arguments", "run"]

QUICK_ARGS = ("--models", "kv", "--modes", "pull", "--prompts", "512", "--repeats", "4", "--only", "ttft", "idle")
MEASURES = ("ttft", "transfer", "step", "idle", "throughput", "memory", "handshake")
_MODELS = ("kv", "smollm2")
_CONNECTORS = ("builtin", "kvferry")
_CONTEXT = 8192
_SLOW_PROMPT = 4000
"""SmolLM2 takes most of a minute on a core for a longer prompt, so that is measured only on request."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--vllm-python", metavar="PATH", help="an interpreter with vLLM (default: .venv-vllm/bin/python, or this one)"
    )
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=list(_MODELS),
                        help="kv: random weights, much KV for little arithmetic; smollm2 (default: both)")  # fmt: skip
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=("pull", "push"),
        default=["pull", "push"],
        help="transfer modes to measure (default: both)",
    )
    parser.add_argument(
        "--connectors",
        nargs="+",
        choices=_CONNECTORS,
        default=list(_CONNECTORS),
        help="connectors to measure (default: both)",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="+",
        default=[512, 2048, 8000],
        metavar="TOKENS",
        help="lengths of prompts (default: 512 2048 8000)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="repetitions of each; half with smollm2 (default: 5)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="measurements (default: all)"
    )
    parser.add_argument(
        "--full", action="store_true", help=f"also use prompts above {_SLOW_PROMPT} tokens with smollm2"
    )
    parser.add_argument("--stock", action="store_true", help="also measure both connectors as they are, each by itself")
    parser.add_argument("--json", action="store_true", help="print one object per line")


def run(args: argparse.Namespace) -> ExitCode:
    """Measures model by model and mode by mode, and prints each row as soon as it is known."""
    if args.repeats < 1 or min(args.prompts) < 1 or max(args.prompts) > _CONTEXT - 16:
        raise ConfigError(
            f"--repeats {args.repeats} --prompts {args.prompts}: repeats from 1, prompts of 1 to {_CONTEXT - 16} tokens"
        )
    python = _python(args.vllm_python)
    begun_s = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    zygote = Zygote(python, base_environment())
    try:
        with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as scratch:
            for model in args.models:
                for mode in args.modes:
                    for row in _measure(args, zygote, python, _model(model, Path(scratch)), model, mode):
                        _show(row, as_json=args.json)
    finally:
        zygote.close()
    _show_progress(f"{time.monotonic() - begun_s:.0f} s in all")
    return ExitCode.OK


def _interrupt(_number: int, _frame: object) -> None:
    """Ends on SIGTERM as on Ctrl-C: every server is ended first."""
    raise KeyboardInterrupt


def _python(given: str | None) -> str:
    if given is not None:
        if not Path(given).exists():
            raise ConfigError(f"--vllm-python {given!r} does not exist. Give an interpreter that can import vllm")
        return given
    import importlib.util

    default = Path(".venv-vllm/bin/python")
    if default.exists():
        return str(default.absolute())
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed here. Run make setup-vllm, or give an interpreter that has it: --vllm-python PATH"
        )
    return sys.executable


def _model(name: str, scratch: Path) -> Path:
    if name == "kv":
        return make_model(scratch / "kv", **KV_HEAVY)
    from kvferry.engines.mini.models.catalog import model_directory

    return model_directory("smollm2")


Row = dict[str, Any]


def _measure(args: argparse.Namespace, zygote: Zygote, python: str, model: Path, name: str, mode: str) -> Iterator[Row]:
    prompts = [one for one in args.prompts if name == "kv" or args.full or one <= _SLOW_PROMPT]
    _show_progress(f"{name}, {mode}: starting {2 * len(args.connectors)} servers")
    fleet = Fleet(zygote, python, model, mode, args.connectors, _CONTEXT, tell=_show_progress)
    with fleet:
        fleet.start()
        for way in fleet.ways:
            if "ttft" in args.only:
                # A prompt of 2,048 tokens takes SmolLM2 ten seconds on a core; the connector takes a thousandth.
                yield from _ttft(fleet, name, way, prompts, args.repeats if name == "kv" else (args.repeats + 1) // 2)
            if "transfer" in args.only and name == "kv" and mode == "pull":
                yield from _transfers(fleet, name, way, max(prompts), args.repeats)
            if "step" in args.only and name == "kv":
                yield from _steps(fleet, name, way, max(prompts))
            if "throughput" in args.only and name == "kv":
                yield from _throughput(fleet, name, way)
        if "handshake" in args.only:
            yield from _handshakes(fleet, name)
        if "idle" in args.only:
            _show_progress(f"{name}, {mode}: idle")
            yield from _each(fleet, name, mode, "idle", "idle_cores", idle_cores(fleet, 4.0))
            yield from _each(fleet, name, mode, "idle", "prefill_cores_grant_open", grant_cores(fleet, 3.0))
            if mode == "push":
                yield from _each(fleet, name, mode, "idle", "decode_cores_waiting", waiting_cores(fleet, 3.0))
        if "memory" in args.only:
            used = {key: sum(one.rss_mib() for one in pair) for key, pair in fleet.pairs.items()}
            yield from _each(fleet, name, mode, "memory", "memory_mib", used)
    if args.stock and name == "kv":
        yield from _stock(args, zygote, python, model, name, mode, prompts)


def _ttft(fleet: Fleet, name: str, way: str, prompts: Sequence[int], repeats: int) -> Iterator[Row]:
    dice = random.Random(7)
    for num_tokens in prompts:
        _show_progress(f"{name}, {way}: {num_tokens} tokens (load {os.getloadavg()[0]:.1f})")
        samples: dict[str, list[Sample]] = {connector: [] for connector in fleet.pairs}
        cpu_s = dict.fromkeys(fleet.pairs, 0.0)
        for turn in range(repeats + 1):
            order = list(fleet.pairs) if turn % 2 else list(reversed(fleet.pairs))
            for connector in order:
                before_s = sum(one.cpu_s() for one in fleet.pairs[connector])
                # SmolLM2 is slow; with the other model this touches the memory of every block that is measured later.
                length = num_tokens if turn or name == "kv" else min(num_tokens, 1024)
                sample = hand_over(fleet, connector, prompt_of(dice, length), way)
                if turn:  # the first of each length warms up caches and allocators
                    samples[connector].append(sample)
                    cpu_s[connector] += sum(one.cpu_s() for one in fleet.pairs[connector]) - before_s
        for row in _ttft_rows(name, way, num_tokens, samples, ""):
            cpu_ms = {connector: 1e3 * used_s / repeats for connector, used_s in cpu_s.items()}
            mine = cpu_ms[row["connector"]]
            yield row | {"cpu_ms": round(mine, 1), "cpu_ratio": _ratio(mine, cpu_ms.get("builtin"))}


def _ttft_rows(name: str, way: str, num_tokens: int, samples: dict[str, list[Sample]], suffix: str) -> Iterator[Row]:
    ttft = {key: 1e3 * statistics.median(one.first_token_s for one in rows) for key, rows in samples.items()}
    part = {key: 1e3 * statistics.median(one.decode_part_s for one in rows) for key, rows in samples.items()}
    for connector, rows in samples.items():
        yield {
            "measure": "ttft",
            "connector": connector + suffix,
            "mode": way,
            "model": name,
            "prompt_tokens": num_tokens,
            "ttft_ms": round(ttft[connector], 2),
            "handoff_ms": round(part[connector], 2),
            "ttft_ratio": _ratio(ttft[connector], ttft.get("builtin")),
            "handoff_ratio": _ratio(part[connector], part.get("builtin")),
            "ttft_ms_min": round(1e3 * min(one.first_token_s for one in rows), 2),
            "handoff_ms_min": round(1e3 * min(one.decode_part_s for one in rows), 2),
            "repeats": len(rows),
            "load": round(os.getloadavg()[0], 2),
        }


def _ratio(value: float, base: float | None) -> float | None:
    return round(value / base, 3) if base else None


def _each(
    fleet: Fleet,
    name: str,
    way: str,
    measure: str,
    unit: str,
    values: dict[str, float],
    *,
    rounded: int = 3,
    **more: Any,
) -> Iterator[Row]:
    for connector, value in values.items():
        yield {
            "measure": measure, "connector": connector, "mode": way, "model": name, unit: round(value, rounded),
            "ratio": _ratio(value, values.get("builtin")), **more,
        }  # fmt: skip


def _transfers(fleet: Fleet, name: str, way: str, num_tokens: int, repeats: int) -> Iterator[Row]:
    """Measures a transfer by the connector's own clock: with contiguous blocks, then with scattered ones."""
    dice = random.Random(17)
    for blocks in ("contiguous", "scattered"):
        if blocks == "scattered":
            _show_progress(f"{name}, {way}: scattering blocks")
            for pair in fleet.pairs.values():
                for server in pair:
                    scatter(server, fleet.num_blocks, dice)
        moved: dict[str, list[float]] = {connector: [] for connector in fleet.pairs}
        for _ in range(repeats):
            for connector in fleet.pairs:
                sample = hand_over(fleet, connector, prompt_of(dice, num_tokens), way, timed=True)
                if sample.transfer_s is not None:
                    moved[connector].append(1e3 * sample.transfer_s)
        medians = {connector: statistics.median(values) for connector, values in moved.items() if values}
        yield from _each(fleet, name, way, "transfer", "transfer_ms", medians, prompt_tokens=num_tokens, blocks=blocks)


def _steps(fleet: Fleet, name: str, way: str, num_tokens: int) -> Iterator[Row]:
    _show_progress(f"{name}, {way}: steps of decode while hand-offs land")
    found: dict[str, list[Any]] = {connector: [] for connector in fleet.pairs}
    for _ in range(2):
        for connector in fleet.pairs:
            found[connector].append(step_times(fleet, connector, way, num_tokens, 4))
    for key in ("step_ms_idle", "step_ms_during", "step_ms_during_p95"):
        values = {connector: statistics.fmean(one[key] for one in rows) for connector, rows in found.items()}
        yield from _each(fleet, name, way, "step", key, values, prompt_tokens=num_tokens)


def _throughput(fleet: Fleet, name: str, way: str) -> Iterator[Row]:
    _show_progress(f"{name}, {way}: eight clients")
    found: dict[str, list[float]] = {connector: [] for connector in fleet.pairs}
    for _ in range(2):
        for connector in fleet.pairs:
            found[connector].append(throughput(fleet, connector, way, requests=32, clients=8, num_tokens=512))
    values = {connector: statistics.fmean(rows) for connector, rows in found.items()}
    yield from _each(fleet, name, way, "throughput", "requests_per_s", values, prompt_tokens=512, clients=8)


def _handshakes(fleet: Fleet, name: str) -> Iterator[Row]:
    """Measures how much longer the first hand-off of a pair takes than a later one."""
    dice = random.Random(19)
    values = {}
    for connector in fleet.pairs:
        later = [hand_over(fleet, connector, prompt_of(dice, 200), fleet.ways[0]).decode_part_s for _ in range(3)]
        values[connector] = 1e3 * (fleet.first[connector].decode_part_s - statistics.median(later))
    yield from _each(fleet, name, fleet.ways[0], "handshake", "handshake_ms", values, rounded=1)


def _stock(
    args: argparse.Namespace, zygote: Zygote, python: str, model: Path, name: str, mode: str, prompts: Sequence[int]
) -> Iterator[Row]:
    """Measures each connector alone, as it is: side by side they would starve each other."""
    for connector in args.connectors:
        _show_progress(f"{name}, {mode}: {connector} as it is")
        dice = random.Random(23)
        try:
            with Fleet(zygote, python, model, mode, [connector], _CONTEXT, stock=True, tell=_show_progress) as fleet:
                fleet.start()
                for way in fleet.ways:
                    for num_tokens in prompts[:2]:
                        rows = [hand_over(fleet, connector, prompt_of(dice, num_tokens), way) for _ in range(3)]
                        yield from _ttft_rows(name, way, num_tokens, {connector: rows}, "-stock")
                yield from _each(fleet, name, mode, "idle", "idle_cores",
                                 {f"{connector}-stock": idle_cores(fleet, 4.0)[connector]})  # fmt: skip
        except FerryError as error:
            yield {
                "measure": "ttft",
                "connector": f"{connector}-stock",
                "mode": mode,
                "model": name,
                "error": str(error),
            }


def _show(row: Row, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    if "error" in row:
        print(f"{row['model']:8}{row['mode']:11}{row['connector']:14} {row['error']}", flush=True)
    elif row["measure"] == "ttft":
        print(f"{row['model']:8}{row['mode']:11}{row['connector']:14}{row['prompt_tokens']:6} tokens  "
              f"ttft {row['ttft_ms']:9.1f} ms {_times(row['ttft_ratio'])}  "
              f"decode's part {row['handoff_ms']:8.1f} ms {_times(row['handoff_ratio'])}", flush=True)  # fmt: skip
    else:
        fields = {
            key: value for key, value in row.items() if key not in ("measure", "connector", "mode", "model", "ratio")
        }
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        print(f"{row['model']:8}{row['mode']:11}{row['connector']:14}{text} {_times(row['ratio'])}", flush=True)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"(x {ratio:.2f})"


def _show_progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main("vllm", add_arguments, run, description=__doc__))
