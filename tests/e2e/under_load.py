"""`make load`: 2 + 2 workers behind a router under aiperf, a tenth of its requests cancelled, workers killed in turn.

    python -m tests.e2e.under_load --aiperf DIR/bin/aiperf [--seconds 120] [--mode pull] [--model smollm2] [--json]

aiperf makes the load and its figures (it needs a virtual environment of its own: `pip install aiperf`); beside it
checked clients ask what they know the answer of, and a tenth of those hang up as well. Every `--kill-every` seconds a
prefill and a decode worker are killed (SIGKILL) and restarted, one after the other. At the end: no wrong text, no hang,
no leak (blocks, processes, shared memory), and every failure has a reason. Exit 0 if so. Without --aiperf only the
checked clients ask.
"""

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.harness.client import get, metrics
from tests.harness.fleet import Fleet
from tests.harness.load import Load, Tally, ask_alone
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

AIPERF_S = 400.0
"""How long aiperf may take: it loads its tokenizer in several processes and summarises at the end."""
ROWS = (
    "Request Count", "Error Request Count", "Request Throughput (requests/sec)", "Request Latency (ms)",
    "Time to First Token (ms)", "Inter Token Latency (ms)",
)  # fmt: skip
"""Rows of aiperf's table. It counts what it cancels as errors."""
NAMES = ("p0", "p1", "d0", "d1")
FLAGS = (
    "--dtype", "float32", "--num-blocks", "1500", "--threads", "1", "--lease-ttl", "5", "--lease-renew-every", "1",
    "--quarantine", "1", "--transfer-deadline", "20",
)  # fmt: skip


def main() -> int:
    """Runs the load, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", help="its program; without it only the checked clients ask")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long (default: 120)")
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds between kills (default: 20)")
    parser.add_argument("--mode", choices=("pull", "push"), default="pull")
    parser.add_argument("--model", help="smollm2, or a directory (default: a small one with random weights)")
    parser.add_argument("--concurrency", type=int, default=8, help="of aiperf (default: 8)")
    parser.add_argument(
        "--monitor",
        action="store_true",
        help="report what held the event loops of workers and router longest; they are then asyncio's",
    )
    parser.add_argument("--json", action="store_true", help="one object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-load-") as scratch:
        result = _run(args, Path(scratch))
    print(json.dumps(result, indent=None if args.json else 1))  # noqa: T201  # a program of its own
    return 0 if not result["faults"] else 1


def _run(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    model = args.model or str(make_tiny_model(scratch / "tiny"))
    with Fleet(scratch / "fleet", *FLAGS, model=model, mode=args.mode, monitored=args.monitor) as fleet:
        workers = [fleet.worker(name, role="prefill" if name[0] == "p" else "decode") for name in NAMES]
        for process in workers:
            process.wait_ready()
        router = fleet.route("--health-timeout", "2", "--hung-after", "4", prefill=workers[:2], decode=workers[2:])
        dice = random.Random(1)
        prompts = [[dice.randint(3, 263) for _ in range(dice.randint(20, 300))] for _ in range(24)]
        questions = ask_alone(workers[2].url, prompts, 24)
        load = Load(router.url, questions, num_clients=2, hang_up=0.1)
        outside = _start_aiperf(args, router.url, model, scratch) if args.aiperf else None
        if outside is not None:
            until(lambda: _records(scratch) or outside.poll() is not None, "aiperf asks", within_s=AIPERF_S)
        kills = _kill_in_turn(fleet, args.seconds, args.kill_every)
        tally = load.end()
        figures = _end_aiperf(outside, args, scratch) if outside is not None else {}
        fleet.wait_blocks_free(60.0)
        counted = metrics(router.url)
        view = get(router.url, "/v1/kvferry")
        result = {
            "mode": args.mode, "model": args.model or "tiny", "seconds": args.seconds, "kills": kills,
            **_summary(tally), "router": _router_figures(counted), "aiperf": figures,
            "pairs": {f"{one['prefill']} {one['decode']}": [one["landed"], one["failed"]] for one in view["pairs"]},
        }  # fmt: skip
    return {**result, "longest_holds": fleet.longest_holds()} if args.monitor else result


def _records(scratch: Path) -> int:
    """Returns the number of bytes of requests that aiperf has recorded."""
    return sum(path.stat().st_size for path in (scratch / "aiperf").rglob("profile_export.jsonl"))


def _kill_in_turn(fleet: Fleet, seconds: float, every_s: float) -> list[str]:
    pause, until_s, killed = threading.Event(), time.monotonic() + seconds, []
    turn = 0
    while time.monotonic() + every_s < until_s:
        pause.wait(every_s)
        name = ("p0", "d0", "p1", "d1")[turn % 4]
        turn += 1
        began_s = time.monotonic()
        fleet.workers[name].restart()
        killed.append(f"{name} back after {time.monotonic() - began_s:.1f} s")
    pause.wait(max(0.0, until_s - time.monotonic()))
    return killed


def _summary(tally: Tally) -> dict[str, Any]:
    return {
        "checked": tally.ended, "whole": tally.whole, "handed_over": tally.handed_over, "hung_up": tally.hung_up,
        "longest_s": round(tally.latest_s, 2), "errors": dict(tally.errors), "faults": tally.faults[:5],
        "recomputed_because": sorted({why[:160] for why in tally.whys})[:8],
    }  # fmt: skip


def _router_figures(counted: dict[str, float]) -> dict[str, float]:
    wanted = ("requests_total", "routes_total", "decode_only_total", "worker_failures_total")
    return {
        name.removeprefix("kvferry_router_"): value
        for name, value in sorted(counted.items())
        if name.startswith("kvferry_router_") and any(word in name for word in wanted)
    }


def _start_aiperf(args: argparse.Namespace, url: str, model: str, scratch: Path) -> "subprocess.Popen[bytes]":
    tokenizer = model if Path(model).is_dir() else str(make_tiny_model(scratch / "tokenizer"))
    argv = [
        args.aiperf, "profile", "--model", "model", "--tokenizer", tokenizer, "--url", url, "--endpoint-type",
        "completions", "--streaming", "--concurrency", str(args.concurrency), "--benchmark-duration", str(args.seconds),
        "--isl", "128", "--osl", "24", "--request-cancellation-rate", "10", "--request-cancellation-delay", "0.2",
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--ui", "none",
        "--output-artifact-dir", str(scratch / "aiperf"),
    ]  # fmt: skip
    with (scratch / "aiperf.log").open("wb") as log:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _end_aiperf(process: "subprocess.Popen[bytes]", args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    try:
        status = process.wait(args.seconds + AIPERF_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers are separate processes
        process.wait()
        status = -9
    found: dict[str, Any] = {"exit": status}
    for path in (scratch / "aiperf").rglob("profile_export_aiperf.csv"):
        header: list[str] = []
        for row in csv.reader(path.open()):
            header = row if row and row[0] == "Metric" else header
            if row and row[0] in ROWS:
                columns = dict(zip(header, row, strict=False))
                found[row[0]] = {
                    name: columns[name] for name in ("avg", "p50", "p90", "p99", "Value") if columns.get(name)
                }
    if status:
        found["log"] = (scratch / "aiperf.log").read_text(errors="replace")[-2000:]
    return found


if __name__ == "__main__":
    sys.exit(main())
