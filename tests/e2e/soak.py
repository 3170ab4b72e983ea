"""`make soak`: does memory grow with the number of requests? Real workers and a router, and every kind of request.

    python -m tests.e2e.soak --requests 20000 [--mode pull|push] [--spec JSON] [--tp 2] [--role both] [--json]

Clients send requests with prompts that are all different, through the router. A part of them hangs up, before the
answer or in it; a part is refused; a part of the hand-offs is abandoned or never begun by the other side. The resident
memory of every process is sampled on the way. Exit status 0 if, after the warm-up, no process has grown by 1 % or more,
every answer was as expected, and every block is free at the end.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.engines.mini.models.linear import PIECES
from tests.harness.fleet import Fleet, Process
from tests.harness.resident import Samples
from tests.harness.tiny_model import make_tiny_model

__all__ = ["FLAGS", "KINDS", "Soak", "report", "run_soak"]

FLAGS = (
    "--dtype", "float32", "--num-blocks", "600", "--threads", "1", "--lease-ttl", "3", "--lease-renew-every", "0.5",
    "--quarantine", "0.5", "--transfer-deadline", "5", "--log-level", "warning",
)  # fmt: skip
KINDS = {
    "whole": 50,
    "streamed": 30,
    "left in the stream": 8,
    "left before the answer": 4,
    "refused": 5,
    "abandoned by decode": 2,
    "unknown to prefill": 1,
}
"""The kinds of requests, and how many of 100 are of each. The last two go to the workers without the router."""
BAR = 0.01
"""A process that has grown by this part of its memory after the warm-up fails the soak."""

MIN_SAMPLES = 4
"""A verdict needs this many samples after the warm-up."""


@dataclass(slots=True)
class Soak:
    """What is sent, and to which fleet."""

    router: str
    """The URL of what the clients ask: a router, or one worker."""
    prefill: Process | None
    decode: Process | None
    mode: str
    vocab: int
    num_clients: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    seed: int = 1
    prefill_description: dict[str, Any] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    """How many requests ended in which way: `kind: status`."""
    num_sent: int = 0

    async def run(
        self, num_requests: int, sample: Callable[[int], None], *, every: int, until_s: float = math.inf
    ) -> None:
        """Sends this many requests, or fewer if the time ends; calls `sample` after each `every` of them."""
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

            async def client(number: int) -> None:
                dice = random.Random(f"{self.seed} {number}")
                while self.num_sent < num_requests and time.monotonic() < until_s:
                    self.num_sent += 1
                    if self.num_sent % every == 0:
                        sample(self.num_sent)
                    await self._one(session, dice)

            await self._meet_every_size(session)
            sample(0)
            await asyncio.gather(*(client(number) for number in range(self.num_clients)))

    async def _meet_every_size(self, session: aiohttp.ClientSession) -> None:
        """Lets every worker compute each number of rows for which it keeps kernels (engines/mini/models/linear.py).

        Most of them come by themselves within a thousand requests, but decode computes few prompts, so that it would
        meet the last size after tens of thousands.
        """
        dice = random.Random(self.seed)
        urls = [worker.url for worker in (self.prefill, self.decode) if worker is not None] or [self.router]
        for url in urls:
            for size in PIECES:
                prompt = [dice.randrange(4, self.vocab) for _ in range(size)]
                await self._post(session, url, {"prompt": prompt, "max_tokens": 1})
            for size in range(1, self.num_clients + 1):
                prompts = [[dice.randrange(4, self.vocab)] * 8 for _ in range(size)]
                await self._post(session, url, {"prompt": prompts, "max_tokens": 3, "ignore_eos": True})

    async def _one(self, session: aiohttp.ClientSession, dice: random.Random) -> None:
        kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
        if self.prefill is None and kind in ("abandoned by decode", "unknown to prefill"):
            kind = "whole"
        length = dice.randint(*self.prompt_tokens)
        prompt: list[int] | str = [dice.randrange(4, self.vocab) for _ in range(length)]
        if dice.random() < 0.3:  # the tiny model has a token per letter, so that this is of the same length
            prompt = "".join(dice.choice("abcdefgh ") for _ in range(length))
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": self.new_tokens,
            "ignore_eos": True,
            "temperature": dice.choice((0.0, 1.0)),
        }
        send = {
            "whole": self._whole,
            "streamed": self._streamed,
            "left in the stream": self._left_in_stream,
            "left before the answer": self._left_before,
            "refused": self._refused,
            "abandoned by decode": self._abandoned,
            "unknown to prefill": self._unknown,
        }[kind]
        try:
            outcome = await send(session, body, dice)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome = type(error).__name__
        self.outcomes[f"{kind}: {outcome}"] += 1

    async def _post(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
            return response.status, answer

    async def _whole(self, session: aiohttp.ClientSession, body: dict[str, Any], dice: random.Random) -> str:
        status, _ = await self._post(session, self.router, body)
        return str(status)

    async def _streamed(self, session: aiohttp.ClientSession, body: dict[str, Any], dice: random.Random) -> str:
        async with session.post(f"{self.router}/v1/completions", json={**body, "stream": True}) as response:
            received = await response.read()
            return f"{response.status}{'' if received.rstrip().endswith(b'[DONE]') else ' without [DONE]'}"

    async def _left_in_stream(self, session: aiohttp.ClientSession, body: dict[str, Any], dice: random.Random) -> str:
        response = await session.post(f"{self.router}/v1/completions", json={**body, "stream": True})
        await response.content.readline()
        response.close()
        return str(response.status)

    async def _left_before(self, session: aiohttp.ClientSession, body: dict[str, Any], dice: random.Random) -> str:
        asking = asyncio.ensure_future(self._post(session, self.router, body))
        await asyncio.wait([asking], timeout=dice.random() * 0.05)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        return "left"

    async def _refused(self, session: aiohttp.ClientSession, body: dict[str, Any], dice: random.Random) -> str:
        change = dice.choice(({"prompt": [self.vocab + 7]}, {"max_tokens": 10**6}, {"temperature": -1}))
        status, _ = await self._post(session, self.router, {**body, **change})
        return str(status)

    async def _abandoned(self, session: aiohttp.ClientSession, body: dict[str, Any], dice: random.Random) -> str:
        """Prefill computes a prompt that no decode worker ever claims: its lease ends."""
        assert self.prefill is not None, "only a pair hands over"
        params = {"do_remote_decode": True, "transfer_id": f"abandoned-{dice.getrandbits(64):x}"}
        body |= {"max_tokens": 1, "kv_transfer_params": params}
        status, _ = await self._post(session, self.prefill.url, body)
        return str(status)

    async def _unknown(self, session: aiohttp.ClientSession, body: dict[str, Any], dice: random.Random) -> str:
        """Decode is given a hand-off that prefill has never begun: it computes the prompt after a while."""
        assert self.prefill is not None, "only a pair hands over"
        assert self.decode is not None, "only a pair hands over"
        identity = self.prefill_description
        address = {f"remote_{name}": identity["side_channel"][name] for name in ("host", "port")}
        params = {
            "do_remote_prefill": True, "transfer_mode": self.mode, "transfer_id": f"unknown-{dice.getrandbits(64):x}",
            "remote_engine_id": identity["engine"], **address,
        }  # fmt: skip
        status, _ = await self._post(session, self.decode.url, {**body, "kv_transfer_params": params})
        return str(status)


def unexpected(outcomes: Counter[str]) -> dict[str, int]:
    """Returns the outcomes that no request may have."""
    right = {
        **{kind: {"200"} for kind in ("whole", "streamed", "left in the stream", "abandoned by decode")},
        "left before the answer": {"left"},
        "refused": {"400"},
        "unknown to prefill": {"200", "400", "500"},
    }
    wrong = {}
    for outcome, count in outcomes.items():
        kind, _, status = outcome.partition(": ")
        if status not in right[kind]:
            wrong[outcome] = count
    return wrong


def report(samples: Samples, soak: Soak, warm_up: int) -> dict[str, Any]:
    """Returns the result of a soak; `passed` is the verdict."""
    growth = {name: round(part, 4) for name, part in samples.growth(warm_up).items()}
    faults = [f"{name} grew by {part:.1%}" for name, part in growth.items() if part >= BAR]
    num_after = sum(number >= warm_up for number, _ in samples.rows)
    if num_after < MIN_SAMPLES:
        faults.append(f"{num_after} samples after the warm-up are too few: raise --requests or --seconds")
    wrong = unexpected(soak.outcomes)
    faults += [f"{count} times {outcome}" for outcome, count in wrong.items()]
    return {
        "requests": soak.num_sent, "mode": soak.mode, "warm_up": warm_up, "growth": growth, "faults": faults,
        "passed": bool(growth) and not faults, "unexpected": wrong,
        "samples": samples.rows, "outcomes": dict(sorted(soak.outcomes.items())),
    }  # fmt: skip


def run_soak(
    directory: Path,
    *,
    model: str,
    num_requests: int,
    warm_up: int,
    mode: str = "pull",
    role: str = "pair",
    flags: tuple[str, ...] = (),
    num_clients: int = 16,
    prompt_tokens: tuple[int, int] = (20, 120),
    new_tokens: int = 4,
    every: int = 1000,
    seconds: float = math.inf,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Starts a fleet, sends the requests, and returns the report. `seconds`: no more are sent after that."""
    samples, began_s = Samples(), time.monotonic()
    vocab = int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])
    with Fleet(directory, *FLAGS, *flags, model=model, mode=mode) as fleet:
        if role == "both":
            prefill = decode = None
            url = fleet.worker("both", role="both").wait_ready().url
        else:
            prefill, decode = fleet.worker("prefill", role="prefill"), fleet.worker("decode", role="decode")
            for worker in (prefill, decode):
                worker.wait_ready()
            url = fleet.route("--log-level", "warning", prefill=[prefill], decode=[decode]).url
        pids = {
            f"{process.name}{f' child {number}' if number else ''}": pid
            for process in fleet.processes
            for number, pid in enumerate(process.members())
        }

        def sample(number: int) -> None:
            row = samples.take(number, pids)
            progress(f"{number:>7,} requests, {time.monotonic() - began_s:5.0f} s: {row}")

        soak = Soak(url, prefill, decode, mode, vocab, num_clients, prompt_tokens, new_tokens)
        soak.prefill_description = prefill.describe() if prefill is not None else {}
        asyncio.run(soak.run(num_requests, sample, every=every, until_s=began_s + seconds))
        fleet.wait_blocks_free(30.0)
        sample(soak.num_sent)
    return report(samples, soak, warm_up)


