"""`python -m benchmarks.large_bodies`: what others notice while a large body arrives at a worker or at the router.

One prefill worker, one decode worker and a router. Two clients stream without a pause, and one asks for /health all the
time. Meanwhile 20 MB of words, a chat of 20 MB and 31 MB of token ids arrive, none of which can fit. For each body and
server, over all repetitions: the longest answer of that server's /health, and the longest gap between two events of a
stream. The row `nothing` has the same figures without a body: what the machine does by itself.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import main
from kvferry.cli.main import ExitCode
from kvferry.cli.support.environment import environment
from kvferry.errors import FerryError
from tests.harness.client import Stream, get, post
from tests.harness.fleet import Fleet
from tests.harness.until import until as wait_until

__all__ = ["GAP_S", "HEALTH_S", "add_arguments", "measure", "run"]

HEALTH_S, GAP_S = 0.2, 0.1
"""The aims: the longest answer of /health, and the longest gap of another stream."""
WORDS = b"the cat and a hat "
NOTHING_S = 0.5
_ALL_OF_A_STREAM = 400
NUM_STREAMS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--model", default="byte-mtp", metavar="MODEL", help="model (default: byte-mtp)")
    parser.add_argument("--mode", choices=("pull", "push"), default="pull", help="transfer mode (default: pull)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="how often each body is sent (default: 7)")
    parser.add_argument("--percent", type=int, default=100, metavar="N", help="size of the bodies (default: 100)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all rows and the environment there")
    parser.add_argument("--json", action="store_true", help="one JSON object per row on stdout")


def bodies(percent: int) -> dict[str, tuple[str, bytes]]:
    """Returns the path and the bytes of each body by its name."""
    words = WORDS * ((20 << 20) * percent // 100 // len(WORDS))
    chat = b'{"messages":[{"role":"user","content":"%b"}]}' % words
    ids = b", ".join([b"17"] * ((31 << 20) * percent // 100 // 4))
    return {
        "20 MB of words": ("/v1/completions", b'{"prompt":"%b"}' % words),
        "20 MB of chat": ("/v1/chat/completions", chat),
        "31 MB of ids": ("/v1/completions", b'{"prompt":[%b]}' % ids),
    }


@dataclass
class _Watched:
    """What the clients of one fleet see. `at` is the time at which something took this long."""

    ending: threading.Event = field(default_factory=threading.Event)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    health: list[tuple[float, float]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    latest_s: dict[int, float] = field(default_factory=dict)
    """When each stream had its latest event."""

    def stream(self, url: str, index: int) -> None:
        """Streams one answer after another, until the end."""
        number = 0
        while not self.ending.is_set():
            number += 1
            body = {"prompt": f"stream {number}", "max_tokens": _ALL_OF_A_STREAM, "ignore_eos": True}
            stream, last_s = Stream(url, body), 0.0
            for _ in stream.events():
                now_s = time.perf_counter()
                if last_s:
                    self.gaps.append((now_s, now_s - last_s))
                last_s = self.latest_s[index] = now_s
                if self.ending.is_set():
                    stream.hang_up()
                    return
            if not stream.answer.whole:
                self.broken.append(f"{stream.answer.error or stream.answer.broken}")
                return

    def ask_health(self, url: str, until: threading.Event) -> None:
        """Asks one server for its health, again and again."""
        while not until.is_set():
            began_s = time.perf_counter()
            get(url, "/health")
            now_s = time.perf_counter()
            self.health.append((now_s, now_s - began_s))
            until.wait(0.005)


@contextmanager
def _fleet(args: argparse.Namespace, directory: Path) -> Iterator[Fleet]:
    with Fleet(directory, "--threads", "1", "--num-blocks", "800", model=args.model, mode=args.mode) as fleet:
        workers = [fleet.worker("prefill", role="prefill"), fleet.worker("decode", role="decode")]
        for worker in workers:
            worker.wait_ready()
        fleet.route("--room-wait", "5", prefill=workers[:1], decode=workers[1:])
        yield fleet


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one row per body and server. Raises FerryError if a stream broke, or a body was not refused."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        _fleet(args, Path(scratch)) as fleet,
        ThreadPoolExecutor(NUM_STREAMS + 1) as pool,
    ):
        watched = _Watched()
        streams = [pool.submit(watched.stream, fleet.url, index) for index in range(NUM_STREAMS)]
        try:
            sent: dict[str, tuple[str, bytes] | None] = {"nothing": None, **bodies(args.percent)}
            for server, url in (("router", fleet.url), ("worker", fleet.workers["decode"].url)):
                for name, body in sent.items():
                    times = [_send(pool, watched, url, body) for _ in range(args.repeats)]
                    rows.append(_row(name, server, times))
        finally:
            watched.ending.set()
            for one in streams:
                one.result(60.0)
        if watched.broken:
            raise FerryError(f"a stream broke meanwhile: {watched.broken[0]}")
    return rows


def _send(
    pool: ThreadPoolExecutor, watched: _Watched, url: str, body: tuple[str, bytes] | None
) -> tuple[float, float, float]:
    """Returns how long the answer took, the longest answer of /health, and the longest gap."""
    until = threading.Event()
    began_s = time.perf_counter()
    asking = pool.submit(watched.ask_health, url, until)
    if body is None:
        until.wait(NOTHING_S)
    else:
        answer = post(url, None, path=body[0], raw=body[1])
        if answer.status not in (400, 503):
            raise FerryError(f"{len(body[1])} bytes were answered with {answer.status}, and 400 was expected")
    took_s = time.perf_counter() - began_s
    ended_s = began_s + took_s

    def gone_on() -> bool:  # a gap that began meanwhile is known when it has ended, however long it is
        latest = watched.latest_s.values()
        return bool(watched.broken) or (len(latest) == NUM_STREAMS and min(latest) > ended_s)

    wait_until(gone_on, "every stream goes on", within_s=60.0)
    until.set()
    asking.result(60.0)
    return took_s, _longest(watched.health, began_s), _longest(watched.gaps, began_s)


def _longest(found: list[tuple[float, float]], since_s: float) -> float:
    return max((took for at, took in found if at >= since_s), default=0.0)


def _row(name: str, server: str, times: list[tuple[float, float, float]]) -> dict[str, Any]:
    answers, health, gaps = zip(*times, strict=True)
    return {
        "body": name,
        "server": server,
        "answer_s": round(statistics.median(answers), 3),
        "health_median_s": round(statistics.median(health), 4),
        "health_longest_s": round(max(health), 4),
        "gap_median_s": round(statistics.median(gaps), 4),
        "gap_longest_s": round(max(gaps), 4),
    }


def run(args: argparse.Namespace) -> ExitCode:
    """Measures, and prints the rows. Exit status 1 if an aim was missed."""
    rows = measure(args)
    if args.out:
        recorded = {"benchmark": "large_bodies", "environment": environment(), "mode": args.mode, "results": rows}
        args.out.write_text(json.dumps(recorded, indent=1) + "\n")
    if not args.json:
        print(f"{'body':<18}{'to':<8}{'answer':>8}{'/health':>10}{'longest':>10}{'gap':>10}{'longest':>10}  seconds")
    for row in rows:
        if args.json:
            print(json.dumps(row))
        else:
            print(
                f"{row['body']:<18}{row['server']:<8}{row['answer_s']:>8.3f}{row['health_median_s']:>10.4f}"
                f"{row['health_longest_s']:>10.4f}{row['gap_median_s']:>10.4f}{row['gap_longest_s']:>10.4f}"
            )
    late = any(row["health_longest_s"] > HEALTH_S or row["gap_longest_s"] > GAP_S for row in rows)
    return ExitCode.ERROR if late else ExitCode.OK


if __name__ == "__main__":
    sys.exit(main("large_bodies", add_arguments, run, description=__doc__))
