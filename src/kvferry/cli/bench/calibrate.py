"""`kvferry bench calibrate`: measures this machine once, so that direct or staged is chosen by its own figures.

Two processes move bytes over real NIXL. The result is the file that `load_cost_model` reads; workers read it at their
start.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from kvferry.cli.bench.transfer import DECODE, PREFILL, measure_case
from kvferry.cli.main import ExitCode
from kvferry.cli.support.environment import environment
from kvferry.errors import ConfigError, TransferError
from kvferry.layout.blocks import Runs
from kvferry.layout.packing import PackBox, PackPlan, Side
from kvferry.testing.ends import LocalEnd, ProcessEnd
from kvferry.transport.base import Operation
from kvferry.transport.staging.chunks import CHUNK_BYTES
from kvferry.transport.staging.cost import CostModel, calibration_path, load_cost_model, save_cost_model
from kvferry.transport.staging.packer import unpack

__all__ = ["add_arguments", "measure", "run"]

RUN_BYTES = (256, 1024, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20)
PIECE_BYTES = (64, 256, 1024, 4096, 32 << 10, 256 << 10)
MAX_RUNS = 40_000
BLOCK_BYTES = 512 << 10
"""The bytes of a block of all layers, as in a block-major cache."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--mib", type=int, default=128, metavar="MIB", help="memory in which runs are moved (default: 128)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each point (default: 5)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of the copies (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, but keep the old calibration")
    parser.add_argument("--json", action="store_true", help="print one object per line: each point, then the model")


def run(args: argparse.Namespace) -> ExitCode:
    """Measures, prints and saves."""
    if not args.dry_run:
        _check_writable()  # before minutes are spent
    model = measure(args.mib << 20, args.repeats, args.threads, as_json=args.json)
    if args.json:
        print(json.dumps({"overlap": round(model.overlap, 3), "start_s": model.start_s, "origin": model.origin}))
    else:
        print(f"overlap of wire and copy: {model.overlap:.2f}")
    if not args.dry_run:
        path = save_cost_model(model)
        if not args.json:
            print(f"saved to {path}")
    return ExitCode.OK


def _check_writable() -> None:
    try:
        save_cost_model(load_cost_model(), calibration_path().with_suffix(".try"))
        calibration_path().with_suffix(".try").unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(calibration_path())!r} ({error}). Set KVFERRY_CACHE to another folder"
        ) from error


def measure(num_bytes: int, repeats: int, num_threads: int, *, as_json: bool) -> CostModel:
    """Starts two processes, measures the curves between them and the overlap, and prints each point."""
    threads = {"OMP_NUM_THREADS": str(num_threads)}
    ends = [ProcessEnd("nixl", name, (num_bytes,), environment=threads, wait=False) for name in (PREFILL, DECODE)]
    prefill, decode = ends
    try:
        for end in ends:
            end.wait_ready()
            end.timeout_s = 600.0
        for end, other in ((prefill, decode), (decode, prefill)):
            end.transport.connect(other.name, other.transport.metadata(), other.regions)
        for end in ends:
            end.run(_touch)
        found = environment()
        model = CostModel(
            read=decode.run(_transfers, Operation.READ, repeats),
            write=decode.run(_transfers, Operation.WRITE, repeats),
            copy=decode.run(_copies, num_threads, repeats),
            overlap=0.0,
            origin=f"{found['cpu']}, {found['cores']} cores",
        )
        for name, curve in (("read", model.read), ("write", model.write), ("copy", model.copy)):
            for length, seconds in curve:
                _show(as_json, name, length, seconds)
        # Without overlap the prediction is an upper bound; the overlap is how far below it the measurement is.
        row = measure_case("e", num_bytes, repeats, num_threads, prefill, decode, timeout_s=600.0)
    finally:
        for end in ends:
            end.close()
    return _with_overlap(model, row)