def main() -> int:
    """Runs one soak, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20000, help="how many in all (default: 20000)")
    parser.add_argument("--warm-up", type=int, default=5000, help="growth counts after this many (default: 5000)")
    parser.add_argument("--every", type=int, default=1000, help="requests between two samples (default: 1000)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="sends no more after this time (default: no limit)"
    )
    parser.add_argument("--mode", choices=("pull", "push"), default="pull", help="of the hand-offs (default: pull)")
    parser.add_argument("--role", choices=("pair", "both"), default="pair", help="both: one worker alone")
    parser.add_argument("--model", help="a directory (default: a small one with random weights)")
    parser.add_argument("--spec", metavar="JSON", help="--speculative-config of the workers (default: none)")
    parser.add_argument("--tp", type=int, default=1, help="processes per worker (default: 1)")
    parser.add_argument("--clients", type=int, default=16, help="requests at once (default: 16)")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(20, 120), help="range (default: 20 120)")
    parser.add_argument("--new-tokens", type=int, default=4, help="per answer (default: 4)")
    parser.add_argument("--json", action="store_true", help="print one object instead of the table")
    args = parser.parse_args()
    flags = ("--tp", str(args.tp), *(("--speculative-config", args.spec) if args.spec else ()))
    with tempfile.TemporaryDirectory(prefix="kvferry-soak-") as scratch:
        result = run_soak(
            Path(scratch) / "fleet",
            model=args.model or str(make_tiny_model(Path(scratch) / "tiny", num_hidden_layers=1)),
            num_requests=args.requests, warm_up=args.warm_up, mode=args.mode, role=args.role, flags=flags,
            num_clients=args.clients, prompt_tokens=tuple(args.prompt_tokens), new_tokens=args.new_tokens,
            every=args.every, seconds=args.seconds,
            progress=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201  # a program of its own
        )  # fmt: skip
    if args.json:
        print(json.dumps(result))  # noqa: T201
    else:
        print(Samples(result["samples"]).table())  # noqa: T201
        print(json.dumps({name: value for name, value in result.items() if name != "samples"}, indent=1))  # noqa: T201
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
