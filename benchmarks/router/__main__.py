"""`python -m benchmarks.router`: what a router costs, compared with others in front of the same scripted workers.

There is one process of scripted workers, one client (this process), and one router at a time on a core of its own. Each
client request is a whole dispatch: prefill, then decode (or both at once in push mode); the counters of the workers are
checked for that. All routers are measured in turn, `--rounds` times, and medians are printed. On a shared machine only
ratios mean anything: each line has those to `plain`, a pass-through of a few lines of aiohttp.

- rps        requests per second of one core: requests by the router's processor time, with --clients clients that send
             one request after the other
- alone_p50_ms, added latency of one request at a time, within turns of all routers: see benchmarks/router/alone.py
  alone_p99_ms
- p50_ms,    added latency at half the rate that the router reached: the percentile of its answers, less that of a
  p99_ms     client that asks prefill and decode itself, in between; on few cores mostly queues of client and workers
- chunks_s   events per second of one core, by the router's processor time, with --streams streams of --chunks events
             that come in steps of --step-ms
- ttft_ms    time to the first event, one request at a time, if prefill takes --prefill-ms and decode's registration
             --registration-ms
- cpu_us     the router's processor time per request, as in rps
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.command import main
from benchmarks.router.alone import Added, Way, turns
from benchmarks.router.fleet import Counters, Script
from benchmarks.router.load import Client, Target, closed_loop, open_loop, percentile, request_bytes
from benchmarks.router.routers import ROUTERS, Running, cpu_s, install_rivals, running, start_fleet
from kvferry.cli.main import ExitCode
from kvferry.cli.support.environment import environment
from kvferry.errors import ConfigError, FerryError
from tests.harness.cores import pin

__all__ = ["QUICK_ARGS", "add_arguments", "run"]

QUICK_ARGS = ("--routers", "kvferry,plain", "--rounds", "1", "--seconds", "1")
_PATH = "/v1/completions"
_NUM_PROMPT_CHARS = 2048
_NUM_TTFT = 15
_HOST = "127.0.0.1"
_DIRECT_SHARE = 0.2
"""The share of direct requests in the rate of requests through the router."""
_NUMBERS = ("rps", "alone_p50_ms", "alone_p99_ms", "p50_ms", "p99_ms", "chunks_s", "ttft_ms", "cpu_us", "wall_rps")


@dataclass(slots=True)
class Samples:
    """The results of all rounds of one router."""

    router: str
    mode: str
    rounds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _NUMBERS})
    alone: Added = field(default_factory=Added)

    def median(self, name: str) -> float:
        """Returns the median over the rounds, or over all turns for what was measured in turns."""
        if name.startswith("alone_"):
            return float(getattr(self.alone, name.removeprefix("alone_")))
        return statistics.median(self.rounds[name])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    names = sorted({router.name for router in ROUTERS})
    parser.add_argument("--routers", type=lambda text: text.split(","), metavar="NAME,...", default=names,
                        help=f"routers to measure: {', '.join(names)} (default: all)")  # fmt: skip
    parser.add_argument("--rivals", type=Path, default=Path("out/rivals"), metavar="DIR",
                        help="folder for the routers of other projects (default: out/rivals)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds over all routers (default: 5)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="SECONDS", help="load per round (default: 2)")
    parser.add_argument("--turns", type=int, default=100, metavar="N",
                        help="turns per round, of one request through each router (default: 100)")  # fmt: skip
    parser.add_argument("--clients", type=int, default=32, metavar="N", help="clients that send at once (default: 32)")
    parser.add_argument(
        "--streams", type=int, default=256, metavar="N", help="streams that are open at once (default: 256)"
    )
    parser.add_argument("--chunks", type=int, default=64, metavar="N", help="events per stream (default: 64)")
    parser.add_argument("--step-ms", type=float, default=25.0, metavar="MS",
                        help="milliseconds between the events of a stream (default: 25)")  # fmt: skip
    parser.add_argument(
        "--prefill-ms", type=float, default=50.0, metavar="MS", help="time of prefill, for ttft_ms (default: 50)"
    )
    parser.add_argument(
        "--registration-ms",
        type=float,
        default=20.0,
        metavar="MS",
        help="time of decode's registration, for ttft_ms (default: 20)",
    )
    parser.add_argument("--json", action="store_true", help="print one object per router, then the environment")


def run(args: argparse.Namespace) -> ExitCode:
    """Measures and prints."""
    chosen = [router for router in ROUTERS if router.name in args.routers]
    unknown = set(args.routers) - {router.name for router in ROUTERS}
    if (
        unknown
        or args.rounds < 1
        or args.turns < 1
        or args.seconds <= 0
        or args.clients < 1
        or args.streams < 1
        or args.chunks < 2
    ):
        raise ConfigError(
            f"--routers {','.join(args.routers)!r} --rounds {args.rounds!r} --seconds {args.seconds!r}: give routers "
            "that `python -m benchmarks.router --help` names, and numbers above 0 (--chunks: above 1)"
        )
    if any(router.rival for router in chosen):
        install_rivals(args.rivals)
    with contextlib.ExitStack() as stack:
        fleet_pid, ports = stack.enter_context(start_fleet())
        routers = [stack.enter_context(running(router, args.rivals.absolute(), ports)) for router in chosen]
        stack.enter_context(_sharing_cores(fleet_pid, [router.pid for router in routers]))
        samples = asyncio.run(_measure_all(args, routers, ports))
    _report(args, samples)
    return ExitCode.OK


@contextlib.contextmanager
def _sharing_cores(fleet: int, routers: list[int]) -> Iterator[None]:
    """Puts routers on one core, and client and workers on another. With a single core it does nothing."""
    ours = os.sched_getaffinity(0)
    cores = sorted(ours)
    if len(cores) > 1:
        for pid in routers:
            pin(pid, {cores[0]})
        for pid in (fleet, os.getpid()):
            pin(pid, {cores[1]})
    try:
        yield
    finally:
        pin(os.getpid(), ours)


async def _measure_all(args: argparse.Namespace, routers: list[Running], ports: dict[str, int]) -> list[Samples]:
    samples = [Samples(one.router.name, one.router.mode) for one in routers]
    every = [_Turn(args, one, ports) for one in routers]
    for number in range(args.rounds):
        await _alone(args, every, samples)
        for one, kept in zip(routers, samples, strict=True):
            print(f"round {number + 1} of {args.rounds}: {kept.router} {kept.mode}", file=sys.stderr, flush=True)
            for name, value in (await _Turn(args, one, ports).measure()).items():
                kept.rounds[name].append(value)
    return samples


async def _alone(args: argparse.Namespace, every: list["_Turn"], samples: list[Samples]) -> None:
    """Measures one request at a time, in turns of all routers."""
    for turn in every:
        await turn.ready()
    ways = {turn.mode: turn.way_past() for turn in every}
    times = await turns([*ways.values(), *(turn.way_through() for turn in every)], args.turns)
    past = dict(zip(ways, times, strict=False))
    for turn, kept, through in zip(every, samples, times[len(ways) :], strict=True):
        kept.alone.through += through
        kept.alone.past += past[turn.mode]


class _Turn:
    """One measurement of one router."""

    def __init__(self, args: argparse.Namespace, running: Running, ports: dict[str, int]) -> None:
        self._args = args
        self._pid = running.pid
        self._mode = running.router.mode
        self._name = running.router.name
        self._target: Target = (_HOST, running.port)
        self._prefill: Target = (_HOST, ports[f"{self._mode}_prefill"])
        self._decode: Target = (_HOST, ports[f"{self._mode}_decode"])

    @property
    def mode(self) -> str:
        """The transfer mode of its fleet."""
        return self._mode

    async def ready(self) -> None:
        """Makes the workers answer at once, and waits until the router serves."""
        await self._script(Script())
        await self._wait_well()

    def way_through(self) -> Way:
        """A request through the router."""
        return Way(self._name, [(self._target, self._request())])

    def way_past(self) -> Way:
        """The work of the router, done by the client."""
        ask = (self._prefill, self._request(self._prefill, {"do_remote_decode": True, "transfer_id": "past"}))
        params: dict[str, object] = {"remote_block_ids": [[*range(32)]]}
        if self._mode == "push":
            params = {"transfer_mode": "push", "transfer_id": "past"}
        take = (self._decode, self._request(self._decode, params))
        return Way("the workers", [ask, take], at_once=self._mode == "push")

    async def measure(self) -> dict[str, float]:
        """Measures every number."""
        await self.ready()
        rps, wall_rps = await self._throughput()
        p50_ms, p99_ms = await self._added(wall_rps / 2)
        return {
            "rps": rps,
            "wall_rps": wall_rps,
            "cpu_us": 1e6 / rps,
            "p50_ms": p50_ms,
            "p99_ms": p99_ms,
            "chunks_s": await self._chunks(),
            "ttft_ms": await self._ttft(),
        }

    async def _throughput(self) -> tuple[float, float]:
        await closed_loop(self._target, [self._request()], self._args.clients, 0.3)
        before = await self._counters()
        began_cpu_s = cpu_s(self._pid)
        began_s = asyncio.get_running_loop().time()
        replies = await closed_loop(self._target, [self._request()], self._args.clients, self._args.seconds)
        wall_s = asyncio.get_running_loop().time() - began_s
        router_s = cpu_s(self._pid) - began_cpu_s
        self._check([reply.status for reply in replies], before, await self._counters())
        return len(replies) / max(router_s, 0.01), len(replies) / wall_s

    def _check(self, statuses: list[int], before: Counters, after: Counters) -> None:
        """Checks that every request was answered, and reached prefill and decode with the parameters of a hand-off."""
        decoded = "push" if self._mode == "push" else "pull"
        by_workers = (after.prefill - before.prefill, getattr(after, decoded) - getattr(before, decoded))
        if set(statuses) != {200} or by_workers != (len(statuses), len(statuses)):
            raise FerryError(
                f"{self._name} ({self._mode}): {len(statuses)} requests were answered with {sorted(set(statuses))}, "
                f"but prefill got {by_workers[0]} and decode {by_workers[1]} with a hand-off: it does not do the "
                "work that is measured. Leave it out with --routers"
            )

    async def _added(self, rate: float) -> tuple[float, float]:
        """Measures both at once, so that other load on the machine affects both."""
        ask = self._request(self._prefill, {"do_remote_decode": True})
        take = self._request(self._decode, {"remote_block_ids": [[*range(32)]]})
        targets, requests = [self._prefill, self._decode], [ask, take]
        if self._mode == "push":  # both at once: not slower than decode alone, with which it is compared
            targets, requests = targets[1:], requests[1:]
        through, direct = await asyncio.gather(
            open_loop([self._target], [self._request()], rate, self._args.seconds),
            open_loop(targets, requests, rate * _DIRECT_SHARE, self._args.seconds),
        )
        times = [[1e3 * reply.total_s for reply in replies] for replies in (through, direct)]
        added = [percentile(times[0], percent) - percentile(times[1], percent) for percent in (50, 99)]
        return added[0], added[1]

    async def _chunks(self) -> float:
        args = self._args
        await self._script(Script(step_ms=args.step_ms, chunks=args.chunks))
        began_cpu_s = cpu_s(self._pid)
        clients = [await Client.connect(self._target) for _ in range(args.streams)]
        replies = await asyncio.gather(*(client.send(self._request(stream=True)) for client in clients))
        router_s = cpu_s(self._pid) - began_cpu_s
        for client in clients:
            client.close()
        broken = [reply for reply in replies if b"data: [DONE]" not in reply.body]
        if broken:
            raise FerryError(
                f"{self._name}: {len(broken)} of {args.streams} streams were incomplete, the first with status "
                f"{broken[0].status}, {broken[0].body[-200:]!r}. Leave it out with --routers"
            )
        num_chunks: int = args.streams * args.chunks
        return num_chunks / max(router_s, 0.01)

    async def _ttft(self) -> float:
        script = Script(prefill_ms=self._args.prefill_ms, registration_ms=self._args.registration_ms, chunks=2)
        await self._script(script)
        client = await Client.connect(self._target)
        replies = [await client.send(self._request(stream=True)) for _ in range(_NUM_TTFT)]
        client.close()
        return 1e3 * percentile([reply.first_byte_s for reply in replies], 50)

    # ---- the scripted workers ----

    def _request(self, target: Target | None = None, params: object = None, *, stream: bool = False) -> bytes:
        body: dict[str, object] = {
            "model": "scripted", "prompt": "x" * _NUM_PROMPT_CHARS, "max_tokens": 16, "temperature": 0.0,
        }  # fmt: skip
        if stream:
            body["stream"] = True
        if params is not None:
            body["kv_transfer_params"] = params
        return request_bytes(target or self._target, _PATH, msgspec.json.encode(body))

    async def _script(self, script: Script) -> None:
        client = await Client.connect(self._decode)
        await client.send(request_bytes(self._decode, "/script", msgspec.json.encode(script)))
        client.close()

    async def _counters(self) -> Counters:
        client = await Client.connect(self._decode)
        reply = await client.send(request_bytes(self._decode, "/counters", b"", "GET"))
        client.close()
        return msgspec.json.decode(reply.body, type=Counters)

    async def _wait_well(self) -> None:
        """Waits until the router serves whole hand-offs: some ask their workers only after they listen."""
        status = 0
        for _ in range(200):
            before = await self._counters()
            client = await Client.connect(self._target)
            status = (await client.send(self._request())).status
            client.close()
            after = await self._counters()
            if status == 200 and after.prefill > before.prefill and after.alone == before.alone:
                return
            await asyncio.sleep(0.1)
        raise FerryError(f"{self._name} ({self._mode}) does not serve (status {status}). Leave it out with --routers")


def _report(args: argparse.Namespace, samples: list[Samples]) -> None:
    plain = next((one for one in samples if one.router == "plain"), None)
    for one in samples:
        numbers = {name: round(one.median(name), 3) for name in _NUMBERS}
        ratios = {}
        if plain is not None:
            ratios = {
                f"{name}_of_plain": round(one.median(name) / plain.median(name), 3) for name in ("rps", "chunks_s")
            }
            ratios["alone_p50_ms_over_plain"] = round(one.alone.p50_ms - plain.alone.p50_ms, 3)
        if args.json:
            print(json.dumps({"router": one.router, "mode": one.mode, **numbers, **ratios}), flush=True)
        else:
            ratio_text = (
                f"  x{ratios['rps_of_plain']:.2f} and x{ratios['chunks_s_of_plain']:.2f} of plain" if ratios else ""
            )
            print(
                f"{one.router:12} {one.mode:5} {numbers['rps']:8.0f} requests/s per core "
                f"({numbers['cpu_us']:6.0f} us), "
                f"alone +{numbers['alone_p50_ms']:.2f} ms p50, +{numbers['alone_p99_ms']:.2f} ms p99, "
                f"at half +{numbers['p50_ms']:.2f} ms p50, +{numbers['p99_ms']:.2f} ms p99, "
                f"{numbers['chunks_s']:8.0f} chunks/s per core, first token {numbers['ttft_ms']:6.1f} ms{ratio_text}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"bench": "router", "environment": environment()}), flush=True)


if __name__ == "__main__":
    sys.exit(main("router", add_arguments, run, description=__doc__))