def _show(as_json: bool, name: str, length: int, seconds: float) -> None:
    gbps = length / seconds / 1e9
    if as_json:
        print(json.dumps({"curve": name, "run_bytes": length, "ns": round(seconds * 1e9, 1), "gbps": round(gbps, 3)}))
    else:
        print(f"{name:6} {length:9} bytes per run  {seconds * 1e9:12.0f} ns  {gbps:6.2f} GB/s", flush=True)


def _with_overlap(model: CostModel, row: dict[str, object]) -> CostModel:
    """Returns the model with the overlap that makes its prediction for NHD -> HND equal to the measurement."""
    num_bytes, num_runs = int(str(row["bytes"])), int(str(row["staged_runs"]))
    wire = model.transfer_s(Operation.READ, num_runs, num_bytes)
    copy = model.copy_s(num_bytes // 256, num_bytes)
    measured = num_bytes / (float(str(row["staged_gbps"])) * 1e9)
    overlap = (wire + copy + model.start_s - measured) / min(wire, copy)
    return CostModel(
        read=model.read, write=model.write, copy=model.copy, origin=model.origin, overlap=min(1.0, max(0.0, overlap))
    )


def _touch(end: LocalEnd) -> None:
    end.buffers[0].fill(1)


def _median(move: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        started_s = time.perf_counter()
        move()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[1:])  # the first warms up


def _transfers(end: LocalEnd, operation: Operation, repeats: int) -> tuple[tuple[int, float], ...]:
    """Measures scattered runs with the other end: (bytes of a run, seconds per run)."""
    size = len(end.buffers[0])
    curve = []
    for length in RUN_BYTES:
        count = min(MAX_RUNS, size // length // 2)
        if count < 4:
            break
        random = np.random.default_rng(length)
        # At most every second slot, and never in order, so that no two runs can be joined.
        there, here = (random.permutation(size // length // 2)[:count].astype(np.int64) * 2 * length for _ in range(2))
        runs = Runs(0, 0, there, here, np.full(count, length, np.int64))

        def move(runs: Runs = runs) -> None:
            ticket = end.transport.post(PREFILL, operation, [runs])
            while True:
                for done in end.transport.poll().completions:
                    if done.error is not None:
                        raise TransferError(done.error)
                    if done.ticket == ticket:
                        return
                time.sleep(20e-6)

        curve.append((length, _median(move, repeats) / count))
    return tuple(curve)


def _copies(end: LocalEnd, threads: int, repeats: int) -> tuple[tuple[int, float], ...]:
    """Measures unpacking from staging memory in the processor's cache: (bytes of a piece, seconds per piece)."""
    torch.set_num_threads(threads)
    cache = torch.from_numpy(end.buffers[0])
    curve = []
    for length in PIECE_BYTES:
        block_bytes = max(BLOCK_BYTES, 2 * length)
        pieces = block_bytes // length // 2
        ids = np.random.default_rng(length).permutation(len(cache) // block_bytes)
        per_chunk = min(len(ids), max(1, CHUNK_BYTES // (pieces * length)))
        if not per_chunk:
            break
        staging = torch.ones(per_chunk * pieces * length, dtype=torch.uint8)
        plans = []
        for first in range(0, len(ids) - per_chunk + 1, per_chunk):
            box = PackBox(
                region=0,
                offset=0,
                block_ids=ids[first : first + per_chunk],
                block_stride=block_bytes,
                dims=((pieces, 2 * length, length),),
                run_bytes=length,
                staging_offset=0,
                staging_block_stride=pieces * length,
            )
            plans.append(PackPlan(Side.DESTINATION, (box,), staging.numel()))

        def move(plans: list[PackPlan] = plans, staging: torch.Tensor = staging) -> None:
            for plan in plans:
                unpack(plan, staging, [cache])

        curve.append((length, _median(move, repeats) / (len(plans) * per_chunk * pieces)))
    return tuple(curve)
