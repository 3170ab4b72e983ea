"""`kvferry bench turns`: a conversation's times to first token, with and without fetching, and on one engine.

A turn's prompt is everything that was said before, and some new tokens. Decode has the answer before in its cache, and
prefill has not: without fetching prefill computes it again. Real processes over real NIXL, through a router; the three
ways are asked one after the other at each turn, and each has its own workers.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvferry.cli.bench.streams import show_progress, stream_completion
from kvferry.cli.main import ExitCode
from kvferry.cli.support.supervisor import Child, ChildSpec, Supervisor
from kvferry.errors import ConfigError
from kvferry.settings import TransferMode

__all__ = ["QUICK_ARGS", "add_arguments", "run"]

QUICK_ARGS = (
    "--turns",
    "3",
    "--answer-tokens",
    "64",
    "--first-tokens",
    "200",
    "--fleet",
    "1x1",
    "--conversations",
    "1",
)
_FIRST_ID, _LAST_ID = 100, 250
"""Ordinary tokens of every vocabulary that we know; their meaning does not matter."""
_START_S = 300.0
_ALONE, _WITH, _WITHOUT = "alone", "with", "without"


@dataclass(slots=True)
class _Way:
    """One of the three ways: where to ask, and whose counters say what prefill has done."""

    url: str
    prefill_urls: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Answer:
    first_s: float
    tokens: list[int]
    served: dict[str, Any]
    by_prefill: Counter[str]
    """Prompt tokens that the prefill workers have counted for it, by source."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--model", default="smollm2", help="model, as for `kvferry serve` (default: smollm2)")
    parser.add_argument("--modes", nargs="+", choices=[str(one) for one in TransferMode],
                        default=[str(one) for one in TransferMode], help="modes (default: both)")  # fmt: skip
    parser.add_argument("--fleet", default="2x2", metavar="PxD", help="prefill and decode workers (default: 2x2)")
    parser.add_argument("--turns", type=int, default=8, metavar="N", help="turns of a conversation (default: 8)")
    parser.add_argument(
        "--first-tokens", type=int, default=40, metavar="N", help="tokens of the first prompt (default: 40)"
    )
    parser.add_argument("--new-tokens", type=int, default=40, metavar="N", help="new tokens of each turn (default: 40)")
    parser.add_argument(
        "--answer-tokens", type=int, default=400, metavar="N", help="tokens of an answer (default: 400)"
    )
    parser.add_argument("--conversations", type=int, default=3, metavar="N",
                        help="conversations, one after the other; medians are shown (default: 3)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N",
                        help="threads of each engine (default: all cores)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="seed of the prompts (default: 7)")
    parser.add_argument("--json", action="store_true", help="print one object per line")


def run(args: argparse.Namespace) -> ExitCode:
    """Measures mode by mode. Prints one row per mode and turn."""
    numbers = (args.turns, args.first_tokens, args.new_tokens, args.answer_tokens, args.conversations)
    if min(numbers) < 1:
        raise ConfigError(
            f"--turns {args.turns} --first-tokens {args.first_tokens} --new-tokens {args.new_tokens} "
            f"--answer-tokens {args.answer_tokens} --conversations {args.conversations}: each must be 1 or more"
        )
    _sizes(args.fleet)
    if not args.json:
        names = ("ttft ms", "without", "alone", "computed", "fetched", "handed over", "cached")
        print(f"{'mode':6}{'turn':>5}{'prompt':>8}{''.join(f'{name:>12}' for name in names)}  tokens equal")
    for mode in map(TransferMode, args.modes):
        asyncio.run(_measure(args, mode))
    return ExitCode.OK


def _sizes(fleet: str) -> tuple[int, int]:
    """Returns the numbers of prefill and decode workers. Raises ConfigError."""
    prefill, times, decode = fleet.partition("x")
    if not (times and prefill.isdigit() and decode.isdigit() and 1 <= int(prefill) <= 64 and 1 <= int(decode) <= 64):
        raise ConfigError(f"--fleet {fleet!r}: give the numbers of prefill and decode workers, such as 2x2")
    return int(prefill), int(decode)


async def _measure(args: argparse.Namespace, mode: TransferMode) -> None:
    async with Supervisor(lambda _name, _line: None) as supervisor, aiohttp.ClientSession() as session:
        show_progress(f"starting one engine alone, and twice {args.fleet} workers, mode={mode}")
        ways = await _start(supervisor, args, mode)
        dice = random.Random(args.seed)
        for way in ways.values():  # to warm up models, handshakes and connections
            for _ in range(2 * max(_sizes(args.fleet))):
                await _ask(session, way, dice.choices(range(_FIRST_ID, _LAST_ID), k=40), 2)
        rows: list[list[dict[str, _Answer]]] = [[] for _ in range(args.turns)]
        lengths = [0] * args.turns
        for number in range(args.conversations):
            said = dice.choices(range(_FIRST_ID, _LAST_ID), k=args.first_tokens)
            for turn in range(args.turns):
                if turn:
                    said += dice.choices(range(_FIRST_ID, _LAST_ID), k=args.new_tokens)
                names = list(itertools.islice(itertools.cycle(ways), number + turn, number + turn + len(ways)))
                answers = {name: await _ask(session, ways[name], said, args.answer_tokens) for name in names}
                rows[turn].append(answers)
                lengths[turn] = len(said)
                said = [*said, *answers[_ALONE].tokens]
                times = " ".join(f"{name}={answers[name].first_s * 1e3:.0f} ms" for name in ways)
                show_progress(f"{mode}, conversation {number + 1}, turn {turn + 1}, {lengths[turn]} tokens: {times}")
        for turn, answers_of in enumerate(rows):
            _show(args, mode, turn + 1, lengths[turn], answers_of)


def _show(
    args: argparse.Namespace, mode: TransferMode, turn: int, num_tokens: int, answers: Sequence[dict[str, _Answer]]
) -> None:
    def first_ms(way: str) -> float:
        return round(statistics.median(one[way].first_s for one in answers) * 1e3, 1)

    def median_of(numbers: Sequence[int]) -> int:
        return int(statistics.median(numbers))

    fetching = [one[_WITH] for one in answers]
    row: dict[str, object] = {
        "engine": "mini",
        "mode": str(mode),
        "fleet": args.fleet,
        "turn": turn,
        "prompt_tokens": num_tokens,
        "ttft_ms": first_ms(_WITH),
        "ttft_ms_without": first_ms(_WITHOUT),
        "ttft_ms_alone": first_ms(_ALONE),
        "computed_by_prefill": median_of([one.by_prefill["recomputed"] for one in fetching]),
        "fetched": median_of([one.by_prefill["fetched"] for one in fetching]),
        "handed_over": median_of([int(one.served.get("handed_over", 0)) for one in fetching]),
        "cached": median_of([int(one.served.get("cached", 0)) for one in fetching]),
        "tokens_equal": all(len({tuple(answer.tokens) for answer in one.values()}) == 1 for one in answers),
        "conversations": args.conversations,
        "load": round(os.getloadavg()[0], 2),
    }
    if args.json:
        print(json.dumps(row), flush=True)
        return
    names = ("ttft_ms", "ttft_ms_without", "ttft_ms_alone", "computed_by_prefill", "fetched", "handed_over", "cached")
    numbers = "".join(f"{row[name]:>12}" for name in names)
    print(f"{mode:6}{turn:5}{num_tokens:8}{numbers}  {'yes' if row['tokens_equal'] else 'NO'}", flush=True)


async def _start(supervisor: Supervisor, args: argparse.Namespace, mode: TransferMode) -> dict[str, _Way]:
    """Starts all workers and both routers."""
    common = ("--port", "0", "--threads", str(args.threads), "--transfer-mode", str(mode), "--dtype", "float32")

    async def worker(name: str, role: str) -> Child:
        child = await supervisor.start(
            ChildSpec(name, ("serve", args.model, "--role", role, "--engine-id", name, *common))
        )
        await supervisor.wait_ready([child], _START_S)  # one after the other: on few cores that is quicker
        return child

    ways = {_ALONE: _Way((await worker(_ALONE, "both")).url)}
    num_prefill, num_decode = _sizes(args.fleet)
    for name, fetch in ((_WITH, "always"), (_WITHOUT, "never")):
        prefill = [(await worker(f"{name}-p{i}", "prefill")).url for i in range(num_prefill)]
        decode = [(await worker(f"{name}-d{i}", "decode")).url for i in range(num_decode)]
        flags = [word for url in prefill for word in ("--prefill", url)]
        flags += [word for url in decode for word in ("--decode", url)]
        router = await supervisor.start(ChildSpec(f"{name}-router", ("route", "--port", "0", "--fetch", fetch, *flags)))
        await supervisor.wait_ready([router], 60.0)
        ways[name] = _Way(router.url, prefill)
    return ways


async def _ask(session: aiohttp.ClientSession, way: _Way, prompt: Sequence[int], num_tokens: int) -> _Answer:
    """Asks once, and reads what the prefill workers have counted for it. Raises FerryError if there is no whole
    answer."""
    before = await _counts(session, way.prefill_urls)
    answer = await stream_completion(session, way.url, prompt, num_tokens)
    by_prefill = await _counts(session, way.prefill_urls)
    by_prefill.subtract(before)
    return _Answer(answer.first_s, answer.tokens, answer.served, by_prefill)


async def _counts(session: aiohttp.ClientSession, urls: Sequence[str]) -> Counter[str]:
    """Returns the prompt tokens that workers have counted so far, by source."""
    counts: Counter[str] = Counter()
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "kvferry_prompt_tokens_total":
                    counts[sample.labels["source"]] += int(sample.value)
    return counts
