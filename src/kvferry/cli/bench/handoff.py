"""`kvferry bench handoff`: what a hand-off costs compared with one engine alone, in one run, as ratios.

First the time to the first token, over HTTP, through a router, from real processes over real NIXL: of prefill + decode,
of the same without progress and first token (`plain`), and of one engine alone. Each prompt is new, so that no cache
has it. Then the bytes per second of a large hand-off and of one long bare transfer, and the step time of the engine
while it is idle and during the hand-off.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from kvferry.cli.bench.streams import show_progress, stream_completion
from kvferry.cli.main import ExitCode
from kvferry.cli.support.supervisor import Child, ChildSpec, Supervisor
from kvferry.errors import ConfigError, FerryError
from kvferry.settings import TransferMode

if TYPE_CHECKING:
    from kvferry.cli.bench.handoff_rates import Rates

__all__ = ["QUICK_ARGS", "Ttft", "add_arguments", "run"]

QUICK_ARGS = ("--prompts", "512", "--repeats", "2", "--mib", "256")
_ANSWER_TOKENS = 2
_FIRST_ID, _LAST_ID = 100, 250
"""Ordinary tokens of every vocabulary that we know; their meaning does not matter."""
_WAYS = {"plain": ("--progress", "off", "--first-token", "off"), "whole": ()}


@dataclass(frozen=True, slots=True)
class Ttft:
    """Medians of one mode and prompt length, in seconds."""

    alone_s: float
    whole_s: float
    plain_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--model", default="smollm2", help="model, as for `kvferry serve` (default: smollm2)")
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="+",
        default=[512, 2000, 8000],
        metavar="TOKENS",
        help="lengths of prompts (default: 512 2000 8000)",
    )
    parser.add_argument("--modes", nargs="+", choices=[str(one) for one in TransferMode],
                        default=[str(one) for one in TransferMode], help="modes (default: both)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="measurements of each (default: 3)")
    parser.add_argument(
        "--mib", type=int, default=1024, metavar="MIB", help="size of the large transfer (default: 1024)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="threads of each engine (default: all cores)",
    )
    parser.add_argument("--json", action="store_true", help="print one object per line")


def run(args: argparse.Namespace) -> ExitCode:
    """Measures rates first, then times, mode by mode. Prints one row per mode and prompt length."""
    if min(args.prompts) < 1 or args.repeats < 1 or args.mib < 1:
        raise ConfigError(f"--prompts {args.prompts} --repeats {args.repeats} --mib {args.mib}: each must be 1 or more")
    # Imported late: it loads torch, which --help and wrong flags do not need.
    from kvferry.cli.bench.handoff_rates import load_engine, measure_one_long, measure_rates

    num_bytes = args.mib << 20
    one_long: dict[TransferMode, float] = {}
    rates: dict[TransferMode, Rates] = {}
    engine = load_engine(args.model, args.threads)
    for mode in map(TransferMode, args.modes):
        show_progress(f"rates of {mode}, {args.mib} MiB")
        one_long[mode] = measure_one_long(mode, num_bytes, args.repeats)
        rates[mode] = measure_rates(mode, num_bytes, engine, args.repeats)
    engine.close()
    del engine
    if not args.json:
        print(f"{'mode':6}{'prompt':>8}{'ttft':>8}{'plain':>8}  (over one engine){'GB/s':>8}{'one long':>10}  step ms")
    for mode in map(TransferMode, args.modes):
        times = asyncio.run(_times(args, mode))
        for num_tokens, ttft in times.items():
            _show(args, mode, num_tokens, ttft, rates[mode], one_long[mode])
    return ExitCode.OK


def _show(
    args: argparse.Namespace, mode: TransferMode, num_tokens: int, ttft: Ttft, rates: "Rates", one_long_gbps: float
) -> None:
    row = {
        "mode": str(mode),
        "prompt_tokens": num_tokens,
        "ttft_ratio": round(ttft.whole_s / ttft.alone_s, 3),
        "ttft_ratio_plain": round(ttft.plain_s / ttft.alone_s, 3),
        "ttft_ms_alone": round(ttft.alone_s * 1e3, 1),
        "gbps": round(rates.gbps, 3),
        "one_long_gbps": round(one_long_gbps, 3),
        "step_ms_idle": round(rates.step_ms_idle, 3),
        "step_ms_during": round(rates.step_ms_during, 3),
        "transfer_mib": args.mib,
        "repeats": args.repeats,
        "load": round(os.getloadavg()[0], 2),
    }
    if args.json:
        print(json.dumps(row), flush=True)
        return
    print(
        f"{mode:6}{num_tokens:8}{row['ttft_ratio']:8.3f}{row['ttft_ratio_plain']:8.3f}{'':18}{row['gbps']:8.2f}"
        f"{row['one_long_gbps']:10.2f}  {row['step_ms_idle']:.1f} -> {row['step_ms_during']:.1f}",
        flush=True,
    )


async def _times(args: argparse.Namespace, mode: TransferMode) -> dict[int, Ttft]:
    async with Supervisor(lambda _name, _line: None) as supervisor, aiohttp.ClientSession() as session:
        show_progress(f"starting one engine alone, and prefill + decode twice, mode={mode}")
        urls = await _start(supervisor, args, mode)
        dice = random.Random(7)
        for url in urls.values():  # to warm up models, handshakes and connections
            await _first_token_s(session, url, _prompt(dice, 40))
            await _first_token_s(session, url, _prompt(dice, 40))
        times = {}
        for num_tokens in args.prompts:
            seconds: dict[str, list[float]] = {name: [] for name in urls}
            for _ in range(args.repeats):
                for name, url in urls.items():
                    seconds[name].append(await _first_token_s(session, url, _prompt(dice, num_tokens)))
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            times[num_tokens] = Ttft(medians["alone"], medians["whole"], medians["plain"])
            show_progress(
                f"{mode}, {num_tokens} tokens: " + " ".join(f"{k}={v * 1e3:.0f} ms" for k, v in medians.items())
            )
        return times


async def _start(supervisor: Supervisor, args: argparse.Namespace, mode: TransferMode) -> dict[str, str]:
    """Starts five workers and two routers, and returns the address of each way."""
    common = ("--port", "0", "--threads", str(args.threads), "--transfer-mode", str(mode), "--no-prefix-caching")
    specs = [ChildSpec("alone", ("serve", args.model, "--role", "both", *common))]
    for name, flags in _WAYS.items():
        for role in ("prefill", "decode"):
            argv = ("serve", args.model, "--role", role, "--engine-id", f"{name}-{role}", *common, *flags)
            specs.append(ChildSpec(f"{name}-{role}", argv))
    workers: dict[str, Child] = {}
    for spec in specs:  # one after the other: on few cores that is quicker than side by side
        workers[spec.name] = await supervisor.start(spec)
        await supervisor.wait_ready([workers[spec.name]], 300.0)
    urls = {"alone": workers["alone"].url}
    for name in _WAYS:
        pair = ("--prefill", workers[f"{name}-prefill"].url, "--decode", workers[f"{name}-decode"].url)
        router = await supervisor.start(ChildSpec(f"{name}-router", ("route", "--port", "0", *pair)))
        await supervisor.wait_ready([router], 60.0)
        urls[name] = router.url
    return urls


def _prompt(dice: random.Random, num_tokens: int) -> list[int]:
    return dice.choices(range(_FIRST_ID, _LAST_ID), k=num_tokens)


async def _first_token_s(session: aiohttp.ClientSession, url: str, prompt: Sequence[int]) -> float:
    """Returns the seconds from a request to its first token. Raises FerryError if the prompt was not handed over."""
    answer = await stream_completion(session, url, prompt, _ANSWER_TOKENS)
    served = answer.served
    if served["mode"] is not None and served["handed_over"] < len(prompt) - 1:
        raise FerryError(f"a prompt of {len(prompt)} tokens was not handed over, so this measures nothing: {served}")
    return answer.first_s
